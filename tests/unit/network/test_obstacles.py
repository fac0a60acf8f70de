"""Which of the host's networks and addresses stand in a lease's way."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import IPAddress, IPNetwork, Lease, LeaseAttrs, LeaseKey, single
from flanneld.network.obstacles import (
    HostNetworks,
    HostRoute,
    Obstacle,
    concerns,
    host_networks,
)
from flanneld.reconcile.claims import AddressClaims
from flanneld.reconcile.host_watch import networks_around

NETWORKS = (IPv4Network("10.5.0.0/16"), IPv6Network("fc00:5::/48"))
OWN = (IPv4Network("10.5.1.0/24"), IPv6Network("fc00:5:0:1::/64"))
KERNEL, BOOT, STATIC, DHCP, ROUTER = 2, 3, 4, 16, 9
SUBNETS: dict[int, IPNetwork] = {4: IPv4Network("10.5.7.0/24"), 6: IPv6Network("fc00:5:0:7::/64")}


def claims(host: HostNetworks) -> AddressClaims:
    """Return the claims of this host and of no lease."""
    found = AddressClaims(
        Lease(LeaseAttrs()), [(NETWORKS[0], 24), (NETWORKS[1], 64)], dict[LeaseKey, Lease]().get
    )
    found.look(host)
    return found


def nets4(near: int, lengths: st.SearchStrategy[int]) -> st.SearchStrategy[IPNetwork]:
    """Networks in and around 10.5.0.0/16, many of which touch each other."""
    numbers = st.integers(near, near + 0x7FF)
    return st.builds(lambda number, length: IPv4Network((number, length), strict=False), numbers, lengths)


def nets6(near: int, lengths: st.SearchStrategy[int]) -> st.SearchStrategy[IPNetwork]:
    numbers = st.integers(0, 0x7FF).map(lambda number: near + (number << 60))
    return st.builds(lambda number, length: IPv6Network((number, length), strict=False), numbers, lengths)


NEAR = {4: int(IPv4Address("10.5.0.0")), 6: int(IPv6Address("fc00:5::"))}
any_nets = st.one_of(nets4(NEAR[4], st.integers(8, 32)), nets6(NEAR[6], st.integers(40, 128)))
obstacles = st.builds(
    Obstacle, any_nets, st.sampled_from(["br7", "eth0"]), st.sampled_from(["network", "address"])
)


@given(st.frozensets(obstacles, max_size=20), any_nets)
def test_obstacle_is_what_equals_a_subnet_or_lies_inside_it(
    found: frozenset[Obstacle], subnet: IPNetwork
) -> None:
    inside = [
        each
        for each in found
        if each.net.version == subnet.version and each.net.subnet_of(subnet)  # type: ignore[arg-type]
    ]
    answer = claims(HostNetworks(found)).obstacle_in(subnet)
    assert (answer in inside) if inside else answer is None


@given(
    st.frozensets(any_nets, max_size=10),
    st.frozensets(st.integers(NEAR[4], NEAR[4] + 0x7FF).map(IPv4Address), max_size=10),
    st.one_of(
        st.integers(NEAR[4], NEAR[4] + 0x7FF).map(IPv4Address),
        st.integers(0, 0x7FF).map(lambda number: IPv6Address(NEAR[6] + (number << 60))),
    ),
)
def test_public_ip_is_known_as_local_or_broadcast(
    local: frozenset[IPNetwork], broadcast: frozenset[IPAddress], public_ip: IPAddress
) -> None:
    of_4 = public_ip if isinstance(public_ip, IPv4Address) else None
    of_6 = public_ip if isinstance(public_ip, IPv6Address) else None
    lease = Lease(LeaseAttrs(of_4, of_6), IPv4Network("10.5.250.0/24"), IPv6Network("fc00:5:0:fff::/64"))
    reason = str(claims(HostNetworks(local=local, broadcast=broadcast)).refusal(lease) or "")
    if any(public_ip in net for net in local):
        assert "an address of this host" in reason
    else:
        assert ("broadcast or network address" in reason) == (public_ip in broadcast)


@given(st.frozensets(obstacles, max_size=10))
def test_networks_around_are_those_larger_than_a_subnet(found: frozenset[Obstacle]) -> None:
    lengths = {4: 24, 6: 64}
    around = networks_around(HostNetworks(found), [(net, lengths[net.version]) for net in NETWORKS])
    assert set(around) == {
        each for each in found if each.what == "network" and each.net.prefixlen < lengths[each.net.version]
    }


# ---- what counts ----------------------------------------------------------------------------------


def told(
    *routes: HostRoute, local: tuple[tuple[IPNetwork, str], ...] = (), broadcast: tuple[IPAddress, ...] = ()
) -> HostNetworks:
    return host_networks(routes, local, broadcast, networks=NETWORKS, own=OWN)


def route(net: IPNetwork | None, protocol: int, gateway: str = "", device: str = "br7") -> HostRoute:
    return HostRoute(net, protocol, ((device, ip_address(gateway) if gateway else None),))


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("protocol", [KERNEL, DHCP, ROUTER])
def test_network_on_link_counts(family: int, protocol: int) -> None:
    subnet = SUBNETS[family]
    assert told(route(subnet, protocol)).obstacles == {Obstacle(subnet, "br7", "network")}


@pytest.mark.parametrize("protocol", [BOOT, STATIC])
def test_route_to_device_counts_only_with_address_of_that_device(protocol: int) -> None:
    subnet = SUBNETS[4]
    home = (IPv4Network("10.5.7.9/32"), "br7")
    elsewhere = (IPv4Network("10.5.7.9/32"), "br8")
    assert not told(route(subnet, protocol)).obstacles
    assert Obstacle(subnet, "br7", "network") in told(route(subnet, protocol), local=(home,)).obstacles
    assert (
        Obstacle(subnet, "br7", "network") not in told(route(subnet, protocol), local=(elsewhere,)).obstacles
    )


def test_gateways_and_addresses_count_and_their_routes_do_not() -> None:
    found = told(
        route(IPv4Network("203.0.113.0/24"), BOOT, "10.5.7.3", "eth0"),
        route(None, BOOT, "10.5.8.1", "eth0"),
        local=((IPv4Network("10.5.9.1/32"), "lo"),),
    )
    assert found.obstacles == {
        Obstacle(IPv4Network("10.5.7.3/32"), "eth0", "gateway"),
        Obstacle(IPv4Network("10.5.8.1/32"), "eth0", "gateway"),
        Obstacle(IPv4Network("10.5.9.1/32"), "lo", "address"),
    }


INSIDE: dict[int, IPNetwork] = {4: IPv4Network("10.5.7.64/26"), 6: IPv6Network("fc00:5:0:7:8000::/65")}
BEYOND: dict[int, IPNetwork] = {4: IPv4Network("10.5.6.0/23"), 6: IPv6Network("fc00:5:0:6::/63")}
GATEWAYS = {4: "10.5.7.0", 6: "fc00:5:0:7::"}


def stands_in_the_way(subnet: IPNetwork, *routes: HostRoute) -> bool:
    answers = {claims(told(*order)).obstacle_in(subnet) is not None for order in permutations(routes)}
    (answer,) = answers
    return answer


@pytest.mark.parametrize("family", [4, 6])
def test_gateway_counts_if_a_route_through_it_leads_out_of_the_subnet(family: int) -> None:
    subnet, gateway = SUBNETS[family], GATEWAYS[family]
    same, part, more, default = (
        route(net, BOOT, gateway) for net in (subnet, INSIDE[family], BEYOND[family], None)
    )
    for within in [(same,), (part,), (same, part)]:
        assert not stands_in_the_way(subnet, *within)
        assert not stands_in_the_way(BEYOND[family], *within)
        for outside in (more, default):
            assert stands_in_the_way(subnet, *within, outside)
    (half, _) = subnet.subnets()
    assert stands_in_the_way(half, same), "the route leads out of half of its destination"


def test_every_hop_of_a_route_into_a_subnet_is_judged_by_itself() -> None:
    hops = (("br7", ip_address("10.5.7.1")), ("eth0", ip_address("10.5.8.1")))
    both = HostRoute(SUBNETS[4], BOOT, hops)
    assert not stands_in_the_way(SUBNETS[4], both)
    assert stands_in_the_way(IPv4Network("10.5.8.0/24"), both), "10.5.7.0/24 would be lost with its gateway"


def test_gateway_of_one_device_does_not_excuse_that_of_another() -> None:
    here, there = (route(net, BOOT, "10.5.7.1", dev) for net, dev in ((SUBNETS[4], "br7"), (None, "eth0")))
    assert stands_in_the_way(SUBNETS[4], here, there)


def test_ipv6_gateway_of_an_ipv4_route_counts() -> None:
    assert stands_in_the_way(SUBNETS[6], route(SUBNETS[4], BOOT, GATEWAYS[6]))


def test_each_gateway_of_a_route_with_several_counts() -> None:
    hops = (("eth0", ip_address("10.5.7.1")), ("eth1", ip_address("10.5.8.1")))
    found = told(HostRoute(IPv4Network("203.0.113.0/24"), BOOT, hops)).obstacles
    assert {str(each.net.network_address) for each in found} == {"10.5.7.1", "10.5.8.1"}


def test_what_flannels_devices_have_is_no_obstacle_and_yet_local() -> None:
    tunnel = IPv4Network("10.5.7.0/32")
    found = told(HostRoute(IPv4Network("10.5.0.0/16"), KERNEL, ()), local=((tunnel, ""),))
    assert not found.obstacles
    assert found.local == {tunnel}


def test_loopback_is_left_to_the_backend() -> None:
    loopback = (IPv4Network("127.0.0.0/8"), "lo"), (IPv6Network("::1/128"), "lo")
    assert not told(local=loopback).local


def test_networks_elsewhere_and_in_our_own_subnet_are_left_out() -> None:
    found = told(
        route(IPv4Network("192.168.0.0/24"), KERNEL),
        route(OWN[0], KERNEL, device="cni0"),
        local=((IPv4Network("10.5.1.1/32"), "cni0"), (IPv4Network("192.168.0.1/32"), "br7")),
    )
    assert not found.obstacles


def test_links_have_two_broadcast_addresses_each() -> None:
    found = told(
        route(IPv4Network("192.168.0.0/24"), KERNEL),
        route(IPv4Network("192.168.1.0/31"), KERNEL),
        route(IPv6Network("fd00::/64"), KERNEL),
        broadcast=(IPv4Address("192.168.0.127"),),
    )
    assert sorted(map(str, found.broadcast)) == ["192.168.0.0", "192.168.0.127", "192.168.0.255"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.5.7.0/24", True),
        ("10.0.0.0/8", True),
        ("0.0.0.0/0", True),
        ("10.5.1.128/25", False),
        ("10.5.0.0/23", True),
        ("192.168.0.0/16", False),
        ("fc00:5:0:7::/64", True),
        ("fc00:5:0:1::9/128", False),
    ],
)
def test_change_of_a_route_concerns_leases_where_leases_may_be(text: str, expected: bool) -> None:
    assert concerns(ip_network(text), NETWORKS, OWN) == expected


def test_obstacle_says_what_it_is() -> None:
    texts = [
        str(Obstacle(SUBNETS[4], "br7", "network")),
        str(Obstacle(single(ip_address("10.5.7.1")), "br7", "address")),
        str(Obstacle(SUBNETS[4], "lo", "address")),
        str(Obstacle(single(ip_address("10.5.7.1")), "eth0", "gateway")),
        str(Obstacle(single(ip_address("10.5.7.1")), "eth0", "store")),
    ]
    assert texts == [
        "br7 is connected to 10.5.7.0/24",
        "br7 has 10.5.7.1",
        "lo has 10.5.7.0/24",
        "10.5.7.1 is a gateway of this host through eth0",
        "10.5.7.1 is an address of the store",
    ]


@pytest.mark.parametrize(
    ("route", "subnet", "is_hit"),
    [
        (None, "10.5.7.0/24", True),
        ("10.5.0.0/16", "10.5.7.0/24", True),
        ("10.5.7.0/24", "10.5.7.0/25", True),
        ("10.5.7.0/24", "10.5.7.0/24", True),
        ("10.5.7.0/25", "10.5.7.0/24", False),
        ("10.5.7.9/32", "10.5.7.0/24", False),
        (None, "10.5.8.0/24", False),
    ],
)
def test_address_of_store_is_obstacle_unless_its_route_is_longer_than_the_subnets(
    route: str | None, subnet: str, is_hit: bool
) -> None:
    obstacle = Obstacle(
        single(ip_address("10.5.7.9")), "eth0", "store", IPv4Network(route) if route else None
    )
    found = host_networks((), (), (), networks=NETWORKS, own=OWN, store=[obstacle])
    assert found.obstacles == {obstacle}
    assert claims(found).obstacle_in(IPv4Network(subnet)) == (obstacle if is_hit else None)


def test_obstacle_behind_an_address_of_the_store_is_found() -> None:
    passed = Obstacle(single(ip_address("10.5.7.9")), "eth0", "store", IPv4Network("10.5.7.9/32"))
    other = Obstacle(single(ip_address("10.5.7.10")), "eth0", "gateway")
    assert claims(HostNetworks(frozenset({passed, other}))).obstacle_in(IPv4Network("10.5.7.0/24")) == other


@pytest.mark.parametrize(
    ("route", "text"),
    [
        (HostRoute(None, 3, (("eth0", ip_address("192.0.2.1")),)), "default via 192.0.2.1 dev eth0"),
        (HostRoute(ip_network("10.5.0.0/16"), 3, (("eth0", None),)), "10.5.0.0/16 dev eth0"),
        (
            HostRoute(ip_network("10.5.0.0/16"), 3, (("eth0", ip_address("192.0.2.1")), ("eth1", None))),
            "10.5.0.0/16 via 192.0.2.1 dev eth0 nexthop dev eth1",
        ),
    ],
)
def test_route_of_the_host_is_told_as_ip_route_does(route: HostRoute, text: str) -> None:
    assert str(route) == text
