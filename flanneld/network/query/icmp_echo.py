"""Messages and sockets of ICMP echo (RFC 792, RFC 4443 section 4)."""

from __future__ import annotations

import socket
import struct

from flanneld.model import Family

_REQUEST: dict[Family, int] = {4: 8, 6: 128}
_REPLY: dict[Family, int] = {4: 0, 6: 129}
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence number
#: IP header and ICMP header, in bytes.
HEADERS: dict[Family, int] = {4: 28, 6: 48}


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


def token_of(family: Family, data: bytes, *, with_header: bool) -> bytes:
    """Return the token of an echo reply, empty for any other message (pure).

    A raw IPv4 socket also delivers the IP header.
    """
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
