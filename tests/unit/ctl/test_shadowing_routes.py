"""Which ways of others packets for the peers take."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl import compare
from flanneld.ctl.compare import (
    ActualState,
    RouteTaken,
    ShadowingRoute,
    by_length,
    by_lookup,
    lengths_of,
    route_lookup,
    shadowing_routes,
    subnets_of,
)
from flanneld.diagnostics.status import Status
from flanneld.model import IPAddress
from flanneld.network.routing import RTN_LOCAL, LookupResult, PolicyRule
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import RTN_UNICAST
from flanneld.state.resources import ForeignLink, Route
from tests.unit.ctl.documents import object_of, status_of

ROUTE = Route(IPv4Network("10.5.2.0/24"), "flannel.1", IPv4Address("10.5.2.0"), onlink=True)
ROUTE_TO_ALL = Route(IPv4Network("10.5.0.0/16"), "flannel0")
OURS = RouteTaken("flannel.1", ip_address("10.5.2.0"))


def document(*peer_objects: Route, local: tuple[Route, ...] = ()) -> Status:
    def objects(routes: tuple[Route, ...]) -> list[dict[str, Any]]:
        return [object_of(route) for route in routes]

    peer = {"subnets": ["10.5.2.0/24", "fc00:2::/64"], "objects": objects(peer_objects)}
    return status_of({"local": objects(local), "peers": [peer]})


def found_by_lookup(told: Status, way: RouteTaken) -> list[ShadowingRoute]:
    found = ActualState({ROUTE: True, ROUTE_TO_ALL: True}, ())
    return list(by_lookup(told, found, lambda _: way, subnets_of(told)))


@pytest.mark.parametrize(
    "way", [RouteTaken(""), RouteTaken("eth0"), RouteTaken("flannel.1", ip_address("10.5.3.0"))]
)
def test_a_packet_that_goes_elsewhere_makes_a_detour(way: RouteTaken) -> None:
    assert found_by_lookup(document(ROUTE), way) == [ShadowingRoute("10.5.2.0/24", f"10.5.2.1 {way}")]


def test_each_of_two_peers_with_one_subnet_is_looked_up() -> None:
    told = document(ROUTE)
    other = replace(told.each_peer[0], objects=())
    elsewhere = RouteTaken("eth0")
    for peers in ((*told.each_peer, other), (other, *told.each_peer)):
        assert found_by_lookup(replace(told, peers=peers), elsewhere) == [
            ShadowingRoute("10.5.2.0/24", f"10.5.2.1 {elsewhere}")
        ]


@pytest.mark.parametrize(("subnet", "address"), [("10.5.2.4/32", "10.5.2.4"), ("10.5.2.4/31", "10.5.2.5")])
def test_small_subnet_is_looked_up_by_an_address_inside(subnet: str, address: str) -> None:
    route = Route(ip_network(subnet), "flannel.1")
    told = status_of({"peers": [{"subnets": [subnet], "objects": [object_of(route)]}]})
    found = by_lookup(told, ActualState({route: True}, ()), lambda _: RouteTaken(""), {subnet})
    assert list(found) == [ShadowingRoute(subnet, f"{address} nowhere")]


def test_a_packet_on_the_wanted_route_makes_none() -> None:
    assert found_by_lookup(document(ROUTE), OURS) == []
    assert found_by_lookup(document(local=(ROUTE_TO_ALL,)), RouteTaken("flannel0")) == []


def test_a_route_that_is_missing_or_not_wanted_has_no_detour() -> None:
    assert found_by_lookup(document(replace(ROUTE, device="eth0")), RouteTaken("")) == []
    assert found_by_lookup(document(), RouteTaken("eth0")) == []


def test_a_more_specific_route_makes_a_detour() -> None:
    routes = [
        (ip_network(text), "eth0", "")
        for text in ("10.5.2.128/25", "10.5.2.0/24", "10.5.0.0/16", "10.5.3.0/25", "fc00:2::5/128")
    ]
    routes.append((ip_network("10.5.2.64/26"), "", "blackhole"))
    ipv4, ipv6 = "10.5.2.128/25 dev eth0", "fc00:2::5/128 dev eth0"
    nowhere = "blackhole 10.5.2.64/26"
    subnets = subnets_of(document(ROUTE))
    assert list(by_length(subnets, lengths_of(subnets), routes)) == [
        ShadowingRoute("10.5.2.0/24", f"route {ipv4}", f"ip route del {ipv4}"),
        ShadowingRoute("fc00:2::/64", f"route {ipv6}", f"ip -6 route del {ipv6}"),
        ShadowingRoute("10.5.2.0/24", f"route {nowhere}", f"ip route del {nowhere}"),
    ]


SUBNETS = ["10.5.2.0/24", "10.5.3.0/24"]
RULE = PolicyRule(4, 100, "from all lookup 7")


class KernelOfValues:
    """A kernel by its routes, the networks of its own addresses, and its policy rules."""

    def __init__(
        self, routes: list[tuple[str, int, int]], local: Sequence[str] = (), rules: Sequence[PolicyRule] = ()
    ) -> None:
        self._routes, self._local, self._rules = routes, list(map(ip_network, local)), rules

    def destinations(self, family: int) -> list[tuple[str, int, int]]:
        return [each for each in self._routes if (":" in each[0]) == (family == 6)]

    def local(self, family: int) -> list[tuple[int, Any, int]]:
        return [(1, each, 0) for each in self._local if each.version == family]

    def rules(self, family: int) -> list[PolicyRule]:
        return [each for each in self._rules if each.family == family]


def route_of(subnet: str) -> Route:
    net = ip_network(subnet)
    return Route(net, "flannel.1", net[0], onlink=True)


def shadowing(
    kernel: KernelOfValues, monkeypatch: pytest.MonkeyPatch, subnets: Sequence[str] = SUBNETS
) -> tuple[list[str], list[ShadowingRoute]]:
    """Which addresses were looked up, and what was found."""
    wanted = {each: route_of(each) for each in subnets}
    peers = [{"subnets": [each], "objects": [object_of(route)]} for each, route in wanted.items()]
    looked_up: list[str] = []

    def look_up(target: IPAddress) -> RouteTaken:
        looked_up.append(str(target))
        route = next(each for each in wanted.values() if target in each.destination)
        return RouteTaken(route.device, route.gateway)

    monkeypatch.setattr(compare, "Kernel", lambda: kernel)
    links = (SeenLink(2, "eth0", "", 1500, True, ForeignLink("eth0", "a plain interface")),)
    found = ActualState(dict.fromkeys(wanted.values(), True), links)
    return looked_up, shadowing_routes(status_of({"peers": peers}), found, look_up)


def routes(*destinations: str, kind: int = RTN_UNICAST) -> list[tuple[str, int, int]]:
    return [(each, 2, kind) for each in destinations]


@pytest.mark.parametrize(
    ("kernel", "looked_up"),
    [
        (KernelOfValues(routes(*SUBNETS, "10.5.0.0/16", "fc00::/64")), []),
        (KernelOfValues(routes(SUBNETS[1])), ["10.5.2.1"]),
        (KernelOfValues(routes(*SUBNETS, SUBNETS[1])), ["10.5.3.1"]),
        (KernelOfValues(routes(*SUBNETS, SUBNETS[0], SUBNETS[1])), ["10.5.2.1", "10.5.3.1"]),
        (KernelOfValues(routes(*SUBNETS, "10.6.0.0/16", "10.6.0.0/16")), []),
        (KernelOfValues(routes(*SUBNETS), ["10.5.2.7/32"]), ["10.5.2.1"]),
        (KernelOfValues(routes(*SUBNETS), ["10.5.2.0/24"]), ["10.5.2.1"]),
        (KernelOfValues(routes(*SUBNETS), ["10.5.0.0/16", "10.6.2.7/32", "fc00::1/128"]), []),
        (KernelOfValues(routes(*SUBNETS), rules=[RULE]), ["10.5.2.1", "10.5.3.1"]),
        (KernelOfValues(routes(*SUBNETS), rules=[replace(RULE, family=6)]), ["10.5.2.1", "10.5.3.1"]),
        (KernelOfValues(routes(*SUBNETS), rules=[replace(RULE, priority=32766)]), []),
    ],
    ids=[
        "one route each",
        "no route",
        "two routes",
        "two of each",
        "two of others",
        "an address of ours in it",
        "a network of ours",
        "addresses elsewhere",
        "a policy rule",
        "a policy rule of IPv6",
        "the kernel's rules",
    ],
)
def test_only_a_subnet_with_more_than_its_route_is_looked_up(
    kernel: KernelOfValues, looked_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = shadowing(kernel, monkeypatch)
    assert sorted(asked) == looked_up
    assert found == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (RTN_UNICAST, "10.5.2.128/25 dev eth0"),
        (6, "blackhole 10.5.2.128/25"),
        (7, "unreachable 10.5.2.128/25"),
        (8, "prohibit 10.5.2.128/25"),
        (9, "throw 10.5.2.128/25"),
    ],
)
def test_route_of_any_kind_to_a_part_of_a_subnet_is_told(
    kind: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KernelOfValues([*routes(*SUBNETS), *routes("10.5.2.128/25", kind=kind)])
    asked, found = shadowing(kernel, monkeypatch)
    assert found == [ShadowingRoute("10.5.2.0/24", f"route {text}", f"ip route del {text}")]
    assert asked == []


def test_subnet_of_a_peer_in_that_of_another_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    subnets = ["10.5.2.0/24", "10.5.2.0/25"]
    _, found = shadowing(KernelOfValues(routes(*subnets)), monkeypatch, subnets)
    text = "10.5.2.0/25 dev eth0"
    assert found == [ShadowingRoute("10.5.2.0/24", f"route {text}", f"ip route del {text}")]


@pytest.mark.parametrize(
    ("way", "taken"),
    [
        (LookupResult(1, None, None, RTN_UNICAST), RouteTaken("lo")),
        (
            LookupResult(1, None, ip_address("192.0.2.254"), RTN_UNICAST),
            RouteTaken("lo", ip_address("192.0.2.254")),
        ),
        (LookupResult(1, None, None, RTN_LOCAL), RouteTaken("lo", is_here=True)),
        (LookupResult(1, None, None, 3), RouteTaken("")),
        (LookupResult(1 << 30, None, None, RTN_UNICAST), RouteTaken("")),
        (None, RouteTaken("")),
    ],
    ids=["a route", "a gateway", "this host", "a broadcast", "no such interface", "no route"],
)
def test_lookup_tells_a_route_with_its_interface_or_none(
    way: LookupResult | None, taken: RouteTaken, monkeypatch: pytest.MonkeyPatch
) -> None:
    class View:
        def look_up_route(self, _target: IPAddress) -> LookupResult | None:
            return way

    monkeypatch.setattr(compare, "HostView", View)
    assert route_lookup()(ip_address("192.0.2.1")) == taken
