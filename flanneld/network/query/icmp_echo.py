"""ICMP echo request to another host (RFC 792, RFC 4443 section 4)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from flanneld.model import Family, IPAddress
from flanneld.runtime import clock, waits
from flanneld.runtime.randomness import random_bytes

_REQUEST: dict[Family, int] = {4: 8, 6: 128}
_REPLY: dict[Family, int] = {4: 0, 6: 129}
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence number
_TOKEN_LENGTH = 16
_LONGEST = 65535
#: linux/in.h and linux/in6.h: level, option and value for packets that travel in one piece, whatever the
#: kernel knows of the path (IP_PMTUDISC_PROBE).
_WHOLE: dict[Family, tuple[int, int, int]] = {4: (socket.IPPROTO_IP, 10, 3), 6: (socket.IPPROTO_IPV6, 23, 3)}
_IP_HEADER: dict[Family, int] = {4: 20, 6: 40}
#: IP header and ICMP header, in bytes.
HEADERS: dict[Family, int] = {4: 28, 6: 48}
#: So often is looked whether the answer is still wanted, in seconds.
_NAP = 0.2


def ask(
    target: IPAddress, within: float, is_wanted: Callable[[], bool] = lambda: True, *, size: int = 0
) -> float | None:
    """Return the seconds until the answer; None if none comes in time, or it is no longer wanted.

    With ``size`` the packet has so many bytes, IP header included, and travels in one piece. Raises
    ``OSError`` if this process may not ask at all.
    """
    token = random_bytes(_TOKEN_LENGTH)
    token += bytes(max(0, size - _IP_HEADER[target.version] - _HEADER.size - len(token)))
    with new_socket(target.version) as connection:
        if size:
            connection.setsockopt(*_WHOLE[target.version])
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


def ask_all(questions: Sequence[tuple[IPAddress, int]], within: float) -> list[bool]:
    """Send an echo request of a size in bytes to each target, unfragmented; return which are answered.

    It ends with the last answer, or after ``within`` seconds. Raises ``OSError`` if this process may not ask.
    """
    answered = [False] * len(questions)
    waiting: dict[int, tuple[int, socket.socket, bytes]] = {}
    with ExitStack() as stack:
        for number, (target, size) in enumerate(questions):
            token = random_bytes(_TOKEN_LENGTH)
            token += bytes(max(0, size - _IP_HEADER[target.version] - _HEADER.size - len(token)))
            connection = stack.enter_context(new_socket(target.version))
            connection.setsockopt(*_WHOLE[target.version])
            with suppress(OSError):
                connection.connect((str(target), 0))
                connection.send(request(target.version, token))
                waiting[connection.fileno()] = (number, connection, token)
        began = clock.now()
        while waiting and (left := began + within - clock.now()) > 0:
            for fd in waits.some_readable(waiting, left):
                number, connection, token = waiting[fd]
                try:
                    data = connection.recv(_LONGEST)
                except OSError:
                    continue  # an ICMP error: each raw socket for a target gets those of all packets there
                family = questions[number][0].version
                if answers(family, data, token, with_header=connection.type == socket.SOCK_RAW):
                    answered[number] = True
                    del waiting[fd]
    return answered


def new_socket(family: Family) -> socket.socket:
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
    return bool(token) and token_of(family, data, with_header=with_header) == token


def token_of(family: Family, data: bytes, *, with_header: bool) -> bytes:
    """Return the token of an echo reply, empty for any other message (pure)."""
    if with_header and family == 4:
        data = data[4 * (data[0] & 0xF) :] if data else b""
    return data[_HEADER.size :] if data[:1] == bytes([_REPLY[family]]) else b""


def request_token(family: Family, data: bytes) -> bytes:
    """Return the token of our own request in an ICMP error; empty for another message (pure)."""
    return data[_HEADER.size :] if data[:1] == bytes([_REQUEST[family]]) else b""


def _checksum(data: bytes) -> int:
    """Compute the checksum of RFC 1071."""
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF
