"""Where packets go and whom they may come from; and how peers travel to the pump."""

from __future__ import annotations

import socket
import sys
from ipaddress import IPv4Address, IPv4Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.udp import control
from flanneld.backends.udp.proxy.python import PeerLookup

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
