"""What systemd would hear of a daemon, by sd_notify(3)."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from pathlib import Path

from tests.lab.namespace import Namespace

_FED = "WATCHDOG=1"
#: Messages that wait until a test reads them. The kernel's 10 are fewer than a daemon sends while it starts
#: beside others: it drops what finds no room, be it READY=1.
_ROOM = 1000


class ServiceManager:
    """The socket a daemon reports to, as ``$NOTIFY_SOCKET``; a namespace of the lab is its own."""

    def __init__(self, path: Path, namespace: Namespace) -> None:
        self.path = path
        self._heard: list[str] = []
        path.unlink(missing_ok=True)
        namespace.sysctl("net/unix/max_dgram_qlen", _ROOM)
        with namespace.entered():
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def heard(self) -> list[str]:
        """All messages so far, oldest first."""
        with suppress(BlockingIOError):
            while True:
                self._heard.append(self._socket.recv(4096).decode())
        return self._heard.copy()

    def ready(self) -> bool:
        """Has the daemon said that it is ready?"""
        return "READY=1" in self.heard()

    def silent(self, seconds: float) -> bool:
        """Did nothing more come for so long?"""
        self.heard()
        return not select.select([self._socket], [], [], seconds)[0]

    def fed(self, seconds: float) -> bool:
        """Did the watchdog get something more within so long?"""
        before, end = self.heard().count(_FED), time.monotonic() + seconds
        while self.heard().count(_FED) == before:
            left = end - time.monotonic()
            if left <= 0:
                return False
            select.select([self._socket], [], [], left)
        return True
