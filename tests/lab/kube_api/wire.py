"""HTTP/1.1 on the wire: chunks as Go's net/http makes them, keep-alive, and answers that break off.

An answer of up to 2048 bytes has a Content-Length; a longer one, and every watch, goes out in chunks; what is
written passes through a buffer of 2048 bytes first (chunkWriter in net/http/server.go).
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from uuid import uuid4

from tests.lab.kube_api.faults import UNANSWERED, Cut, Fault

BUFFER = 2048
GZIP_FROM = 128 * 1024  # bytes; smaller answers are never compressed
_NO_LINGER = struct.pack("ii", 1, 0)
#: One for each start of the server, as the objects behind it have.
_FLOW_SCHEMA, _PRIORITY_LEVEL = uuid4(), uuid4()


class Response:
    """Writes one answer: ``write`` any number of times, ``flush`` in a stream, ``finish`` at the end."""

    def __init__(self, sock: socket.socket, fault: Fault, *, keep_alive: bool) -> None:
        self._sock = sock
        self._fault = fault
        self._keep_alive = keep_alive
        self._head = b""
        self._started = False
        self._buffer = bytearray()
        self._limit = fault.cut if isinstance(fault.cut, int) else None
        self._taken = 0  # bytes of the body that were written to us
        self._sent = 0  # and those that went out
        self._chunked = False

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Prepare status line and headers; they go out with the first bytes of the body, or ``flush``."""
        if self._limit == UNANSWERED:
            raise Cut(self._fault.then)
        lines = [f"HTTP/1.1 {status} {_phrase(status)}", f"Audit-Id: {uuid4()}"]
        lines += ["Cache-Control: no-cache, private"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if status != HTTPStatus.UNAUTHORIZED:
            lines += [f"X-Kubernetes-Pf-Flowschema-Uid: {_FLOW_SCHEMA}"]
            lines += [f"X-Kubernetes-Pf-Prioritylevel-Uid: {_PRIORITY_LEVEL}"]
        lines += [f"Date: {formatdate(usegmt=True)}"]
        self._head = "\r\n".join(lines).encode()

    def write(self, data: bytes) -> None:
        """Add to the body, by way of the buffer."""
        self._look_for_cut(data)
        self._taken += len(data)
        rest = memoryview(data)
        while len(rest) > BUFFER - len(self._buffer):
            if not self._buffer:
                self._chunks(bytes(rest))
                return
            room = BUFFER - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            self._empty_buffer()
        self._buffer += rest

    def flush(self) -> None:
        """Send what there is, be it the header only."""
        if self._buffer:
            self._empty_buffer()
        elif not self._started:
            self._start("Transfer-Encoding: chunked")

    def finish(self) -> None:
        """End the body."""
        if not self._started:
            self._start(f"Content-Length: {len(self._buffer)}")
            self._part(bytes(self._buffer))
            return
        if self._buffer:
            self._empty_buffer()
        self._send(b"0\r\n\r\n")

    def end(self, then: str) -> None:
        """Break off."""
        if then == "end" and self._started and self._chunked:
            self._send(b"0\r\n\r\n")
        elif then == "reset":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        elif then == "stall":
            self._sock.recv(1)  # until the client or a test closes the connection

    def _start(self, framing: str) -> None:
        self._started = True
        self._chunked = framing.startswith("Transfer")
        last = [] if self._keep_alive else ["Connection: close"]
        # Go sorts a length before Connection and an encoding after it.
        lines = [*last, framing] if self._chunked else [framing, *last]
        self._send(self._head + "".join(f"\r\n{line}" for line in lines).encode() + b"\r\n\r\n")

    def _empty_buffer(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        self._chunks(data)

    def _chunks(self, data: bytes) -> None:
        if not self._started:
            self._start("Transfer-Encoding: chunked")
        size = self._fault.chunk or len(data)
        for at in range(0, len(data), size):
            self._part(data[at : at + size])

    def _part(self, data: bytes) -> None:
        """Send a piece of the body in its frame, or as much of it as the cut allows."""
        left = len(data) if self._limit is None else self._limit - self._sent
        self._sent += len(data)
        if left >= len(data) and self._sent != self._limit:
            self._send(_framed(data, len(data)) if self._chunked else data)
            return
        cut = data[:left]
        if not self._chunked:
            self._send(cut)
        elif self._fault.then == "end":
            self._send(_framed(cut, left) if cut else b"")
        else:
            # The frame promises more than comes, unless the cut is between two chunks.
            self._send(_framed(cut, len(data), whole=left == len(data)))
        raise Cut(self._fault.then)

    def _look_for_cut(self, data: bytes) -> None:
        if self._limit is None and isinstance(self._fault.cut, str):
            found = data.find(self._fault.cut.encode())
            if found >= 0:
                self._limit = self._taken + found + 1

    def _send(self, data: bytes) -> None:
        if not self._fault.piece:
            self._sock.sendall(data)
            return
        for at in range(0, len(data), self._fault.piece):
            self._sock.sendall(data[at : at + self._fault.piece])
            time.sleep(self._fault.pause)


def compressed(pieces: Iterable[bytes]) -> Iterable[bytes]:
    """gzip, as little as the server does it (level 1)."""
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    for piece in pieces:
        if packed := packer.compress(piece):
            yield packed
    yield packer.flush()


def _framed(data: bytes, size: int, *, whole: bool = True) -> bytes:
    return b"%x\r\n%b%b" % (size, data, b"\r\n" if whole else b"")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "status code"
