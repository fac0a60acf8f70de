"""What changes in a node's kernel while something else happens, whoever does it (rtnetlink(7)).

It reads netlink by itself and not through the daemon's own code, which is what is being tested.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import Self

from tests.lab.namespace import Namespace

# linux/rtnetlink.h, linux/neighbour.h, linux/if_link.h
NEWLINK, DELLINK, NEWADDR, DELADDR, NEWROUTE, DELROUTE, NEWNEIGH, DELNEIGH = 16, 17, 20, 21, 24, 25, 28, 29
WHAT = {16: "link", 20: "address", 24: "route", 28: "neighbor"}
NUD_PERMANENT = 0x80
AF_INET6, SCOPE_LINK, PROTOCOL_KERNEL = 10, 253, 2
#: RTMGRP_LINK, _NEIGH, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE
GROUPS = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400
SO_RCVBUFFORCE = 33

#: The containers' side of a node.
CONTAINERS = ("cni0", "veth")

_HEADER = struct.Struct("=IHHII")
_NDMSG = struct.Struct("=BxxxiHBB")
_IFINFOMSG_SIZE = 16


class Changes:
    """Listens from its making on, to be used in a ``with``.

    The devices of containers do not count, nor what the kernel does by itself, and in its own time: what it
    learns about its neighbours, link-local addresses, and the routes that follow from addresses.
    """

    def __init__(self, namespace: Namespace) -> None:
        with namespace.entered():
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 20)
        self._socket.bind((0, GROUPS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def seen(self) -> list[str]:
        """What has changed since this was asked last: ``new route``, ``link eth0 gone`` and so on."""
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
        body = data[at + _HEADER.size : at + length]
        gone = kind % 2
        what = WHAT[kind - gone]
        if kind in (NEWLINK, DELLINK):
            what = f"{what} {_link_name(body)}"
        if not _is_the_kernels(kind, body) and not what.startswith(
            tuple(f"link {name}" for name in CONTAINERS)
        ):
            yield f"{what} gone" if gone else f"new {what}"
        at += (length + 3) & ~3


def _is_the_kernels(kind: int, body: bytes) -> bool:
    """Whether the kernel does such a thing without being told to."""
    if kind in (NEWNEIGH, DELNEIGH):
        return not _NDMSG.unpack_from(body)[2] & NUD_PERMANENT
    if kind in (NEWADDR, DELADDR):
        family, _, _, scope = body[:4]  # struct ifaddrmsg
        return (family, scope) == (AF_INET6, SCOPE_LINK)
    if kind in (NEWROUTE, DELROUTE):
        return body[5] == PROTOCOL_KERNEL  # of struct rtmsg
    return False


def _link_name(body: bytes) -> str:
    """IFLA_IFNAME, which the kernel writes first."""
    size, _ = struct.unpack_from("=HH", body, _IFINFOMSG_SIZE)
    return body[_IFINFOMSG_SIZE + 4 : _IFINFOMSG_SIZE + size].rstrip(b"\0").decode()
