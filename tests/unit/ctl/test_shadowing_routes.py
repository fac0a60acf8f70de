"""Which ways of others packets for the peers take."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, ip_address, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.compare import (
    ActualState,
    RouteTaken,
    ShadowingRoute,
    by_length,
    by_lookup,
    lengths_of,
    subnets_of,
)
from flanneld.diagnostics.status import Status
from flanneld.state.resources import Route
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
