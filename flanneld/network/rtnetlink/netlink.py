"""Raw rtnetlink socket with batched writes, filtered dumps and notifications (rtnetlink(7)).

pyroute2 takes 0.2 to 0.3 ms of CPU per message, also within a batch. A message packed with ``struct`` takes
about 1 us. With three objects for each of thousands of peers that is seconds against milliseconds
(docs/adr/0001).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fcntl import ioctl

from flanneld.network.socket_filters import drop_changes_by

# linux/netlink.h
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR = 0x1, 0x4, 0x10
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE, NLM_F_ROOT_MATCH = 0x100, 0x200, 0x400, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
SOL_NETLINK = 270
NETLINK_ADD_MEMBERSHIP, NETLINK_DROP_MEMBERSHIP = 1, 2
NETLINK_CAP_ACK, NETLINK_GET_STRICT_CHK = 10, 12
NLA_TYPE_MASK = 0x3FFF

# linux/sockios.h, and struct ifreq of linux/if.h: a name and a union of 24 bytes.
_SIOCGIFINDEX = 0x8933
_IFREQ = struct.Struct("=16si20x")
_LONGEST_NAME = 15

# Missing from Python's socket module (asm-generic/socket.h).
SO_RCVBUFFORCE = 33

HEADER = struct.Struct("=IHHII")
_FLAGS_OFFSET, _SEQ_OFFSET = 6, 8
_ATTR = struct.Struct("=HH")
_ERRNO = struct.Struct("=i")
_SEQ = struct.Struct("=I")

#: Bytes per send. The kernel processes a whole send before it returns, so this bounds the delay of a stop.
_BATCH = 16 * 1024
_RECEIVE = 64 * 1024


#: Bit set in the sequence numbers of requests that read, never in those that write.
_QUESTION = 1 << 31


class DumpInterrupted(InterruptedError):
    """Error for a table that changed during its dump: objects may be missing."""


class MalformedNetlink(OSError):
    """Error for a message that no kernel sends.

    As an ``OSError`` it counts as a failed read, not as empty.
    """

    def __init__(self) -> None:
        super().__init__(errno.EBADMSG, "the kernel's message is not understood")


def message(kind: int, flags: int, body: bytes, seq: int = 0) -> bytes:
    """Return one netlink message."""
    return HEADER.pack(HEADER.size + len(body), kind, flags | NLM_F_REQUEST, seq, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """Return one attribute, padded to four bytes."""
    return _ATTR.pack(4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def u32(kind: int, value: int) -> bytes:
    """Return an attribute with a 32-bit number in host byte order."""
    return attribute(kind, struct.pack("=I", value))


def attributes(data: bytes, offset: int, end: int) -> dict[int, bytes]:
    """Return a sequence of attributes by type, up to the first invalid one."""
    found: dict[int, bytes] = {}
    while offset + 4 <= end:
        length, kind = _ATTR.unpack_from(data, offset)
        if length < 4 or offset + length > end:
            break
        found[kind & NLA_TYPE_MASK] = data[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return found


def text_of(found: Mapping[int, bytes], kind: int) -> str:
    """Return the text of an attribute without its terminating zero; empty if it is missing."""
    return found.get(kind, b"").rstrip(b"\0").decode(errors="replace")


def number_of(found: Mapping[int, bytes], kind: int) -> int | None:
    """Return the number of a 32-bit attribute in network byte order, as netfilter uses it."""
    value = found.get(kind, b"")
    return int.from_bytes(value) if len(value) == 4 else None


def unpack(form: struct.Struct, data: bytes, offset: int, end: int) -> tuple[int, ...]:
    """Unpack the fixed start of a message's body. Raises ``MalformedNetlink`` if it is too short."""
    if offset + form.size > end or end > len(data):
        raise MalformedNetlink
    return form.unpack_from(data, offset)


def messages(data: bytes) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield (type, flags, seq, port, offset, end) of each message; the offset is behind the header."""
    offset, end = 0, len(data)
    while offset + HEADER.size <= end:
        length, kind, flags, seq, port = HEADER.unpack_from(data, offset)
        if length < HEADER.size or offset + length > end:
            return
        yield kind, flags, seq, port, offset + HEADER.size, offset + length
        offset += (length + 3) & ~3


class NetlinkSocket:
    """A netlink socket for one thread. ``protocol`` is NETLINK_*, by default rtnetlink's.

    ``groups`` are the multicast groups (RTNLGRP_*) to listen to. A listening socket is used for nothing else.
    """

    def __init__(
        self, groups: Sequence[int] = (), receive_buffer: int = 1 << 20, *, protocol: int = 0
    ) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._asked = 0
        self._written = 0
        self._socket.bind((0, 0))
        self._widen(receive_buffer)
        self._set(NETLINK_CAP_ACK, 1)
        self._set(NETLINK_GET_STRICT_CHK, 1)
        self._groups = groups
        if groups:
            self._socket.setblocking(False)
            self.listen()

    @property
    def port(self) -> int:
        """The netlink port that notifications name as the author of this socket's changes."""
        port: int = self._socket.getsockname()[0]
        return port

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _set(self, option: int, value: int) -> None:
        # Optional: older kernels lack both options.
        with suppress(OSError):
            self._socket.setsockopt(SOL_NETLINK, option, value)

    def ignore(self, port: int) -> None:
        """Let the kernel drop notifications of the changes by this netlink port."""
        drop_changes_by(self._socket, port)

    def _widen(self, size: int) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def index_of(self, name: str) -> int:
        """Return the number of an interface. Raises ``OSError`` if there is none of this name.

        ``socket.if_nametoindex`` opens a socket for each call and keeps the interpreter lock meanwhile.
        """
        raw = os.fsencode(name)
        if len(raw) > _LONGEST_NAME:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        try:
            answer = ioctl(self._socket, _SIOCGIFINDEX, _IFREQ.pack(raw, 0))
        except ValueError:  # the socket is closed
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
        index: int = _IFREQ.unpack(answer)[1]
        return index

    def write(self, batch: Iterable[bytes]) -> Iterator[list[tuple[int, int]]]:
        """Send messages in batches; after each send yield its failures as (position, errno).

        The sequence number of a message must be its position; positions ascend. Only the last message of a
        send requests an acknowledgement, so the kernel answers that one and the failed ones.

        On the wire each sequence number is used once per socket, so a late answer to a failed send matches
        none.
        """
        first = self._written
        buffer = bytearray()
        last = 0
        for item in batch:
            if buffer and len(buffer) + len(item) > _BATCH:
                yield self._send(buffer, last, first)
                buffer.clear()
            last = len(buffer)
            buffer += item
            number = first + _SEQ.unpack_from(item, _SEQ_OFFSET)[0]
            _SEQ.pack_into(buffer, last + _SEQ_OFFSET, number % _QUESTION)
            self._written = number + 1
        if buffer:
            yield self._send(buffer, last, first)

    def _send(self, buffer: bytearray, last: int, first: int) -> list[tuple[int, int]]:
        (flags,) = struct.unpack_from("=H", buffer, last + _FLAGS_OFFSET)
        struct.pack_into("=H", buffer, last + _FLAGS_OFFSET, flags | NLM_F_ACK)
        (final,) = _SEQ.unpack_from(buffer, last + _SEQ_OFFSET)
        (earliest,) = _SEQ.unpack_from(buffer, _SEQ_OFFSET)
        expected = (final - earliest) % _QUESTION
        self._socket.send(buffer)
        failed = []
        while True:
            data = self._next_answer()
            for kind, _, seq, _, offset, end in messages(data):
                is_stale = seq >= _QUESTION or (seq - earliest) % _QUESTION > expected
                if kind != NLMSG_ERROR or is_stale:
                    continue
                (code,) = unpack(_ERRNO, data, offset, end)
                if code:
                    failed.append(((seq - first) % _QUESTION, -code))
                if seq == final:
                    return failed

    def dump(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        """Dump a table: yield (data, offset, end) of each object, with the offset behind the header.

        Raises ``DumpInterrupted`` at the end if the table changed meanwhile, ``OSError`` for a refusal.
        """
        interrupted = 0
        question = self._request(kind, NLM_F_ROOT_MATCH, body)
        while True:
            data = self._next_answer()
            for reply, flags, seq, _, offset, end in messages(data):
                if seq != question:
                    continue
                interrupted |= flags & NLM_F_DUMP_INTR
                if reply in (NLMSG_DONE, NLMSG_ERROR):
                    _raise_for(unpack(_ERRNO, data, offset, end)[0])
                    if interrupted:
                        raise DumpInterrupted(errno.EINTR, "the table changed during the dump")
                    return
                yield data, offset, end

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        """Request one object. Raises ``OSError`` with the kernel's errno if there is none."""
        question = self._request(kind, 0, body)
        while True:
            data = self._next_answer()
            for reply, _, seq, _, offset, end in messages(data):
                if seq != question:
                    continue
                if reply == NLMSG_ERROR:
                    _raise_for(unpack(_ERRNO, data, offset, end)[0])
                    raise MalformedNetlink
                return data, offset, end

    def _request(self, kind: int, flags: int, body: bytes) -> int:
        """Send a request. Return its sequence number, which all its answers have.

        Late answers to a failed request have another: they must not be taken for an empty table.
        """
        self._asked += 1
        question = _QUESTION | self._asked % _QUESTION
        self._socket.send(message(kind, flags, body, question))
        return question

    def _next_answer(self) -> bytes:
        """Wait for an answer. Empty the socket if that fails.

        After an overrun the kernel drops every answer, also to the next batch, until the socket is empty
        (net/netlink/af_netlink.c, NETLINK_S_CONGESTED).
        """
        try:
            return self._socket.recv(_RECEIVE)
        except OSError:
            self._drain()
            raise

    def _drain(self) -> None:
        while True:
            try:
                self._socket.recv(_RECEIVE, socket.MSG_DONTWAIT)
            except OSError as failure:
                if failure.errno != errno.ENOBUFS:
                    return

    def listen(self) -> None:
        """Subscribe to notifications."""
        for group in self._groups:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)

    def stop_listening(self) -> None:
        """Unsubscribe from notifications; pending ones can still be received."""
        for group in self._groups:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_DROP_MEMBERSHIP, group)

    def receive(self) -> bytes:
        """Return the next notification.

        Raises ``BlockingIOError`` if there is none, ENOBUFS after an overrun.
        """
        return self._socket.recv(_RECEIVE)


def _raise_for(code: int) -> None:
    if code < 0:
        raise OSError(-code, os.strerror(-code))
