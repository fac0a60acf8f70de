"""Processing of an IPv4 packet (pure).

As in upstream's proxy, each side decrements the TTL and updates the checksum (RFC 1624). A packet without a
peer is answered with net-unreachable.
"""

from __future__ import annotations

import struct

HEADER = 20
_LONGEST_HEADER = 60
_ICMP, _NET_UNREACHABLE, _TTL = 1, 3, 8
_IP = struct.Struct(">BBHHHBBH4s4s")
_UNREACHABLE = struct.Struct(">BBHI")
_OFFSET = 0x1FFF


def is_ipv4(packet: bytearray, size: int) -> bool:
    return size >= HEADER and packet[0] >> 4 == 4


def spend_ttl(packet: bytearray) -> bool:
    """Decrement the TTL. Return False if it reached 0: the packet must be dropped."""
    left = packet[8] - 1
    packet[8] = left & 0xFF
    checksum = (packet[10] << 8 | packet[11]) + 0x100
    checksum = (checksum & 0xFFFF) + (checksum >> 16)
    packet[10], packet[11] = checksum >> 8, checksum & 0xFF
    return left != 0


def net_unreachable(packet: bytes | bytearray, source: bytes) -> bytes | None:
    """Return the ICMP error for a packet without a peer; None if none may be sent.

    ICMP and later fragments must not be answered (RFC 1122, 3.2.2).
    """
    header = 4 * (packet[0] & 15)
    offset = int.from_bytes(packet[6:8], "big") & _OFFSET
    if not HEADER <= header < _LONGEST_HEADER or packet[9] == _ICMP or offset:
        return None
    quoted = bytes(packet[: header + 8])
    message = _UNREACHABLE.pack(_NET_UNREACHABLE, 0, 0, 0) + quoted
    message = _with_checksum(message, 2, message)
    head = _IP.pack(0x45, 0, HEADER + len(message), 0, 0, _TTL, _ICMP, 0, source, bytes(packet[12:16]))
    return _with_checksum(head, 10, head) + message


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071) of an even or odd number of bytes."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(padded) // 2}H", padded))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _with_checksum(data: bytes, place: int, over: bytes) -> bytes:
    return data[:place] + checksum(over).to_bytes(2, "big") + data[place + 2 :]
