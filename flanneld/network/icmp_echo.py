"""ICMP echo request to another host (RFC 792, RFC 4443 section 4)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from flanneld.model import Family, IPAddress
from flanneld.runtime import clock
from flanneld.runtime.randomness import random_bytes

_REQUEST: dict[Family, int] = {4: 8, 6: 128}
_REPLY: dict[Family, int] = {4: 0, 6: 129}
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence number
_TOKEN_LENGTH = 16
_LONGEST = 2048
#: Seconds between two calls of ``is_wanted``.
_NAP = 0.2


def ask(target: IPAddress, within: float, is_wanted: Callable[[], bool] = lambda: True) -> float | None:
    """Return the round-trip time in seconds, None without a reply in time, a route, or further interest.

    Raises ``OSError`` if this process may not send ICMP at all.
    """
    token = random_bytes(_TOKEN_LENGTH)
    with _new_socket(target.version) as connection:
        began = clock.now()
        try:
            connection.connect((str(target), 0))
            connection.send(request(target.version, token))
        except OSError:
            return None
        while is_wanted() and (left := began + within - clock.now()) > 0:
            connection.settimeout(min(left, _NAP))
            try:
                data = connection.recv(_LONGEST)
            except TimeoutError:
                continue
            except OSError:  # an ICMP error from a router
                return None
            if answers(target.version, data, token, with_header=connection.type == socket.SOCK_RAW):
                return clock.now() - began
    return None


def _new_socket(family: Family) -> socket.socket:
    """Return a ping socket if net.ipv4.ping_group_range permits it, else a raw socket.

    The kernel filters replies for a ping socket. A raw one receives all.
    """
    domain = socket.AF_INET if family == 4 else socket.AF_INET6
    protocol = socket.IPPROTO_ICMP if family == 4 else socket.IPPROTO_ICMPV6
    try:
        return socket.socket(domain, socket.SOCK_DGRAM, protocol)
    except OSError:
        return socket.socket(domain, socket.SOCK_RAW, protocol)


def request(family: Family, token: bytes) -> bytes:
    """Return an echo request with a token that identifies its reply (pure).

    Over IPv6 the kernel fills in the checksum.
    """
    blank = _HEADER.pack(_REQUEST[family], 0, 0, 0, 0) + token
    if family == 6:
        return blank
    return _HEADER.pack(_REQUEST[family], 0, _checksum(blank), 0, 0) + token


def answers(family: Family, data: bytes, token: bytes, *, with_header: bool) -> bool:
    """Return True if this is the reply to the request with this token (pure).

    A raw IPv4 socket also delivers the IP header.
    """
    if with_header and family == 4:
        data = data[4 * (data[0] & 0xF) :] if data else b""
    return data[:1] == bytes([_REPLY[family]]) and data[_HEADER.size :] == token


def _checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF
