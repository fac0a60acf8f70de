"""Devices to containers, the ways of their packets, and the options of their ports."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from flanneld.ctl.inside import (
    astray_route,
    container_devices,
    is_ours,
    led_away,
    lost_echoes,
    off_options,
    overriding_rule,
)
from flanneld.network.bridges import learnt
from flanneld.network.routing import LookupResult, PolicyRule
from flanneld.network.rtnetlink.messages import RTN_UNICAST
from tests.unit.ctl.documents import status_of

OWN = {"lease": {"subnets": ["10.5.1.0/24", "fc00:5::/64"]}}


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, "echoes of 1450 bytes"), (2, "2 of 10 echoes"), (10, "10 of 10 echoes")],
)
def test_a_single_lost_echo_is_the_largest(number: int, words: str) -> None:
    assert lost_echoes(number, 1450) == words


@pytest.mark.parametrize(
    ("addresses", "devices", "found"),
    [
        ([("cni0", "10.5.1.1")], ["flannel.1"], {4: "cni0"}),
        ([("flannel.1", "10.5.1.0"), ("cni0", "10.5.1.1")], ["flannel.1"], {4: "cni0"}),
        ([("cni0", "10.5.1.1"), ("br7", "10.5.1.9"), ("br8", "fc00:5::1")], [], {4: "cni0", 6: "br8"}),
        ([("cni0", "10.5.2.1"), ("eth0", "192.0.2.1")], [], {}),
    ],
    ids=["ours", "not flannel's", "the first of each family", "of others"],
)
def test_device_to_containers_is_the_first_with_an_address_of_our_subnet(
    addresses: list[tuple[str, str]], devices: list[str], found: dict[int, str]
) -> None:
    seen = [(name, ip_address(text)) for name, text in addresses]
    assert container_devices(status_of(OWN | {"devices": devices}), seen) == found


def test_devices_of_flannel_may_be_given_where_the_status_does_not_tell_them() -> None:
    seen = [("flannel.1", ip_address("10.5.1.0")), ("cni0", ip_address("10.5.1.1"))]
    assert container_devices(status_of(OWN), seen, ["flannel.1"]) == {4: "cni0"}
    assert container_devices(status_of(OWN), seen) == {4: "flannel.1"}


#: This host's end is interface 2; its address is 10.5.1.1.
VETH, OTHER, HOST = 2, 3, [ip_address("10.5.1.1"), ip_address("fe80::1")]
TARGET, TARGET6 = ip_address("10.5.2.2"), ip_address("fc00:6::2")


def way(index: int = VETH, gateway: str = "", kind: int = RTN_UNICAST) -> LookupResult:
    return LookupResult(index, None, ip_address(gateway) if gateway else None, kind)


@pytest.mark.parametrize(
    ("found", "ours"),
    [
        (way(), True),
        (way(gateway="10.5.1.1"), True),
        (way(gateway="10.5.1.9"), False),
        (way(gateway="169.254.1.1"), True),
        (way(gateway="fe80::9"), True),
        (way(kind=6), False),
        (way(gateway="10.5.1.1", kind=7), False),
    ],
    ids=[
        "no gateway",
        "this host",
        "another",
        "link-local",
        "link-local of IPv6",
        "blackhole",
        "unreachable",
    ],
)
def test_route_inside_leads_to_this_host_by_one_of_its_addresses_or_none(
    found: LookupResult, ours: bool
) -> None:
    assert is_ours(found, HOST) is ours


class View:
    """The routes and rules inside a container, as values."""

    def __init__(self, route: Any = None, ends: Any = (), rules: Any = (), defaults: Any = ()) -> None:
        self._route, self._ends, self._rules, self._defaults = route, ends, rules, defaults

    def matching_route(self, _target: Any) -> Any:
        return self._route

    def name_of(self, index: int) -> str:
        return {VETH: "eth0", OTHER: "eth1"}[index]

    def destinations(self, _family: int) -> Any:
        return self._ends

    def rules(self, family: int) -> list[PolicyRule]:
        return [each for each in self._rules if each.family == family]

    def default_routes(self, _family: int) -> Any:
        return self._defaults


class Found:
    def __init__(self, destination: str, index: int) -> None:
        self.destination = ip_network(destination) if destination else None
        self.hops = [(index, None)]


ASTRAY = View(Found("10.5.0.0/16", OTHER))


@pytest.mark.parametrize(
    ("view", "text"),
    [(ASTRAY, "10.5.0.0/16 dev eth1"), (View(Found("", OTHER)), ""), (View(), "")],
    ids=["a route", "the default one", "none"],
)
def test_route_that_leads_astray_is_named_as_it_is_deleted(view: Any, text: str) -> None:
    assert astray_route(view, TARGET) == text


@pytest.mark.parametrize(
    ("view", "found", "target", "text"),
    [
        (ASTRAY, way(), TARGET, ""),
        (ASTRAY, way(OTHER), TARGET, "10.5.0.0/16 dev eth1"),
        (ASTRAY, way(gateway="10.5.1.9"), TARGET, "10.5.0.0/16 dev eth1"),
        (ASTRAY, way(gateway="10.5.1.1"), TARGET, ""),
        (ASTRAY, way(gateway="169.254.1.1"), TARGET, ""),
        (View(ends=[("10.5.2.0/24", 0, 6)]), None, TARGET, "blackhole 10.5.2.0/24"),
        (View(), None, TARGET, ""),
        (View(), way(gateway="fe80::1"), TARGET6, ""),
        (View(), way(OTHER, gateway="fe80::9"), TARGET6, "default via fe80::9 dev eth1"),
        (View(), way(gateway="fc00::9"), TARGET6, ""),
    ],
    ids=[
        "to this host",
        "another interface",
        "another gateway",
        "by this host",
        "by proxy ARP",
        "a dead end",
        "no route",
        "this host's link-local address",
        "another router",
        "a gateway of no route",
    ],
)
def test_packets_of_a_container_are_led_away_by_the_route_that_is_named(
    view: Any, found: LookupResult | None, target: Any, text: str
) -> None:
    assert led_away(view, found, target, [VETH], HOST) == text


RULE = PolicyRule(4, 100, "from all lookup 7")


@pytest.mark.parametrize(
    ("rules", "defaults", "rule"),
    [
        ([PolicyRule(4, 0, "from all lookup local"), RULE], ["default"], RULE),
        ([RULE], [], None),
        ([PolicyRule(4, 32766, "from all lookup main")], ["default"], None),
        ([PolicyRule(6, 100, "from all lookup 7")], ["default"], None),
    ],
    ids=["a rule", "nothing to override", "the kernel's", "another family"],
)
def test_policy_rule_overrides_a_default_route(
    rules: list[PolicyRule], defaults: list[str], rule: PolicyRule | None
) -> None:
    view: Any = View(rules=rules, defaults=defaults)
    assert overriding_rule(view, 4) == rule


def test_interface_that_is_no_port_has_no_options_and_no_bridge_knows_macs() -> None:
    assert off_options("lo") == off_options("no-such-port") == ()
    assert learnt("lo") == learnt("no-such-bridge") == set()
