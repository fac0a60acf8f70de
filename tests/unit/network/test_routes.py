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


def test_no_name_makes_a_route_stale_where_commands_make_routes() -> None:
    domain = replace(DOMAIN, by_name=False)
    for destination in ("10.0.0.0/8", "10.5.7.0/24"):
        route = Route(ip_network(destination), "flannel-wg", None)
        assert DOMAIN.owns_route(SeenRoute(route, PROTO_BOOT), adopt=True)
        assert not domain.owns_route(SeenRoute(route, PROTO_BOOT), adopt=True)
