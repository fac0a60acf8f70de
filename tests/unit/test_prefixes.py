"""Networks that are cheap to make stand for those of ``ipaddress``."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import IPNetwork, ipv4_prefix, ipv6_prefix

KINDS = [(ipv4_prefix, IPv4Network, 32), (ipv6_prefix, IPv6Network, 128)]
Make = Callable[[int, int], IPNetwork]


@pytest.mark.parametrize(("make", "plain", "bits"), KINDS)
@given(data=st.data())
def test_one_is_in_every_way_the_plain_network(
    make: Make, plain: type[IPv4Network | IPv6Network], bits: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, bits))
    number = data.draw(st.integers(0, (1 << length) - 1)) << (bits - length)
    cheap, usual = make(number, length), plain((number, length))
    assert (cheap, usual, hash(cheap), str(cheap)) == (usual, cheap, hash(usual), str(usual))
    assert cheap == make(number, length)
    assert {usual: "found"}[cheap] == {cheap: "found"}[usual] == "found"
    for what in ("network_address", "broadcast_address", "netmask", "hostmask", "prefixlen", "version"):
        assert getattr(cheap, what) == getattr(usual, what)
    assert cheap.supernet() == usual.supernet()
    assert list(cheap.subnets()) == list(usual.subnets())
    other = make(number ^ 1 << (bits - length), length)
    assert other not in (cheap, usual)
    assert cheap != make(0, length - 1)
    assert (cheap < other) is (usual < other)  # type: ignore[operator]


@pytest.mark.parametrize(("make", "plain", "bits"), KINDS)
def test_host_bits_and_wrong_lengths_are_refused(
    make: Make, plain: type[IPv4Network | IPv6Network], bits: int
) -> None:
    del plain
    for number, length in ((1, bits - 1), (0, bits + 1), (1 << bits, bits), (0, -1)):
        with pytest.raises(ValueError):  # noqa: PT011 - as ipaddress, with various texts
            make(number, length)


def test_networks_of_different_families_differ() -> None:
    assert ipv4_prefix(0, 24) != ipv6_prefix(0, 24)
    assert ipv4_prefix(0, 24) != None  # noqa: E711 - the comparison itself is tested


def test_networks_that_have_one_hash_by_chance_differ() -> None:
    one, other = (ipv6_prefix((1 << 128) - 1 - rest, 128) for rest in (1, 1 << 61))
    assert hash(one) == hash(other)
    assert one != other
    assert other != one


@pytest.mark.parametrize("text", ["0.0.0.0", "10.1.2.3", "192.168.254.1", "255.255.255.255"])
def test_address_of_a_network_has_the_usual_text(text: str) -> None:
    assert str(ipv4_prefix(int(IPv4Address(text)), 32).network_address) == text
