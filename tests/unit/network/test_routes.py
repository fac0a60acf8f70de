"""Routes of the main table: their order and their protocol numbers."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from msgspec.structs import replace

from flanneld.network.rtnetlink.domain import SPREAD, Behind, Domain, SeenRoute, in_order, protocol_for
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Blackhole, Key, Resource, RivalRoute, Route
from flanneld.state.table import Claim, Seen

# ---- order of routes to one network --------------------------------------------------------------


def route(number: int) -> Route:
    return Route(IPv4Network("10.1.1.0/24"), "flannel.1", IPv4Address(f"192.168.0.{number}"))


def state(*resources: Resource) -> dict[Key, Resource]:
    return {resource.key: resource for resource in resources}


def ours(resource: Resource) -> Seen:
    return Seen(resource)


def foreign(resource: Resource) -> Seen:
    return Seen(resource, Claim.FOREIGN)


def counting(
    desired: dict[Key, Resource], found: list[Seen], known: dict[Key, Resource] | None = None
) -> list[Seen]:
    return list(in_order(desired, found, {} if known is None else known))


RIVALS = (route(2), RivalRoute(route(1).key))
CONNECTED = RivalRoute(route(1).key, is_connected=True)
WANTED = state(route(1))


def test_the_first_of_the_wrong_ones_counts() -> None:
    assert counting(WANTED, [foreign(route(2)), foreign(route(3))]) == [foreign(route(2))]


def test_one_behind_the_right_one_does_not_count() -> None:
    assert counting(WANTED, [ours(route(1)), foreign(route(2))]) == [ours(route(1))]


def test_all_to_a_network_that_is_not_wanted_count() -> None:
    found = [ours(route(1)), foreign(route(2)), ours(route(3))]
    assert counting({}, found) == found


def test_routes_found_to_be_ours_are_noted_and_those_of_others_are_not() -> None:
    known: dict[Key, Resource] = {}
    counting(WANTED, [foreign(route(1))], known)
    assert known == {}
    counting(WANTED, [ours(route(2))], known)
    assert known == state(route(2))
    counting(WANTED, [ours(route(1))], known)
    assert known == WANTED


def test_routes_of_ours_are_forgotten_when_they_are_neither_wanted_nor_there() -> None:
    known = dict(WANTED)
    counting({}, [ours(route(1))], known)
    assert known == WANTED
    counting({}, [], known)
    assert known == {}


def test_lost_route_stays_ours_while_it_is_wanted() -> None:
    known = dict(WANTED)
    counting(WANTED, [], known)
    assert known == WANTED


@pytest.mark.parametrize("rival", RIVALS)
def test_a_route_behind_another_one_to_its_network_has_to_come_first(rival: Resource) -> None:
    assert counting(WANTED, [foreign(rival), ours(route(1))]) == [Seen(Behind(route(1)))]


@pytest.mark.parametrize("rival", RIVALS)
def test_operators_route_that_serves_is_not_brought_to_the_front(rival: Resource) -> None:
    assert counting(WANTED, [foreign(rival), foreign(route(1))]) == [foreign(route(1))]


def test_connected_network_is_never_put_behind_ours() -> None:
    known = dict(WANTED)
    assert counting(WANTED, [foreign(CONNECTED), ours(route(1))], known) == [ours(route(1))]


def test_of_two_ipv6_routes_to_a_network_either_may_come_first() -> None:
    one, other = (
        Route(IPv6Network("fc00::/64"), "eth0", IPv6Address(f"fd00::{number}")) for number in (1, 2)
    )
    assert counting(state(one), [foreign(other), ours(one)]) == [ours(one)]


# ---- protocol numbers of our routes --------------------------------------------------------------


OURS = {"flannel.1", "flannel-v6.1", "flannel-wg"}
#: Calico, OVN, Open/R, the routing daemons of FRR, kube-vip, and all that rtnetlink.h assigns below 100.
TAKEN = {*range(100), *range(186, 199), 248}


def vxlan(index: int, length: int = 24) -> Route:
    net = ip_network(((10 << 24) + (index << 32 - length), length))
    return Route(net, "flannel.1", net.network_address, onlink=True)


def test_no_number_belongs_to_another_program() -> None:
    assert TAKEN.isdisjoint(SPREAD)
    assert len(SPREAD) == len(set(SPREAD)) == 106
    assert set(SPREAD) <= set(range(256))


@pytest.mark.parametrize("length", [20, 24, 28])
def test_neighbouring_subnets_differ_and_each_number_is_used_as_often(length: int) -> None:
    count = 2 * len(SPREAD)
    numbers = [protocol_for(vxlan(index, length), OURS, spread=True) for index in range(count)]
    assert sorted(numbers) == sorted([*SPREAD, *SPREAD])
    assert numbers == [protocol_for(vxlan(index, length), OURS, spread=True) for index in range(count)]


@pytest.mark.parametrize(
    ("route", "number"),
    [
        (Route(ip_network("fc00:0:0:7::/64"), "flannel-v6.1", ip_address("fc00:0:0:7::")), PROTO_BOOT),
        (Route(ip_network("10.5.7.0/24"), "flannel-wg"), PROTO_BOOT),
        (Route(ip_network("10.5.7.0/24"), "eth0", ip_address("192.0.2.7")), PROTO_FLANNEL),
        (Blackhole(ip_network("10.5.7.0/24")), PROTO_FLANNEL),
    ],
)
def test_other_routes_keep_their_number_however_many_there_are(route: Route | Blackhole, number: int) -> None:
    assert protocol_for(route, OURS, spread=True) == number


def test_few_routes_have_gos_number() -> None:
    assert protocol_for(vxlan(7), OURS, spread=False) == PROTO_BOOT


DOMAIN = Domain(
    "eth0",
    frozenset({"flannel.1"}),
    ((ip_network("10.0.0.0/8"), 24),),
    unmarked=True,
)


@pytest.mark.parametrize(
    ("device", "protocol", "is_ours"),
    [
        ("flannel.1", SPREAD[0], True),  # our device
        ("flannel.7", SPREAD[0], True),  # an earlier run's
        ("flannel.7", PROTO_BOOT, True),
        ("flannel.7", 4, False),  # an operator's: static
        ("eth0", PROTO_BOOT, True),  # Go's
        ("eth0", SPREAD[0], False),  # another program's
    ],
)
def test_a_stale_route_is_known_by_its_device(device: str, protocol: int, *, is_ours: bool) -> None:
    route = Route(ip_network("10.5.7.0/24"), device, ip_address("10.5.7.0"))
    assert DOMAIN.owns_route(SeenRoute(route, protocol), adopt=True) is is_ours


@pytest.mark.parametrize(
    ("destination", "device", "is_ours"),
    [
        ("10.0.0.0/8", "flannel0", True),  # udp's
        ("10.0.0.0/9", "flannel0", False),
        ("10.0.0.0/8", "eth0", False),
    ],
)
def test_route_to_whole_network_is_stale_on_a_device_of_flannel_only(
    destination: str, device: str, *, is_ours: bool
) -> None:
    route = Route(ip_network(destination), device, ip_address("192.0.2.1") if device == "eth0" else None)
    assert DOMAIN.owns_route(SeenRoute(route, PROTO_BOOT), adopt=True) is is_ours


MARKED = replace(DOMAIN, former=(ip_network("172.16.0.0/12"), ip_network("fd00::/48")), unmarked=False)


@pytest.mark.parametrize(
    ("destination", "device", "protocol", "is_ours", "is_adopted"),
    [
        ("10.5.7.0/24", "flannel.1", PROTO_BOOT, True, True),
        ("192.0.2.0/24", "flannel.1", 4, True, True),  # whatever is on our device
        ("10.5.7.0/24", "flannel.1", 2, False, False),  # but for the kernel's
        ("10.5.7.0/24", "eth0", PROTO_FLANNEL, True, True),
        ("172.16.7.0/24", "eth0", PROTO_FLANNEL, False, True),  # of an earlier run
        ("fd00:0:0:7::/64", "eth0", PROTO_FLANNEL, False, True),
        ("fc00:0:0:7::/64", "eth0", PROTO_FLANNEL, False, False),
        ("192.0.2.0/24", "eth0", PROTO_FLANNEL, False, False),
        ("10.5.7.0/24", "flannel.7", PROTO_BOOT, False, True),
        ("172.16.7.0/24", "flannel.7", PROTO_BOOT, False, False),
        ("10.5.7.0/25", "flannel.7", PROTO_BOOT, False, False),
        ("10.5.7.0/24", "eth0", PROTO_BOOT, False, False),
        ("10.5.9.0/24", "eth0", PROTO_BOOT, False, True),  # the one to adopt
    ],
)
def test_marked_route_is_ours_inside_our_networks_and_at_a_start_in_former_ones(
    destination: str, device: str, protocol: int, *, is_ours: bool, is_adopted: bool
) -> None:
    domain = replace(MARKED, adopted=frozenset({ip_network("10.5.9.0/24")}))
    net = ip_network(destination)
    seen = SeenRoute(Route(net, device, net.network_address), protocol)
    assert domain.owns_route(seen, adopt=False) is is_ours
    assert domain.owns_route(seen, adopt=True) is is_adopted


def test_route_on_the_uplink_without_a_gateway_is_a_links() -> None:
    route = Route(ip_network("10.5.7.0/24"), "eth0")
    assert not DOMAIN.owns_route(SeenRoute(route, PROTO_BOOT), adopt=True)


@pytest.mark.parametrize(
    ("address", "is_ours", "is_adopted"),
    [("10.5.1.0", True, True), ("172.16.1.0", False, True), ("192.0.2.1", False, False)],
)
def test_address_and_blackhole_are_ours_inside_our_networks(
    address: str, *, is_ours: bool, is_adopted: bool
) -> None:
    blackhole = Blackhole(ip_network(f"{address}/32"))
    for adopt, expected in ((False, is_ours), (True, is_adopted)):
        assert MARKED.owns_address(ip_address(address), adopt=adopt) is expected
        assert MARKED.owns_blackhole(blackhole, adopt=adopt) is expected


def test_families_of_a_domain_are_those_of_its_networks() -> None:
    assert DOMAIN.families == (4,)
    assert MARKED.families == (4, 6)
    assert replace(MARKED, ranges=(), former=MARKED.former[1:]).families == (6,)


@pytest.mark.parametrize(
    ("device", "protocol", "is_connected"), [("eth0", 2, True), ("flannel.1", 2, False), ("eth0", 3, False)]
)
def test_connected_route_is_the_kernels_on_a_device_of_others(
    device: str, protocol: int, *, is_connected: bool
) -> None:
    assert DOMAIN.is_connected(SeenRoute(Route(ip_network("10.5.7.0/24"), device), protocol)) is is_connected


def test_route_behind_another_one_says_so() -> None:
    behind = Behind(route(1))
    assert behind.key == route(1).key
    assert str(behind) == "route 10.1.1.0/24 via 192.168.0.1 dev flannel.1, behind another one"


def test_no_name_makes_a_route_stale_where_commands_make_routes() -> None:
    domain = replace(DOMAIN, by_name=False)
    for destination in ("10.0.0.0/8", "10.5.7.0/24"):
        route = Route(ip_network(destination), "flannel-wg", None)
        assert DOMAIN.owns_route(SeenRoute(route, PROTO_BOOT), adopt=True)
        assert not domain.owns_route(SeenRoute(route, PROTO_BOOT), adopt=True)
