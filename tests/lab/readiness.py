"""Hearing from a daemon that it is ready, by systemd's protocol (sd_notify(3))."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


class Readiness:
    """The socket a daemon reports to, as ``$NOTIFY_SOCKET``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reported = False
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def reported(self) -> bool:
        """Has it said that it is ready?"""
        with suppress(BlockingIOError):
            while True:
                self._reported |= b"READY=1" in self._socket.recv(4096).split(b"\n")
        return self._reported
