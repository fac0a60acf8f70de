"""Addresses of hosts, looked up without blocking the caller, and of those with a connection to us."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from flanneld.runtime import clock

Address = IPv4Address | IPv6Address

#: Seconds between two lookups of the names.
_PERIOD = 60.0


class HostAddresses:
    """All addresses of hosts, which ``hosts`` returns as names or addresses. For any thread."""

    def __init__(self, hosts: Callable[[], Iterable[str]]) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self._is_busy = False
        self._due = -math.inf
        #: By name, the last answer of the resolver.
        self._answers: dict[str, frozenset[Address]] = {}

    def known(self) -> frozenset[Address]:
        """Return the addresses known by now. If it is time, look the names up in a thread of its own.

        A failed lookup changes nothing: the last answer stays.
        """
        found = {host: address_of(host) for host in self._hosts()}
        names = [host for host, address in found.items() if address is None]
        with self._lock:
            if names and not self._is_busy and clock.now() >= self._due:
                self._is_busy = True
                threading.Thread(target=self._look_up, args=(names,), name="resolver", daemon=True).start()
            resolved = [self._answers.get(name, frozenset()) for name in names]
        return frozenset(each for each in found.values() if each).union(*resolved)

    def _look_up(self, names: list[str]) -> None:
        for name in names:
            if addresses := look_up(name):
                with self._lock:
                    self._answers[name] = frozenset(addresses)
        with self._lock:
            self._is_busy, self._due = False, clock.now() + _PERIOD


def look_up(name: str) -> list[Address]:
    """Return the resolver's addresses for a name, none after a failure. Blocks until the resolver answers."""
    try:
        # As bytes, because for text Python would load its IDNA tables.
        answer = socket.getaddrinfo(name.encode("ascii"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [address for each in answer if (address := address_of(str(each[4][0])))]


def connected() -> frozenset[Address]:
    """Return the addresses of the hosts with which this process has a TCP connection."""
    found: set[Address] = set()
    for file in Path("/proc/self/fd").iterdir():
        try:
            sock = socket.socket(fileno=int(file.name))
        except OSError:
            continue  # It is no socket, or has been closed meanwhile.
        with suppress(OSError):
            peer = sock.getpeername()
            if sock.family in (socket.AF_INET, socket.AF_INET6) and (address := address_of(peer[0])):
                found.add(address)
        sock.detach()
    return frozenset(found)


def address_of(host: str) -> Address | None:
    """Return the address that a text is, None for a name. A mapped IPv4 address counts as one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
