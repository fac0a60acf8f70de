"""A way to the store that is slow, breaks, and says things twice, as proxies and bad networks do."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Self

from tests.lab.listener import Address, Listener
from tests.lab.namespace import Namespace

#: What is in the target of a request whose answer does not end, in etcd's v3 API and in Kubernetes.
_STREAMS = (b"/watch", b"watch=true")
#: In v2 the answer to such a request is one event.
_POLL = b"wait=true"
_CHUNKS = b"transfer-encoding:"


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens on the way. Shares are between 0 and 1.

    As each connection has delays of its own, what is said on one overtakes what is said on another.
    """

    #: Seconds before each answer, and each event of a watch, at least and at most.
    delay: tuple[float, float] = (0.0, 0.0)
    #: The share of answers, and of events, that break off in the middle, together with the connection.
    cut: float = 0.0
    #: The share of requests that are made twice, and the first answer is lost; and of events told twice.
    repeat: float = 0.0
    #: Whether a watch keeps the chunks in which the server sent it.
    chunked: bool = True


QUIET = Trouble()


class Proxy(Listener):
    """Passes HTTP without TLS on to ``target``. ``trouble`` may be changed at any time.

    With ``root``, as ``/v3beta``, it shows the API ``/v3`` there, and nothing at ``/v3``.
    """

    def __init__(
        self, namespace: Namespace | None, listen: Address, target: Address, seed: int = 0, root: str = "/v3"
    ) -> None:
        super().__init__(self._pass_on, listen, namespace)
        self.trouble = QUIET
        self._root = root.encode()
        self._target = target
        self._random = random.Random(seed)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Break all connections, and each new one at once, for a while."""
        self.shut()
        try:
            yield
        finally:
            self.reopen()

    # ---- one connection ----------------------------------------------------------------------

    def _pass_on(self, client: socket.socket) -> None:
        with self.connected(self._target) as server:
            self._relay(client, server)

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        asking, answering = client.makefile("rb"), server.makefile("rb")
        while True:
            head = _Head.read(asking).moved(self._root)
            request = head.encoded() + b"".join(head.body(asking))
            is_stream = any(mark in head.lines[0] for mark in _STREAMS)
            is_watch = is_stream or _POLL in head.lines[0]
            if not is_watch and self._chance(self.trouble.repeat):
                server.sendall(request)
                list(_Head.read(answering).body(answering))
            server.sendall(request)
            self._pass_back(answering, client, is_watch=is_watch, is_stream=is_stream)

    def _pass_back(
        self, answering: BinaryIO, client: socket.socket, *, is_watch: bool, is_stream: bool
    ) -> None:
        head = _Head.read(answering)
        unchunked = is_stream and not self.trouble.chunked
        self._wait()
        client.sendall((head.without(_CHUNKS) if unchunked else head).encoded())
        for piece in head.body(answering):
            data = _chunk(piece) if head.is_chunked and not unchunked else piece
            if is_watch:
                self._wait()
            if self._chance(self.trouble.cut):
                client.sendall(data[: len(data) // 2])
                raise EOFError
            client.sendall(data * 2 if is_stream and self._chance(self.trouble.repeat) else data)
        if unchunked:
            raise EOFError
        if head.is_chunked:
            client.sendall(_chunk(b""))

    def _wait(self) -> None:
        time.sleep(self._random.uniform(*self.trouble.delay))

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


@dataclass(frozen=True, slots=True)
class _Head:
    """The head of a request or an answer, line by line."""

    lines: tuple[bytes, ...]

    @classmethod
    def read(cls, file: BinaryIO) -> Self:
        lines = []
        while line := _line(file):
            lines.append(line)
        return cls(tuple(lines))

    def encoded(self) -> bytes:
        return b"".join(line + b"\r\n" for line in (*self.lines, b""))

    @property
    def is_chunked(self) -> bool:
        return self._field(_CHUNKS).lower() == b"chunked"

    def without(self, name: bytes) -> _Head:
        return _Head(tuple(line for line in self.lines if not line.lower().startswith(name)))

    def moved(self, root: bytes) -> _Head:
        """With the path of a request as it is where ``/v3`` is and not at ``root``."""
        first = self.lines[0]
        if root != b"/v3":
            first = first.replace(b" /v3/", b" /nowhere/").replace(b" %b/" % root, b" /v3/")
        return _Head((first, *self.lines[1:]))

    def body(self, file: BinaryIO) -> Iterator[bytes]:
        """What follows the head in the file: chunk by chunk, or all at once."""
        if self.is_chunked:
            while size := int(_line(file).partition(b";")[0], 16):
                yield file.read(size)
                _line(file)
            _line(file)
        elif length := int(self._field(b"content-length:") or 0):
            yield file.read(length)

    def _field(self, name: bytes) -> bytes:
        found = (line[len(name) :].strip() for line in self.lines if line.lower().startswith(name))
        return next(found, b"")


def _line(file: BinaryIO) -> bytes:
    line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.rstrip(b"\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
