"""Resources: their order, their keys, and their words in the log."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.state.resources import (
    Address,
    Blackhole,
    Dummy,
    FdbEntry,
    ForeignLink,
    Ipip,
    Kind,
    Neighbor,
    RivalRoute,
    Route,
    Tun,
    Vxlan,
    WireGuard,
    destination_of,
    route_key,
)

HOST, NET, NET_V6 = IPv4Address("192.0.2.1"), IPv4Network("10.5.1.0/24"), IPv6Network("fc00:5::/64")
MAC = "02:00:00:00:00:01"
ORDER = ["LINK", "ADDRESS", "NEIGHBOR", "FDB", "ROUTE", "RULES", "FILE", "REMOTE"]


def test_what_others_stand_on_is_made_first() -> None:
    assert [each.name for each in sorted(Kind)] == ORDER


@pytest.mark.parametrize(
    ("resource", "key", "words"),
    [
        (
            Vxlan("flannel.1", 1, 2, HOST, 8472, MAC, 1450),
            ("links", "flannel.1"),
            f"link flannel.1 mtu 1450 address {MAC} vxlan id 1 local 192.0.2.1",
        ),
        (Ipip("tunl", HOST, 1480), ("links", "tunl"), "link tunl mtu 1480 ipip local 192.0.2.1"),
        (Tun("flannel0", 1472), ("links", "flannel0"), "link flannel0 mtu 1472 tun"),
        (WireGuard("wg", 1420), ("links", "wg"), "link wg mtu 1420 wireguard"),
        (Dummy("ipsec", 1423), ("links", "ipsec"), "link ipsec mtu 1423 dummy"),
        (ForeignLink("flannel.1", "a bridge"), ("links", "flannel.1"), "link flannel.1, a bridge"),
        (Address("wg", HOST), ("addresses", "wg", 4, int(HOST)), "address 192.0.2.1/32 dev wg"),
        (
            Neighbor("vx", HOST, MAC),
            ("neighbors", "vx", 4, int(HOST)),
            f"neigh 192.0.2.1 lladdr {MAC} dev vx",
        ),
        (FdbEntry("vx", MAC, HOST), ("fdb", "vx", MAC), f"fdb {MAC} dst 192.0.2.1 dev vx"),
        (
            Route(NET, "vx", HOST, onlink=True),
            route_key(NET),
            "route 10.5.1.0/24 via 192.0.2.1 dev vx onlink",
        ),
        (Route(NET, "wg"), route_key(NET), "route 10.5.1.0/24 dev wg"),
        (RivalRoute(route_key(NET)), route_key(NET), "a route of another kind"),
        (Blackhole(NET), route_key(NET, "blackhole"), "blackhole 10.5.1.0/24"),
        (Blackhole(NET_V6, unreachable=True), route_key(NET_V6, "blackhole"), "unreachable fc00:5::/64"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_resource_has_a_key_and_words(resource: Any, key: object, words: str) -> None:
    assert (resource.key, str(resource)) == (key, words)
    assert {resource, replace(resource)} == {resource}


@pytest.mark.parametrize("net", [NET, NET_V6])
def test_a_destination_is_read_back_from_the_key_of_a_route_only(net: IPv4Network | IPv6Network) -> None:
    assert destination_of(route_key(net)) == destination_of(route_key(net, "blackhole")) == net
    assert destination_of(("fdb", *route_key(net)[1:])) is None
