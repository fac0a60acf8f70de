"""What changes in a node's kernel while something else happens, whoever does it (rtnetlink(7)).

It reads netlink by itself and not through the daemon's own code, which is what is being tested.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from tests.lab.namespace import Namespace

# linux/rtnetlink.h, linux/neighbour.h
NEWNEIGH, DELNEIGH = 28, 29
NUD_PERMANENT = 0x80
#: RTMGRP_LINK, _NEIGH, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE
GROUPS = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400
SO_RCVBUFFORCE = 33

_HEADER = struct.Struct("=IHHII")
_NDMSG = struct.Struct("=BxxxiHBB")
_NAMES = {
    16: "new link", 17: "link gone", 20: "new address", 21: "address gone",
    24: "new route", 25: "route gone", 28: "new neighbor", 29: "neighbor gone",
}  # fmt: skip


class Changes:
    """Listens from its making on, to be used in a ``with``.

    What the kernel learns by itself about neighbours does not count, only permanent entries do.
    """

    def __init__(self, namespace: Namespace) -> None:
        with namespace.entered():
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 20)
        self._socket.bind((0, GROUPS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def seen(self) -> list[str]:
        """What has changed since this was asked last: ``new route`` and so on."""
        return self.during(0)

    def during(self, seconds: float) -> list[str]:
        """The same, and what changes in so many seconds from now."""
        end = time.monotonic() + seconds
        found: list[str] = []
        while True:
            left = end - time.monotonic()
            self._socket.settimeout(max(left, 0))
            try:
                found += _described(self._socket.recv(65536))
            except (TimeoutError, BlockingIOError):
                if left <= 0:
                    return found


def _described(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind not in (NEWNEIGH, DELNEIGH) or _is_permanent(data, at + _HEADER.size):
            yield _NAMES.get(kind, str(kind))
        at += (length + 3) & ~3


def _is_permanent(data: bytes, at: int) -> bool:
    state: int = _NDMSG.unpack_from(data, at)[2]
    return bool(state & NUD_PERMANENT)
