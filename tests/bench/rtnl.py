"""What the kernel of a node holds and tells, at a price that does not disturb what is measured.

It reads rtnetlink(7) by itself and not through the daemon's own code, which is what is being tested.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Self

from tests.bench.cluster import Peer
from tests.lab.namespace import Namespace

# linux/rtnetlink.h, linux/neighbour.h, linux/netlink.h
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30
RTMGRP_NEIGH, RTMGRP_IPV4_ROUTE = 0x4, 0x40
RTA_DST = NDA_DST = 1
NDA_LLADDR = 2
NUD_PERMANENT = 0x80
AF_BRIDGE = 7
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
SO_RCVBUFFORCE = 33

_HEADER = struct.Struct("=IHHII")
_NDMSG = struct.Struct("=BxxxiHBB")
_RTMSG = struct.Struct("=BBBBBBBBI")
_ATTR = struct.Struct("=HH")

#: Bytes for the notifications of thousands of peers that come or go at once.
_ROOM = 64 << 20

#: A notification reduced to what tells objects apart.
Object = tuple[str, bytes]


class KernelState:
    """Watches what leads to peers appear in a node's kernel; what is there when it is made does not count.

    The routing trie's own statistics are looked at first since they cost 50 times less than a dump; dumps of
    the FDB, which hold the lock that all writers need, come last. What was complete is not looked at again.
    """

    def __init__(self, namespace: Namespace, backend: str, peers: int, *, dual: bool = False) -> None:
        self._namespace = namespace
        self._peers = peers
        with namespace.entered():
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            self._trie = os.open("/proc/thread-self/net/fib_triestat", os.O_RDONLY)
        self._socket.settimeout(10)
        before = self._prefixes()
        self._to_see: list[tuple[str, Callable[[], int]]] = [
            ("routes", lambda: self._prefixes() - before),
            ("routes", self._routes),
        ]
        if backend == "wireguard":
            # Go has one route for all of them.
            self._to_see = [("WireGuard peers", self._wireguard)]
        if backend == "vxlan":
            self._to_see += [("ARP entries", self._neighbors), ("FDB entries", self._fdb)]
        if dual:
            self._to_see.append(("IPv6 routes", partial(self._routes, socket.AF_INET6, 64)))
        if dual and backend == "vxlan":
            self._to_see += [
                ("IPv6 neighbours", partial(self._neighbors, socket.AF_INET6)),
                ("FDB entries for IPv6", partial(self._fdb, "flannel-v6.1")),
            ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._trie)
        self._socket.close()

    def missing(self) -> str:
        """The first thing that is not complete and how much of it lacks, ``""`` when everything is there."""
        while self._to_see:
            name, count = self._to_see[0]
            if (number := self._peers - count()) > 0:
                return f"{number} {name}"
            del self._to_see[0]
        return ""

    def _prefixes(self) -> int:
        """How many routes the main table has, with those of the local table as long as both share a trie."""
        text = os.pread(self._trie, 16384, 0)
        return int(text.partition(b"Main:")[2].partition(b"Prefixes:")[2].split(maxsplit=1)[0])

    def _routes(self, family: int = socket.AF_INET, length: int = 24) -> int:
        request = _RTMSG.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
        return self._count(RTM_GETROUTE, request, lambda data, at: data[at + 1] == length)

    def _neighbors(self, family: int = socket.AF_INET) -> int:
        request = _NDMSG.pack(family, 0, 0, 0, 0)
        return self._count(RTM_GETNEIGH, request, lambda data, at: bool(data[at + 8] & NUD_PERMANENT))

    def _fdb(self, device: str = "flannel.1") -> int:
        with self._namespace.entered():
            vtep = socket.if_nametoindex(device)
        request = _NDMSG.pack(AF_BRIDGE, 0, 0, 0, 0)
        return self._count(RTM_GETNEIGH, request, lambda data, at: _NDMSG.unpack_from(data, at)[1] == vtep)

    def _wireguard(self) -> int:
        """Count the peers with an allowed IP. This kernel tells nobody of its peers, so wg(8) reads all."""
        shown = self._namespace.run("wg", "show", "flannel-wg", "allowed-ips", check=False).stdout
        return shown.count("/24")

    def _count(self, kind: int, request: bytes, counts: Callable[[bytes, int], bool]) -> int:
        self._socket.send(_HEADER.pack(_HEADER.size + len(request), kind, _DUMP, 0, 0) + request)
        number = 0
        while True:
            data = self._socket.recv(65536)
            for reply, at, _ in _messages(data):
                if reply in (_DONE, _ERROR):
                    return number
                number += counts(data, at)


class Notifications:
    """Listens to what a node's kernel tells about routes and neighbours."""

    def __init__(self, namespace: Namespace) -> None:
        with namespace.entered():
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _ROOM)
        self._socket.bind((0, RTMGRP_NEIGH | RTMGRP_IPV4_ROUTE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def wait(self, kinds: tuple[int, int], objects: set[Object], deadline: float) -> float:
        """Wait until all of these were told of and return the moment (monotonic seconds) of the last.

        Raises ``AssertionError`` with what is left after ``deadline`` seconds.
        """
        left = set(objects)
        end = time.monotonic() + deadline
        while left:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            with suppress(TimeoutError):
                data = self._socket.recv(65536)
                now = time.monotonic()
                left -= {_named(data, *message) for message in _messages(data) if message[0] in kinds}
            assert not left or time.monotonic() < end, (
                f"not told of within {deadline:g} s: {len(left)} objects, such as {sorted(left)[:3]}"
            )
        return now


ADDED = (RTM_NEWROUTE, RTM_NEWNEIGH)
REMOVED = (RTM_DELROUTE, RTM_DELNEIGH)


def objects(peer: Peer, backend: str) -> set[Object]:
    """What a peer is made of in the kernel, of IPv4."""
    subnet = peer.subnet.network_address.packed
    route: set[Object] = {("route", subnet)}
    return route | {("arp", subnet), ("fdb", peer.mac)} if backend == "vxlan" else route


def _named(data: bytes, kind: int, at: int, end: int) -> Object:
    if kind in (RTM_NEWROUTE, RTM_DELROUTE):
        return "route", _attributes(data, at + _RTMSG.size, end).get(RTA_DST, b"")
    found = _attributes(data, at + _NDMSG.size, end)
    return ("fdb", found.get(NDA_LLADDR, b"")) if data[at] == AF_BRIDGE else ("arp", found.get(NDA_DST, b""))


def _messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Of each message its type, and where its body begins and ends."""
    at = 0
    while at < len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        yield kind, at + _HEADER.size, at + length
        at += (length + 3) & ~3


def _attributes(data: bytes, at: int, end: int) -> dict[int, bytes]:
    found = {}
    while at + _ATTR.size <= end:
        length, kind = _ATTR.unpack_from(data, at)
        found[kind] = data[at + _ATTR.size : at + length]
        at += (max(length, _ATTR.size) + 3) & ~3
    return found
