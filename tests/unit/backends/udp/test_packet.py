"""What happens to a packet on its way through the Python data plane."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.udp.proxy.python import checksum, is_ipv4, net_unreachable, spend_ttl

SOURCE, TARGET, TUN = IPv4Address("10.5.1.2"), IPv4Address("10.5.9.9"), IPv4Address("10.5.1.0")
UDP, ICMP = 17, 1


def packet(
    payload: bytes = bytes(16), *, ttl: int = 64, protocol: int = UDP, options: bytes = b"", fragment: int = 0
) -> bytearray:
    """A packet with a right checksum; ``fragment`` is the field of flags and offset."""
    first = 0x40 | (5 + len(options) // 4)
    size = 20 + len(options) + len(payload)
    head = struct.pack(
        ">BBHHHBBH4s4s", first, 0, size, 7, fragment, ttl, protocol, 0, SOURCE.packed, TARGET.packed
    )
    made = bytearray(head + options + payload)
    made[10:12] = checksum(bytes(made[: 20 + len(options)])).to_bytes(2, "big")
    return made


def is_sound(header: bytes | bytearray) -> bool:
    """A right checksum makes the sum of all come to nothing."""
    return checksum(bytes(header)) == 0


@given(st.binary(max_size=100))
def test_the_checksum_is_the_complement_of_the_sum_of_all_words(data: bytes) -> None:
    padded = data + b"\0" * (len(data) % 2)
    expected = sum(int.from_bytes(padded[i : i + 2], "big") for i in range(0, len(padded), 2))
    assert (checksum(data) + expected) % 0xFFFF == 0


@given(st.integers(2, 255), st.binary(min_size=8, max_size=60), st.integers(0, 0x3FFF))
def test_a_hop_costs_one_and_leaves_a_right_checksum(ttl: int, payload: bytes, fragment: int) -> None:
    made = packet(payload, ttl=ttl, fragment=fragment)
    assert spend_ttl(made)
    assert made[8] == ttl - 1
    assert is_sound(made[:20])


def test_the_last_hop_ends_the_way() -> None:
    assert not spend_ttl(packet(ttl=1))


def test_a_ttl_of_zero_wraps_around_as_upstreams() -> None:
    made = packet(ttl=0)
    assert spend_ttl(made)
    assert made[8] == 255


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (packet(), True),
        (b"\x60" + bytes(39), False),
        (packet()[:19], False),
        (b"", False),
        (bytes(20), False),
    ],
    ids=["IPv4", "IPv6", "cut", "empty", "zeros"],
)
def test_only_ipv4_packets_with_a_whole_header_are_taken(data: bytes, verdict: bool) -> None:
    assert is_ipv4(bytearray(data), len(data)) is verdict


def test_the_sender_of_a_packet_that_leads_nowhere_is_told_as_upstream_tells_it() -> None:
    offender = packet(bytes(range(40)))
    answer = net_unreachable(offender, TUN.packed)
    assert answer is not None
    first, tos, size, ident, flags, ttl, protocol, _, source, target = struct.unpack_from(
        ">BBHHHBBH4s4s", answer
    )
    assert (first, tos, ident, flags, ttl, protocol) == (0x45, 0, 0, 0, 8, ICMP)
    assert (IPv4Address(source), IPv4Address(target)) == (TUN, SOURCE)
    assert size == len(answer) == 20 + 8 + 28
    assert answer[20:22] == bytes([3, 0])
    assert answer[28:] == offender[:28]
    assert is_sound(answer[:20])
    assert is_sound(answer[20:])


@pytest.mark.parametrize(
    "offender",
    [
        packet(protocol=ICMP),
        packet(fragment=1),
        packet(fragment=0x2001),
        packet(options=bytes(40)),
        bytearray(b"\x44") + packet()[1:],
    ],
    ids=["ICMP", "last fragment", "later fragment", "the longest header", "a header too short"],
)
def test_no_answer_is_given_where_none_is_due(offender: bytearray) -> None:
    assert net_unreachable(offender, TUN.packed) is None


def test_the_first_fragment_is_answered() -> None:
    assert net_unreachable(packet(fragment=0x2000), TUN.packed) is not None


@given(st.binary(min_size=20, max_size=120))
def test_an_answer_to_noise_is_sound_at_least(noise: bytes) -> None:
    answer = net_unreachable(noise, TUN.packed)
    if answer is not None:
        assert is_sound(answer[:20])
        assert is_sound(answer[20:])
