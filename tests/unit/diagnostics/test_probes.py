"""Whom to probe, what is asked, and what counts as an answer."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import Family, Lease, LeaseAttrs
from flanneld.network.query import echo_request, echo_token
from flanneld.reconcile.probes import answering, targets
from flanneld.state.resources import Address

TOKEN = bytes(range(16))
OWN = Lease(LeaseAttrs(), IPv4Network("10.5.1.0/24"), IPv6Network("fd00:1::/64"))
PEER = Lease(
    LeaseAttrs(IPv4Address("192.0.2.2"), IPv6Address("2001:db8::2"), "vxlan"),
    IPv4Network("10.5.2.0/24"),
    IPv6Network("fd00:2::/64"),
)


def told(at_base: frozenset[Family]) -> list[str]:
    return [str(target) for target in targets(PEER, at_base)]


def test_peers_have_the_first_address_of_their_subnet_if_we_have_that_of_ours() -> None:
    base = Address("flannel.1", IPv4Address("10.5.1.0"))
    base6 = Address("flannel-v6.1", IPv6Address("fd00:1::"))
    assert answering(OWN, [base, base6]) == {4, 6}
    assert answering(OWN, [Address("flannel.1", IPv4Address("10.5.9.0"))]) == set()


def test_a_peer_is_asked_at_its_end_of_the_tunnel_in_the_families_that_the_tunnel_carries() -> None:
    assert told(frozenset({4, 6})) == ["10.5.2.0", "fd00:2::"]
    assert told(frozenset({4})) == ["10.5.2.0"]


def test_without_a_tunnel_it_is_asked_at_its_public_ip() -> None:
    assert told(frozenset()) == ["192.0.2.2", "2001:db8::2"]


def test_a_peer_without_addresses_is_not_asked() -> None:
    assert list(targets(Lease(LeaseAttrs(), PEER.subnet), frozenset())) == []


def answer(family: Family) -> bytes:
    reply = {4: 0, 6: 129}[family]
    return bytes([reply, *echo_request(family, TOKEN)[1:]])


@pytest.mark.parametrize("family", [4, 6])
def test_an_answer_repeats_the_token(family: Family) -> None:
    assert echo_token(family, answer(family), with_header=False) == TOKEN
    assert echo_token(family, answer(family)[:-1] + b"x", with_header=False) != TOKEN
    assert echo_token(family, echo_request(family, TOKEN), with_header=False) != TOKEN


def test_a_raw_socket_delivers_the_header_of_the_packet_too() -> None:
    header = bytes([0x46, *range(23)])
    assert echo_token(4, header + answer(4), with_header=True) == TOKEN
    assert echo_token(6, answer(6), with_header=True) == TOKEN


@given(st.binary(max_size=64), st.sampled_from([4, 6]), st.booleans())
def test_garbage_is_no_answer(data: bytes, family: Family, with_header: bool) -> None:
    assert echo_token(family, data, with_header=with_header) != TOKEN


@pytest.mark.parametrize("identifier", [0, 0xBEEF])
def test_the_checksum_is_the_one_of_the_internet(identifier: int) -> None:
    words = echo_request(4, TOKEN, identifier)
    assert int.from_bytes(words[4:6]) == identifier
    total = sum(int.from_bytes(words[place : place + 2]) for place in range(0, len(words), 2))
    assert total % 0xFFFF == 0
