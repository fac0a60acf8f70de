"""A raw rtnetlink socket: many messages a send, filtered dumps, notifications (rtnetlink(7)).

pyroute2 spends 0.2 to 0.3 ms of CPU on a message and keeps nothing of that in a batch; packed
by hand a message costs about 1 us. With three objects for each of thousands of peers that is
the difference between seconds and milliseconds (docs/adr/0001).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

# linux/netlink.h
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP_INTR = 0x1, 0x4, 0x10
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE, NLM_F_ROOT_MATCH = 0x100, 0x200, 0x400, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
SOL_NETLINK = 270
NETLINK_ADD_MEMBERSHIP, NETLINK_DROP_MEMBERSHIP = 1, 2
NETLINK_CAP_ACK, NETLINK_GET_STRICT_CHK = 10, 12
NLA_TYPE_MASK = 0x3FFF

# Missing from Python's socket module (asm-generic/socket.h).
SO_RCVBUFFORCE = 33

HEADER = struct.Struct("=IHHII")
_FLAGS_OFFSET, _SEQ_OFFSET = 6, 8
_ATTR = struct.Struct("=HH")
_ERRNO = struct.Struct("=i")
_SEQ = struct.Struct("=I")

#: The kernel handles a whole send before it returns, so this bounds the time until a stop is seen.
_BATCH = 16 * 1024
_RECEIVE = 64 * 1024


#: Set in the sequence number of every question, never in that of a message that writes.
_QUESTION = 1 << 31


class DumpInterrupted(OSError):
    """The kernel's table changed in the middle of a dump: what was read may lack something."""


class Malformed(OSError):
    """No kernel sends this. An ``OSError``, so that it counts as a failed read and not as nothing."""

    def __init__(self) -> None:
        super().__init__(errno.EBADMSG, "the kernel's message is not understood")


def message(kind: int, flags: int, body: bytes, seq: int = 0) -> bytes:
    """One netlink message."""
    return HEADER.pack(HEADER.size + len(body), kind, flags | NLM_F_REQUEST, seq, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    return _ATTR.pack(4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def u32(kind: int, value: int) -> bytes:
    """An attribute that is a number of 32 bits, in the host's byte order."""
    return attribute(kind, struct.pack("=I", value))


def attributes(data: bytes, offset: int, end: int) -> dict[int, bytes]:
    """Split a run of attributes by type; one that does not fit ends the run."""
    found: dict[int, bytes] = {}
    while offset + 4 <= end:
        length, kind = _ATTR.unpack_from(data, offset)
        if length < 4 or offset + length > end:
            break
        found[kind & NLA_TYPE_MASK] = data[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return found


def text_of(found: Mapping[int, bytes], kind: int) -> str:
    """An attribute that is text, up to its terminating zero; empty if it is not there."""
    return found.get(kind, b"").rstrip(b"\0").decode(errors="replace")


def number_of(found: Mapping[int, bytes], kind: int) -> int | None:
    """An attribute that is a number of 32 bits, in the network's byte order as netfilter has them."""
    value = found.get(kind, b"")
    return int.from_bytes(value) if len(value) == 4 else None


def unpack(form: struct.Struct, data: bytes, offset: int, end: int) -> tuple[int, ...]:
    """The fixed part at the start of a message's body. Raises ``Malformed`` when it does not fit."""
    if offset + form.size > end or end > len(data):
        raise Malformed
    return form.unpack_from(data, offset)


def messages(data: bytes) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Walk what one receive returned: (type, flags, seq, port, offset, end), offset behind the header."""
    offset, end = 0, len(data)
    while offset + HEADER.size <= end:
        length, kind, flags, seq, port = HEADER.unpack_from(data, offset)
        if length < HEADER.size or offset + length > end:
            return
        yield kind, flags, seq, port, offset + HEADER.size, offset + length
        offset += (length + 3) & ~3


class NetlinkSocket:
    """One netlink socket, rtnetlink's unless another ``protocol`` (NETLINK_*) is named; used by one thread.

    ``groups`` are the multicast groups (RTNLGRP_*) to listen to; a listening socket does nothing else.
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
        """The port the kernel names as the author of what this socket changed."""
        port: int = self._socket.getsockname()[0]
        return port

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _set(self, option: int, value: int) -> None:
        # Both options are conveniences that older kernels lack.
        with suppress(OSError):
            self._socket.setsockopt(SOL_NETLINK, option, value)

    def _widen(self, size: int) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def write(self, batch: Iterable[bytes]) -> Iterator[list[tuple[int, int]]]:
        """Send messages, many at a time; after each send yield what failed as (place in the batch, errno).

        The sequence number of a message must be its place; places ascend. Only the last message of a send
        asks for an acknowledgement, so the kernel answers for that one and for those that failed.

        The kernel sees numbers that this socket never used before: an answer that an earlier failure left
        unread is for none of them.
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
        """Ask for a whole table: (data, offset, end) for each object, offset behind the netlink header.

        Raises ``DumpInterrupted`` at the end if the table changed meanwhile, ``OSError`` for a refusal.
        """
        interrupted = False
        for reply, flags, data, offset, end in self._answers(kind, NLM_F_ROOT_MATCH, body):
            interrupted |= bool(flags & NLM_F_DUMP_INTR)
            if reply in (NLMSG_DONE, NLMSG_ERROR):
                _raise_for(unpack(_ERRNO, data, offset, end)[0])
                if interrupted:
                    raise DumpInterrupted(errno.EINTR, "the table changed during the dump")
                return
            yield data, offset, end

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        """Ask for one object. Raises ``OSError`` with the kernel's errno when there is none."""
        reply, _, data, offset, end = next(self._answers(kind, 0, body))
        if reply == NLMSG_ERROR:
            _raise_for(unpack(_ERRNO, data, offset, end)[0])
            raise Malformed
        return data, offset, end

    def _answers(self, kind: int, flags: int, body: bytes) -> Iterator[tuple[int, int, bytes, int, int]]:
        """Ask, and give (type, flags, data, offset, end) of each answer to just this question.

        What an earlier failure left unread is passed over: it must not be taken for an empty table.
        """
        self._asked += 1
        question = _QUESTION | self._asked % _QUESTION
        self._socket.send(message(kind, flags, body, question))
        while True:
            data = self._next_answer()
            for reply, reply_flags, seq, _, offset, end in messages(data):
                if seq == question:
                    yield reply, reply_flags, data, offset, end

    def _next_answer(self) -> bytes:
        """Wait for an answer; empty the socket when that fails.

        After an overrun the kernel drops every answer, the one to the next batch too, until the socket is
        empty (net/netlink/af_netlink.c, NETLINK_S_CONGESTED).
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
        """Be told of changes, from now on."""
        for group in self._groups:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)

    def turn_deaf(self) -> None:
        """Be told no more; what has been notified can still be received."""
        for group in self._groups:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_DROP_MEMBERSHIP, group)

    def receive(self) -> bytes:
        """What has been notified. Raises ``BlockingIOError`` for nothing, ENOBUFS after an overrun."""
        return self._socket.recv(_RECEIVE)


def _raise_for(code: int) -> None:
    if code < 0:
        raise OSError(-code, os.strerror(-code))
