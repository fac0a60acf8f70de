"""The data plane in Python: packets, peers, and system calls for many packets."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.udp import control
from flanneld.backends.udp.proxy.plane import (
    RECEIVE_BUFFER,
    Messages,
    PeerLookup,
    checksum,
    is_ipv4,
    net_unreachable,
    spend_ttl,
    tune,
)

# ---- packets on their way ------------------------------------------------------------------------


SOURCE, TARGET, TUN = IPv4Address("10.5.1.2"), IPv4Address("10.5.9.9"), IPv4Address("10.5.1.0")
UDP, ICMP = 17, 1
UDP_GRO = 104  # linux/udp.h


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


# ---- peers ---------------------------------------------------------------------------------------


ONE, OTHER = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
PORT = 8285

addresses = st.builds(IPv4Address, st.integers(0, 2**32 - 1))
#: In a corner small enough for subnets to lie in one another.
subnets = st.builds(
    lambda number, length: IPv4Network((0x0A050000 + number, length), strict=False),
    st.integers(0, 0xFFFF),
    st.integers(16, 32),
)
changes = st.lists(st.tuples(subnets, st.none() | addresses), max_size=30)


def found(table: PeerLookup, destination: str | IPv4Address) -> IPv4Address | None:
    target = table.find(int(IPv4Address(destination)))
    if target is None:
        return None
    assert (int.from_bytes(target[:2], sys.byteorder), target[2:4]) == (
        socket.AF_INET,
        PORT.to_bytes(2, "big"),
    )
    return IPv4Address(target[4:8])


def table(*peers: tuple[str, IPv4Address]) -> PeerLookup:
    made = PeerLookup(PORT)
    for subnet, endpoint in peers:
        made.set(IPv4Network(subnet), endpoint)
    return made


def test_the_longest_prefix_wins_whatever_came_first() -> None:
    wide, narrow = ("10.5.0.0/16", ONE), ("10.5.7.0/24", OTHER)
    for made in (table(wide, narrow), table(narrow, wide)):
        assert (found(made, "10.5.7.1"), found(made, "10.5.8.1")) == (OTHER, ONE)


def test_lookup_cache_follows_changes() -> None:
    made = table(("10.5.7.0/24", ONE))
    assert found(made, "10.5.7.1") == ONE
    made.set(IPv4Network("10.5.7.0/24"), OTHER)
    assert found(made, "10.5.7.1") == OTHER
    made.drop(IPv4Network("10.5.7.0/24"))
    assert found(made, "10.5.7.1") is None
    made.drop(IPv4Network("10.5.7.0/24"))


def test_an_endpoint_is_a_source_as_long_as_any_peer_has_it() -> None:
    made = table(("10.5.7.0/24", ONE), ("10.5.8.0/24", ONE))
    made.drop(IPv4Network("10.5.7.0/24"))
    assert set(made.sources) == {int(ONE)}
    made.set(IPv4Network("10.5.8.0/24"), OTHER)
    assert set(made.sources) == {int(OTHER)}
    made.drop(IPv4Network("10.5.8.0/24"))
    assert made.sources == {}


@given(changes, st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=5))
def test_after_any_changes_it_finds_what_a_search_through_all_peers_finds(
    changes: list[tuple[IPv4Network, IPv4Address | None]], numbers: list[int]
) -> None:
    made, model = PeerLookup(PORT), dict[IPv4Network, IPv4Address]()
    for subnet, endpoint in changes:
        if endpoint is None:
            made.drop(subnet)
            model.pop(subnet, None)
        else:
            made.set(subnet, endpoint)
            model[subnet] = endpoint
        for destination in (IPv4Address(0x0A050000 + number) for number in numbers):
            best = max(
                (net for net in model if destination in net), key=lambda net: net.prefixlen, default=None
            )
            assert found(made, destination) == (model[best] if best else None)
    assert set(made.sources) == {int(endpoint) for endpoint in model.values()}


def test_a_scan_of_a_large_network_does_not_fill_the_memory() -> None:
    made = table(("10.0.0.0/8", ONE))
    for destination in range(0x0A000000, 0x0A000000 + 70_000):
        made.find(destination)
    assert len(made._remembered) <= 1 << 16
    assert found(made, "10.1.1.1") == ONE


# ---- the control channel -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, control.CHUNK - 1, control.CHUNK, control.CHUNK + 1, 5000])
def test_any_number_of_peers_travels_in_a_few_messages(number: int) -> None:
    entries = [(IPv4Network((0x0A000000 + (i << 8), 24)), IPv4Address(0xC6120000 + i)) for i in range(number)]
    bodies = list(control.pack(entries))
    assert [entry for body in bodies for entry in control.unpack(body)] == entries
    assert len(bodies) == number // control.CHUNK + 1
    assert [control.is_full(body) for body in bodies] == [True] * (len(bodies) - 1) + [False]
    assert all(len(body) < control.LONGEST for body in bodies)


@given(st.binary(max_size=40))
def test_noise_on_the_control_channel_is_at_worst_refused(noise: bytes) -> None:
    try:
        entries = control.unpack(noise)
    except ValueError:
        return
    assert b"".join(control.pack(entries)) == noise


def test_each_device_has_a_name_of_its_own_in_no_file_system() -> None:
    assert control.address_of("flannel0") != control.address_of("flannel1")
    assert control.address_of("flannel0").startswith("\0")


def test_networks_are_compared_as_they_are_written() -> None:
    assert control.unpack(next(control.pack([(IPv4Network("10.5.7.0/24"), ONE)]))) == [
        (ip_network("10.5.7.0/24"), ONE)
    ]


# ---- many datagrams in one system call -----------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
            each.settimeout(60)
        yield one, other


def fill(room: Messages, target: socket.socket, lengths: list[int]) -> None:
    """Datagrams of these lengths, each of one letter, for ``target``."""
    host, port = target.getsockname()
    name = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton(host))
    for slot, length in enumerate(lengths):
        room.names[16 * slot : 16 * slot + 16] = name
        room.buffers[slot][:length] = bytes([65 + slot]) * length
        room.to_send[2 * slot + 1] = length


def test_all_are_sent_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    room = Messages(4, 100)
    fill(room, other, [1, 0, 100, 50])
    assert room.send(one.fileno(), 4) == []
    assert [other.recv(1000) for _ in range(4)] == [b"A", b"", b"C" * 100, b"D" * 50]


def test_refused_datagram_does_not_delay_the_others(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    room = Messages(4, 65535)
    fill(room, other, [65535, 7, 65535, 9])
    assert room.send(one.fileno(), 4) == [0, 2]
    assert [other.recv(1000) for _ in range(2)] == [b"B" * 7, b"D" * 9]


def test_waiting_datagrams_are_read_with_their_sender(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    room = Messages(2, 65535)
    assert room.receive(other.fileno()) == 0
    for datagram in (b"first", b"", b"x" * 60_000):
        one.sendto(datagram, other.getsockname())
    assert room.receive(other.fileno()) == 2
    assert [bytes(room.buffers[i][: room.received[i]]) for i in range(2)] == [b"first", b""]
    assert room.names[4:8] == room.names[20:24] == socket.inet_aton("127.0.0.1")
    assert room.receive(other.fileno()) == 1
    assert room.received[0] == 60_000


def test_the_target_that_a_table_of_peers_gives_is_one_that_the_kernel_takes(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    table = PeerLookup(other.getsockname()[1])
    table.set(IPv4Network("10.5.0.0/16"), IPv4Address("127.0.0.1"))
    room = Messages(1, 10)
    room.names[:] = table.find(int(IPv4Address("10.5.7.1"))) or b""
    room.to_send[1] = 3
    assert room.send(one.fileno(), 1) == []
    assert other.recv(10) == bytes(3)


def test_the_receive_buffer_is_as_large_as_this_user_may_make_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, _ = ends
    before = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    tune(one.fileno())
    assert before < one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * RECEIVE_BUFFER


def test_datagrams_come_one_by_one_whatever_had_the_socket_before(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, _ = ends
    one.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    tune(one.fileno())
    assert one.getsockopt(socket.IPPROTO_UDP, UDP_GRO) == 0
