"""IPv4 packets by hand: built, checked, and cut as a network card cuts what the kernel hands it whole."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address

ICMP, TCP, UDP = socket.IPPROTO_ICMP, socket.IPPROTO_TCP, socket.IPPROTO_UDP
FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80
DONT_FRAGMENT, MORE_FRAGMENTS = 0x4000, 0x2000
CHECKSUM_AT = {ICMP: 2, TCP: 16, UDP: 6}

_IP = struct.Struct(">BBHHHBBH4s4s")
_TCP = struct.Struct(">HHIIBBHHH")
_UDP = struct.Struct(">HHHH")
#: linux/virtio_net.h
_VNET = struct.Struct("=BBHHHH")
NEEDS_CHECKSUM = 1
GSO = {TCP: 1, UDP: 5}
GSO_PROTOCOL = {1: TCP, 5: UDP}


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    words = struct.unpack(f">{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2))
    return -sum(words) % 0xFFFF or 0xFFFF


def ipv4(
    payload: bytes,
    protocol: int = UDP,
    source: str = "10.5.1.2",
    destination: str = "10.5.2.2",
    *,
    ttl: int = 64,
    tos: int = 0,
    identification: int = 7,
    fragment: int = DONT_FRAGMENT,
    options: bytes = b"",
) -> bytes:
    """A packet with a right header checksum."""
    header = _IP.pack(
        0x45 + len(options) // 4, tos, 20 + len(options) + len(payload),
        identification, fragment, ttl, protocol, 0,
        IPv4Address(source).packed, IPv4Address(destination).packed,
    )  # fmt: skip
    return with_ip_checksum(header + options + payload)


def tcp(
    payload: bytes,
    *,
    ports: tuple[int, int] = (5000, 80),
    sequence: int = 0,
    ack: int = 1,
    flags: int = ACK,
    window: int = 500,
    options: bytes = b"",
) -> bytes:
    """A segment whose checksum is yet to be put in."""
    offset = (20 + len(options)) // 4 << 4
    return _TCP.pack(*ports, sequence, ack, offset, flags, window, 0, 0) + options + payload


def udp(payload: bytes, *, ports: tuple[int, int] = (5000, 53)) -> bytes:
    """A datagram whose checksum is yet to be put in."""
    return _UDP.pack(*ports, 8 + len(payload), 0) + payload


def with_ip_checksum(packet: bytes) -> bytes:
    """Of the two ways to write zero it has 0, which a checksum that was patched (RFC 1141) may not have."""
    header = packet[: header_length(packet)]
    return _put(packet, 10, checksum(_put(header, 10, 0)) % 0xFFFF)


def finished(packet: bytes) -> bytes:
    """With the checksum of TCP, UDP or ICMP in it."""
    start = header_length(packet)
    at = start + CHECKSUM_AT[packet[9]]
    cleared = _put(packet, at, 0)
    return _put(cleared, at, checksum(_pseudo_header(packet) + cleared[start:]))


def settled(packet: bytes) -> bytes:
    """With zero as the header checksum always written in one way."""
    return _put(packet, 10, 0) if packet[10:12] == b"\xff\xff" else packet


def is_sound(packet: bytes) -> bool:
    """Are its length and all its checksums right?"""
    length = int.from_bytes(packet[2:4], "big")
    return (
        length == len(packet) and with_ip_checksum(packet) == settled(packet) and finished(packet) == packet
    )


def forwarded(packet: bytes) -> bytes:
    """As it is behind a hop, if its header checksum was right."""
    return with_ip_checksum(packet[:8] + bytes([packet[8] - 1]) + packet[9:])


def header_length(packet: bytes) -> int:
    return (packet[0] & 15) * 4


def all_headers_length(packet: bytes) -> int:
    start = header_length(packet)
    return start + ((packet[start + 12] >> 4) * 4 if packet[9] == TCP else 8)


@dataclass(frozen=True, slots=True)
class Whole:
    """What goes over a TUN with vnet headers: a packet, or many in one, of ``segment`` bytes each."""

    packet: bytes
    segment: int = 0
    unfinished: bool = False

    @classmethod
    def decode(cls, data: bytes) -> Whole:
        flags, kind, _, segment, _, _ = _VNET.unpack_from(data)
        assert kind & 0x7F in (0, GSO[TCP], GSO[UDP])
        return cls(data[_VNET.size :], segment if kind else 0, bool(flags & NEEDS_CHECKSUM))

    def encode(self) -> bytes:
        protocol, start = self.packet[9], header_length(self.packet)
        packet = self.packet
        if self.unfinished:
            begun = checksum(_pseudo_header(packet)) ^ 0xFFFF
            packet = _put(packet, start + CHECKSUM_AT[protocol], begun)
        return _VNET.pack(
            NEEDS_CHECKSUM if self.unfinished else 0, GSO[protocol] if self.segment else 0,
            all_headers_length(packet) if self.segment else 0, self.segment,
            start if self.unfinished else 0, CHECKSUM_AT[protocol] if self.unfinished else 0,
        ) + packet  # fmt: skip

    def cut(self) -> list[bytes]:
        """The packets that it stands for."""
        if not self.segment:
            return [finished(self.packet) if self.unfinished else self.packet]
        headers = all_headers_length(self.packet)
        payload = self.packet[headers:]
        starts = range(0, len(payload), self.segment)
        return [
            _cut_one(self.packet[:headers], payload[at : at + self.segment], number, at, at == starts[-1])
            for number, at in enumerate(starts)
        ]


def _cut_one(headers: bytes, payload: bytes, number: int, at: int, last: bool) -> bytes:
    one = bytearray(headers + payload)
    start = header_length(headers)
    struct.pack_into(">HH", one, 2, len(one), int.from_bytes(headers[4:6], "big") + number & 0xFFFF)
    if headers[9] == TCP:
        sequence = int.from_bytes(headers[start + 4 : start + 8], "big")
        struct.pack_into(">I", one, start + 4, sequence + at & 0xFFFFFFFF)
        one[start + 13] &= (0xFF if last else ~(FIN | PSH) & 0xFF) & (~CWR & 0xFF if number else 0xFF)
    else:
        struct.pack_into(">H", one, start + 4, 8 + len(payload))
    return finished(with_ip_checksum(bytes(one)))


def _pseudo_header(packet: bytes) -> bytes:
    if packet[9] == ICMP:
        return b""
    return packet[12:20] + struct.pack(">HH", packet[9], len(packet) - header_length(packet))


def _put(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + value.to_bytes(2, "big") + data[at + 2 :]
