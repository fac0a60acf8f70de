"""Status socket: each connection receives the daemon's status as a JSON document.

Without connections it costs one sleeping thread and one file descriptor. The socket lies beside the subnet
file and has mode 0600.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from flanneld.runtime import clock, waits
from flanneld.runtime.sockets.server import WRITABLE, Conversation, Limits, PolledServer, send
from flanneld.subnet.subnet_file import beside

log = logging.getLogger(__name__)

#: Seconds for one reader, from its connection to the last byte. 65,000 peers take 2 s of CPU.
READER_TIME = 30.0
#: Readers at a time. One more replaces the oldest, so that stuck readers do not block others.
READERS = 16
#: Backlog of connections to accept.
_QUEUE = 64


def path_beside(subnet_file: Path) -> Path:
    """Return the socket's path: ``flanneld.sock`` beside ``subnet.env``, another name beside ``blue.env``."""
    return beside(subnet_file, "sock")


class StatusSocket:
    """Server of the status socket. ``document`` yields the answer in pieces, in the thread of ``serve``."""

    def __init__(self, path: Path, document: Callable[[], Iterable[bytes]]) -> None:
        self._path = path
        self._document = document
        self._server: PolledServer | None = None
        self._inode = 0

    def open(self) -> bool:
        """Listen, replacing an existing socket. Return False, with a log line, if that is impossible."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(0o755, parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            # Before it has a name, because another file could take that name before a chmod.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(str(new))
            listener.listen(_QUEUE)
            self._inode = new.lstat().st_ino
            new.replace(self._path)
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            log.warning("No status socket at %s: %s", self._path, error)
            return False
        limits = Limits(READER_TIME, connections=READERS, per_source=READERS)
        self._server = PolledServer(listener, self._tell, limits, "Cannot tell our status")
        return True

    def serve(self) -> None:
        """Answer until ``close``."""
        assert self._server is not None
        self._server.serve()

    def _tell(self, reader: socket.socket) -> Conversation:
        for piece in self._document():
            yield from send(reader, piece)
            yield WRITABLE  # let other readers proceed

    def close(self) -> None:
        """End ``serve`` at once. May be called repeatedly, from any thread."""
        # First, because the process may end as soon as ``serve`` does.
        with contextlib.suppress(OSError):  # closed or removed already
            # A successor may have replaced it.
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        if self._server is not None:
            self._server.close()


def ask(path: Path, within: float) -> bytes:
    """Return the status of the daemon behind a socket.

    Raises ``OSError``, which is ``TimeoutError`` after ``within`` seconds of silence.
    """
    deadline = clock.now() + READER_TIME
    said = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(within)
        _connect(connection, path, within)
        while True:
            left = deadline - clock.now()
            if left <= 0:
                raise TimeoutError(f"no whole answer within {READER_TIME:g} s")
            connection.settimeout(min(left, within))
            piece = connection.recv(1 << 16)
            if not piece:
                return bytes(said)
            said += piece


def _connect(connection: socket.socket, path: Path, within: float) -> None:
    def attempt() -> bool:
        try:
            connection.connect(str(path))
        except BlockingIOError:  # the backlog is full
            return False
        return True

    if not waits.until(attempt, within=within, every=0.05):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
