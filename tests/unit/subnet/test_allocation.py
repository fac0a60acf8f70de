"""Which subnets are free, and which of them a host gets."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.config import Config, SubnetRange, parse
from flanneld.model import IPNetwork, Lease, LeaseAttrs, LeaseKey
from flanneld.subnet.allocation import choose, fits, free_subnets, public_ips_in, unfollowed
from flanneld.subnet.codec import parse_key


def pool(network: str, low: str = "", high: str = "") -> SubnetRange:
    prefix = "IPv6" if ":" in network else ""
    keys = [f'"EnableIPv4": {"false" if prefix else "true"}, "EnableIPv6": {"true" if prefix else "false"}']
    keys += [f'"{prefix}Network": "{network}"']
    keys += [f'"{prefix}SubnetMin": "{low}"'] if low else []
    keys += [f'"{prefix}SubnetMax": "{high}"'] if high else []
    return parse("{" + ", ".join(keys) + "}").ranges[0]


def names(nets: list[IPNetwork]) -> list[str]:
    return [str(net) for net in nets]


def test_with_nothing_taken_the_lowest_subnets_are_free() -> None:
    found = free_subnets(pool("10.3.0.0/16"), [], limit=3)
    assert names(found) == ["10.3.1.0/24", "10.3.2.0/24", "10.3.3.0/24"]


def test_at_most_a_hundred_are_looked_for() -> None:
    assert names(free_subnets(pool("10.3.0.0/16"), []))[-1] == "10.3.100.0/24"


def test_the_last_subnet_of_the_range_is_usable() -> None:
    found = free_subnets(pool("10.3.0.0/16", "10.3.253.0"), [])
    assert names(found) == ["10.3.253.0/24", "10.3.254.0/24", "10.3.255.0/24"]


@pytest.mark.parametrize(
    ("taken", "free"),
    [
        (["10.3.5.0/24"], ["10.3.6.0/24", "10.3.7.0/24", "10.3.8.0/24"]),
        (["10.3.6.0/24", "10.3.6.0/24"], ["10.3.5.0/24", "10.3.7.0/24", "10.3.8.0/24"]),
        (["10.3.6.128/25"], ["10.3.5.0/24", "10.3.7.0/24", "10.3.8.0/24"]),
        (["10.3.6.0/23"], ["10.3.5.0/24", "10.3.8.0/24"]),
        (["10.3.4.0/22", "10.3.5.0/24", "10.3.5.8/30"], ["10.3.8.0/24"]),
        (["10.3.8.0/24", "10.3.5.0/24"], ["10.3.6.0/24", "10.3.7.0/24"]),
        (["10.0.0.0/8"], []),
        (["10.3.4.0/23", "10.3.9.0/24", "::/64"], ["10.3.6.0/24", "10.3.7.0/24", "10.3.8.0/24"]),
    ],
)
def test_overlapping_subnet_is_not_free(taken: list[str], free: list[str]) -> None:
    assert names(free_subnets(pool("10.3.0.0/16", "10.3.5.0", "10.3.8.0"), map(ip_network, taken))) == free


@pytest.mark.parametrize(
    ("top", "last"),
    [
        ("255.255.255.0/24", "255.255.255.192/26"),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffc0/122"),
    ],
)
def test_the_walk_ends_at_the_top_of_the_address_space(top: str, last: str) -> None:
    found = free_subnets(pool(top), [])
    assert (len(found), str(found[-1])) == (3, last)
    assert len(free_subnets(pool(top), [found[-1]])) == 2


def test_a_huge_range_is_not_walked_to_its_end() -> None:
    assert names(free_subnets(pool("fc00::/8"), [], limit=2)) == ["fc00:0:0:1::/64", "fc00:0:0:2::/64"]


def test_fifteen_thousand_leases_take_no_time() -> None:
    big = pool("10.0.0.0/8")
    taken = [IPv4Network((int(big.subnet_min) + (i << 8), 24)) for i in range(15_000)]
    start = process_time()
    found = free_subnets(big, reversed(taken))
    assert process_time() - start < 2
    assert (len(found), str(found[0])) == (100, "10.58.153.0/24")


small_pools = st.sampled_from(
    [pool("10.3.4.0/24"), pool("10.3.0.0/22", "10.3.0.0", "10.3.2.0"), pool("255.255.255.192/26"),
     pool("fd00::/120"), pool("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ff00/120")]
)  # fmt: skip


@st.composite
def near(draw: st.DrawFn, there: SubnetRange) -> IPNetwork:
    """A network of any length in the range or around it."""
    space = 1 << there.network.max_prefixlen
    low, width = int(there.network.network_address), there.network.num_addresses
    base = draw(st.integers(max(low - width, 0), min(low + 2 * width, space) - 1))
    length = draw(st.integers(there.network.prefixlen - 1, there.network.max_prefixlen))
    return type(there.network)((base, length), strict=False)


@given(st.data(), small_pools, st.integers(1, 5))
def test_the_walk_finds_what_a_naive_search_finds(
    data: st.DataObject, there: SubnetRange, limit: int
) -> None:
    taken = data.draw(st.lists(near(there), max_size=8))
    subnets = there.network.subnets(new_prefix=there.subnet_len)
    naive = [net for net in subnets if there.contains(net) and not any(net.overlaps(t) for t in taken)]
    assert free_subnets(there, taken, limit) == naive[:limit]


def test_every_free_subnet_can_be_chosen() -> None:
    there = pool("10.3.0.0/16", "10.3.5.0", "10.3.8.0")
    taken = [ip_network("10.3.6.0/24")]
    chosen = [choose(there, taken, lambda n, pick=pick: pick % n) for pick in range(3)]  # type: ignore[misc]
    assert chosen == free_subnets(there, taken)


BOTH = parse(
    '{"EnableIPv6": true, "Network": "10.3.0.0/16", "SubnetMin": "10.3.5.0", "IPv6Network": "fd00::/48"}'
)
ONLY_IPV4 = parse('{"Network": "10.3.0.0/16"}')
FOUR, SIX = IPv4Network("10.3.5.0/24"), IPv6Network("fd00:0:0:1::/64")


@pytest.mark.parametrize(
    ("config", "key", "result"),
    [
        (BOTH, (FOUR, SIX), True),
        (BOTH, (FOUR, None), False),
        (BOTH, (None, SIX), False),
        (BOTH, (IPv4Network("10.3.4.0/24"), SIX), False),
        (BOTH, (FOUR, IPv6Network("fd00:0:1::/64")), False),
        (BOTH, (IPv4Network("10.3.5.0/25"), SIX), False),
        (ONLY_IPV4, (FOUR, None), True),
        (ONLY_IPV4, (FOUR, SIX), False),
        (ONLY_IPV4, (IPv4Network("10.4.5.0/24"), None), False),
        (ONLY_IPV4, (None, None), False),
    ],
)
def test_lease_fits_with_one_subnet_of_each_range_and_no_other(
    config: Config, key: LeaseKey, result: bool
) -> None:
    assert fits(config, key) is result


def test_the_choice_is_among_a_hundred() -> None:
    asked = []

    def last(n: int) -> int:
        asked.append(n)
        return n - 1

    assert str(choose(pool("10.3.0.0/16"), [], last)) == "10.3.100.0/24"
    assert asked == [100]


def test_nothing_is_chosen_when_nothing_is_free() -> None:
    assert choose(pool("10.3.0.0/16"), [ip_network("10.3.0.0/16")], lambda n: n - 1) is None


@pytest.mark.parametrize(
    ("avoid", "expected"),
    [
        pytest.param(["10.3.0.0/24"], "10.3.1.0/24", id="docker's bridge in the network"),
        pytest.param(["10.3.1.128/25", "10.3.0.0/32"], "10.3.2.0/24", id="a part of a subnet"),
        pytest.param(["10.3.0.0/22"], "10.3.0.0/24", id="nothing else is free"),
        pytest.param(["10.0.0.0/8", "10.3.0.0/24"], "10.3.1.0/24", id="a LAN around the network"),
        pytest.param(["fc00::/48"], "10.3.0.0/24", id="the other family"),
    ],
)
def test_a_new_subnet_avoids_what_the_host_has_if_another_is_free(avoid: list[str], expected: str) -> None:
    config = parse(
        '{"Network": "10.3.0.0/16", "SubnetMin": "10.3.0.0", "SubnetMax": "10.3.3.0", "SubnetLen": 24}'
    )
    (pool,) = config.ranges
    chosen = choose(pool, [], lambda _: 0, [ip_network(each) for each in avoid])
    assert str(chosen) == expected


DUAL = """{"EnableIPv6": true, "Network": "10.0.0.0/8", "IPv6Network": "fd00::/48",
 "SubnetMin": "10.3.1.0", "SubnetMax": "10.3.25.0"}"""


@pytest.mark.parametrize(
    ("keys", "blocking_nothing"),
    [
        pytest.param(["10.0.0.0-8", "10.4.0.0-16"], ["10.0.0.0/8"], id="the whole network"),
        pytest.param(["0.0.0.0-1"], ["0.0.0.0/1"], id="around the network"),
        pytest.param(["10.3.0.0-16"], ["10.3.0.0/16"], id="around the range"),
        pytest.param(["10.3.0.0-20", "10.3.16.0-24"], [], id="a part of the range"),
        pytest.param(["10.3.0.0-20", "10.3.15.0-24"], ["10.3.0.0/20"], id="around a lease"),
        pytest.param(["10.3.0.0-20", "10.3.15.0-25"], [], id="around a smaller subnet, which loses to it"),
        pytest.param(["10.3.1.0-24"], [], id="a lease"),
        pytest.param(["0.0.0.0-0&fd00::-48"], ["fd00::/48"], id="the whole IPv6 network"),
        pytest.param(["0.0.0.0-1&fd00::-16"], ["0.0.0.0/1", "fd00::/16"], id="both"),
        pytest.param(["10.3.1.0-24&fd00::-48"], ["fd00::/48"], id="its other subnet stays leased"),
        pytest.param(
            ["0.0.0.0-0&fd00::-56", "10.3.1.0-24&fd00:0:0:8::-64"], ["fd00::/56"], id="around an IPv6 lease"
        ),
    ],
)
def test_subnet_that_no_node_follows_blocks_nothing(keys: list[str], blocking_nothing: list[str]) -> None:
    found = unfollowed(parse(DUAL), [parse_key(key) for key in keys])
    assert sorted(map(str, found)) == blocking_nothing


@pytest.mark.parametrize(
    ("public_ips", "inside"),
    [
        (("10.3.0.0", None), ["10.3.0.0/32"]),
        (("10.3.255.255", None), ["10.3.255.255/32"]),
        (("10.2.255.255", None), []),
        (("10.4.0.0", None), []),
        ((None, "fd00::1"), ["fd00::1/128"]),
        (("10.3.0.9", "fd00::1"), ["10.3.0.9/32", "fd00::1/128"]),
        (("192.0.2.1", "fd00:0:1::"), []),
        ((None, None), []),
    ],
)
def test_public_ips_of_nodes_are_found_inside_the_networks_only(
    public_ips: tuple[str | None, str | None], inside: list[str]
) -> None:
    four, six = public_ips
    attrs = LeaseAttrs(IPv4Address(four) if four else None, IPv6Address(six) if six else None)
    assert [str(net) for net in public_ips_in(BOTH, [Lease(attrs, FOUR, SIX)])] == inside
