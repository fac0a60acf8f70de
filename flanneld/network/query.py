"""Messages to another node: a query over UDP, and ICMP echo (pure).

A query names the size of its answer, which is never larger than the query itself: a forged source address
gains an attacker nothing. The answer repeats the query's token and holds a JSON object.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from flanneld.model import Family

#: Port that flannelctl asks if its own daemon has no -answer-port.
DEFAULT_PORT = 8470
TOKEN_LENGTH = 16
#: Bytes that every path carries in one piece with room for the whole answer, headers included.
ORDINARY = 576
#: IP header, and UDP or ICMP header, in bytes.
HEADERS: dict[Family, int] = {4: 28, 6: 48}
_QUERY, _ANSWER = b"flannel?1", b"flannel!1"
_QUERY_HEAD = struct.Struct(f"!9sBH{TOKEN_LENGTH}s")  # magic, flags, size of the answer's payload, token
_ANSWER_HEAD = struct.Struct(f"!9s{TOKEN_LENGTH}s")
_WITHOUT_CHECKSUM = 0x1
# Types of ICMP echo (RFC 792) and of ICMPv6 (RFC 4443 section 4).
_REQUEST: dict[Family, int] = {4: 8, 6: 128}
ECHO_REPLY: dict[Family, int] = {4: 0, 6: 129}
_ECHO = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence number


class Query(Struct, frozen=True, gc=False):
    """A query. ``answer_size`` is in bytes of UDP payload.

    With ``unsummed`` the answer is to have no UDP checksum, which shows whether checksums get lost on the
    way. It works over IPv4 only.
    """

    token: bytes
    answer_size: int
    unsummed: bool = False

    def encode(self, size: int) -> bytes:
        """Return the query with ``size`` bytes, or its head if that is longer."""
        flags = _WITHOUT_CHECKSUM if self.unsummed else 0
        return _QUERY_HEAD.pack(_QUERY, flags, self.answer_size, self.token).ljust(size, b"\0")


def decode(data: bytes) -> Query | None:
    """Return the query in a datagram, None if there is none. No answer to it is larger than the datagram."""
    if len(data) < _QUERY_HEAD.size or not data.startswith(_QUERY):
        return None
    _, flags, size, token = _QUERY_HEAD.unpack_from(data)
    return Query(token, min(size, len(data)), bool(flags & _WITHOUT_CHECKSUM))


def answer(query: Query, facts: Mapping[str, Any]) -> bytes:
    """Return the answer, padded to the wanted size; without the last facts if not all fit."""
    told, room = dict(facts), query.answer_size - _ANSWER_HEAD.size
    while len(text := json.dumps(told, separators=(",", ":")).encode()) > room and told:
        told.popitem()
    return _ANSWER_HEAD.pack(_ANSWER, query.token) + text.ljust(room)


def decode_answer(data: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """Return the token and the facts of an answer, None for any other datagram."""
    if len(data) < _ANSWER_HEAD.size or not data.startswith(_ANSWER):
        return None
    try:
        facts = json.loads(data[_ANSWER_HEAD.size :])
    except (ValueError, RecursionError):
        return None
    return (_ANSWER_HEAD.unpack_from(data)[1], facts) if isinstance(facts, dict) else None


def token_of(data: bytes) -> bytes:
    """Return the token of our own query, as an ICMP error brings it back; empty if it is cut off."""
    query = decode(data)
    return query.token if query else b""


def echo_request(family: Family, token: bytes, identifier: int = 0) -> bytes:
    """Return an echo request with a token that identifies its reply.

    Over IPv6 the kernel fills in the checksum, and for a ping socket its own identifier.
    """
    blank = _ECHO.pack(_REQUEST[family], 0, 0, identifier, 0) + token
    if family == 6:
        return blank
    return _ECHO.pack(_REQUEST[family], 0, _checksum(blank), identifier, 0) + token


def echo_token(family: Family, data: bytes, *, with_header: bool) -> bytes:
    """Return the token of an echo reply, empty for any other message.

    A raw IPv4 socket also delivers the IP header.
    """
    if with_header and family == 4:
        data = data[4 * (data[0] & 0xF) :] if data else b""
    return data[_ECHO.size :] if data[:1] == bytes([ECHO_REPLY[family]]) else b""


def requested_token(family: Family, data: bytes) -> bytes:
    """Return the token of our own request in an ICMP error; empty for another message."""
    return data[_ECHO.size :] if data[:1] == bytes([_REQUEST[family]]) else b""


def _checksum(data: bytes) -> int:
    """Compute the checksum of RFC 1071."""
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF
