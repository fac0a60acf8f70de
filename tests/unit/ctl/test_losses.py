"""Packets that routes and rules lose, and neighbours, with a kernel made of values."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl import losses, neighbors
from flanneld.ctl.losses import Lost, Question, dead_end, does_not_forward, lost_packets
from flanneld.ctl.paths import FROM_CONTAINERS, FROM_NODES, TO_CONTAINERS, TO_NODES
from flanneld.model import IPAddress
from flanneld.network.firewall.fate import MARK, Rule
from flanneld.network.firewall.foreign import BaseChain
from flanneld.network.routing import (
    ICMP,
    MAIN_RULE,
    RTN_LOCAL,
    TCP,
    UDP,
    LookupResult,
    PolicyRule,
    RoutedPacket,
)
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import AF, NUD_PERMANENT, RTN_UNICAST
from flanneld.state.resources import Blackhole, ForeignLink, Neighbor, Route
from tests.unit.ctl.documents import object_of, status_of

#: Interfaces that this host does not have: none of them has a file of settings, so none forwards.
UPLINK, TUNNEL, BRIDGE, OTHER = 2, 3, 4, 5
NAMES = {UPLINK: "no-uplink", TUNNEL: "no-tunnel", BRIDGE: "no-bridge", OTHER: "no-other"}
DEVICES: Any = {4: NAMES[BRIDGE], 6: NAMES[BRIDGE]}
MAIN = [PolicyRule(family, MAIN_RULE, "from all lookup main") for family in AF]

SUBNETS = {4: ("10.5.1.0/24", "10.6.0.0/24"), 6: ("fc00:5:1::/64", "fc00:6::/64")}
NODES = {4: ("192.0.2.1", "198.18.0.1"), 6: ("2001:db8::1", "2001:db8::2")}
CONTAINERS = {4: ("10.5.1.2", "10.6.0.2"), 6: ("fc00:5:1::2", "fc00:6::2")}


def document(family: int) -> Any:
    own, theirs = SUBNETS[family]
    net = ip_network(theirs)
    return {
        "network": {"ranges": [{"network": own, "subnet_len": 24}], "backend": "vxlan"},
        "lease": {"subnets": [own]},
        "uplink": {"name": NAMES[UPLINK], "mtu": 1500, "addresses": [NODES[family][0]]},
        "peers": [
            {
                "subnets": [theirs],
                "public_ips": [NODES[family][1]],
                "state": "in the kernel",
                "objects": [object_of(Route(net, NAMES[TUNNEL], net[0], onlink=True))],
            }
        ],
    }


def way(index: int, gateway: str = "", kind: int = RTN_UNICAST) -> LookupResult:
    return LookupResult(index, None, ip_address(gateway) if gateway else None, kind)


RIGHT: dict[str, LookupResult] = {}
for family_ in AF:
    RIGHT |= {
        NODES[family_][0]: way(1, kind=RTN_LOCAL),
        NODES[family_][1]: way(UPLINK),
        CONTAINERS[family_][0]: way(BRIDGE),
        CONTAINERS[family_][1]: way(TUNNEL, str(ip_network(SUBNETS[family_][1])[0])),
    }


class View:
    """A kernel by its policy rules, its answers to lookups, and its routes and neighbours."""

    def __init__(
        self,
        ways: Mapping[str, LookupResult | int],
        rules: list[PolicyRule] | None = None,
        routes: list[tuple[str, int, int]] | None = None,
        neighbors: list[bytes] | None = None,
    ) -> None:
        self.ways = {**RIGHT, **ways}
        self.asked: list[RoutedPacket] = []
        self._rules, self._routes, self._neighbors = MAIN if rules is None else rules, routes, neighbors

    def rules(self, family: int) -> list[PolicyRule]:
        return [each for each in self._rules if each.family == family]

    def lookup(self, packet: RoutedPacket) -> LookupResult:
        self.asked.append(packet)
        found = self.ways[str(packet.target)]
        if isinstance(found, int):
            raise OSError(found, os.strerror(found))
        return found

    def look_up_route(self, target: IPAddress) -> LookupResult | None:
        found = self.ways.get(str(target))
        return None if isinstance(found, int) else found

    def destinations(self, _family: int) -> list[tuple[str, int, int]]:
        return self._routes or []

    def link(self, _name: str) -> None:
        return None

    def dump(self, _kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        family = body[0]
        return ((each, 0, len(each)) for each in self._neighbors or () if each[0] == family)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Lost]]:
    def found(view: View, told: dict[str, Any], bases: list[BaseChain] | None = None) -> list[Lost]:
        monkeypatch.setattr(losses, "HostView", lambda: view)
        status = status_of(told)
        return lost_packets(status, NAMES, DEVICES, lambda: bases or [])

    return found


@pytest.mark.parametrize("family", [4, 6])
def test_right_routes_lose_nothing(family: int, lost: Callable[..., list[Lost]]) -> None:
    view = View({})
    assert lost(view, document(family)) == []
    assert [(str(each.target), str(each.source), each.iif) for each in view.asked] == [
        (NODES[family][1], NODES[family][0], 0),
        (NODES[family][0], NODES[family][1], UPLINK),
        (CONTAINERS[family][1], CONTAINERS[family][0], BRIDGE),
        (CONTAINERS[family][0], CONTAINERS[family][1], TUNNEL),
    ]


NO_ROUTE, INVALID = errno.ENETUNREACH, errno.EINVAL


@pytest.mark.parametrize(
    ("target", "found", "changes", "packets", "cause", "about"),
    [
        (NODES[6][1], way(OTHER), {}, TO_NODES, "uplink", "no-other"),
        (NODES[6][1], way(99), {}, TO_NODES, "route", NODES[6][1]),
        (NODES[6][0], way(UPLINK), {}, FROM_NODES, "route", NODES[6][0]),
        (CONTAINERS[6][1], way(UPLINK), {}, FROM_CONTAINERS, "route", CONTAINERS[6][1]),
        (CONTAINERS[6][1], way(TUNNEL, "fc00:7::"), {}, FROM_CONTAINERS, "route", CONTAINERS[6][1]),
        (CONTAINERS[6][0], way(UPLINK), {}, TO_CONTAINERS, "route", ""),
        (NODES[6][1], NO_ROUTE, {}, TO_NODES, "no route", NODES[6][1]),
        (NODES[6][1], INVALID, {}, TO_NODES, "route", NODES[6][1]),
        (NODES[6][1], NO_ROUTE, {"routes": [("2001:db8::/32", 0, 7)]}, TO_NODES, "route", NODES[6][1]),
        (CONTAINERS[6][1], NO_ROUTE, {}, FROM_CONTAINERS, "route", CONTAINERS[6][1]),
        (NODES[6][1], NO_ROUTE, {"rules": []}, TO_NODES, "no rule", "the main table"),
        (NODES[6][1], way(OTHER), {"rules": []}, TO_NODES, "uplink", "no-other"),
        (CONTAINERS[4][1], way(UPLINK), {}, FROM_CONTAINERS, "forwarding", "no-bridge"),
        (CONTAINERS[4][0], way(UPLINK), {}, TO_CONTAINERS, "forwarding", "no-tunnel"),
        (NODES[4][1], way(OTHER), {}, TO_NODES, "uplink", "no-other"),
        (NODES[4][0], way(UPLINK), {}, FROM_NODES, "route", NODES[4][0]),
        (NODES[4][1], NO_ROUTE, {"rules": []}, TO_NODES, "no rule", "the main table"),
    ],
)
def test_cause_of_a_wrong_route_or_of_none_is_found(
    target: str,
    found: LookupResult | int,
    changes: dict[str, Any],
    packets: str,
    cause: str,
    about: str,
    lost: Callable[..., list[Lost]],
) -> None:
    (one,) = lost(View({target: found}, **changes), document(ip_address(target).version))
    assert (one.packets, one.cause, one.about) == (packets, cause, about)
    assert (one.number, one.asked, one.families) == (1, 1, frozenset({ip_address(target).version}))
    is_lost = isinstance(found, int)
    assert ("the kernel drops it" if is_lost else "the route is") in one.evidence


@pytest.mark.parametrize(
    ("target", "command"),
    [
        (NODES[4][1], "ip rule add lookup main priority 32766"),
        (NODES[6][1], "ip -6 rule add lookup main priority 32766"),
    ],
)
def test_rule_for_the_main_table_is_of_the_family(
    target: str, command: str, lost: Callable[..., list[Lost]]
) -> None:
    (one,) = lost(View({target: NO_ROUTE}, []), document(ip_address(target).version))
    assert [" ".join(each) for each in one.commands] == [command]


def test_forwarding_that_is_off_is_a_finding_of_its_own(lost: Callable[..., list[Lost]]) -> None:
    target = CONTAINERS[6][0]
    found = lost(View({target: errno.EHOSTUNREACH}), document(6))
    assert [each.cause for each in found] == ["route"] * (not does_not_forward(ip_address(target)))
    assert [each.cause for each in lost(View({NODES[6][1]: errno.EHOSTUNREACH}), document(6))] == ["route"]


def test_route_of_the_daemon_that_leads_nowhere_is_not_removed(lost: Callable[..., list[Lost]]) -> None:
    routes = [("2001:db8::/32", 0, 6)]
    guard = Blackhole(ip_network("2001:db8::/32"))
    told = document(6)
    removals = []
    for local in ([], [object_of(guard)]):
        (one,) = lost(View({NODES[6][1]: NO_ROUTE}, routes=routes), told | {"local": local})
        removals.append((one.removal, one.cause))
    assert removals == [("blackhole 2001:db8::/32", "route"), ("", "no route")]


def test_missing_device_asks_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View({CONTAINERS[6][0]: NO_ROUTE, CONTAINERS[6][1]: NO_ROUTE})
    monkeypatch.setattr(losses, "HostView", lambda: view)
    names = {UPLINK: NAMES[UPLINK], BRIDGE: NAMES[BRIDGE]}
    found = lost_packets(status_of(document(6)), names, DEVICES, list)
    assert [each.packets for each in found] == [FROM_CONTAINERS]


def policy(text: str = "from all to x lookup 7", family: Any = 6, **changes: Any) -> PolicyRule:
    return PolicyRule(family, 100, text, **changes)


@pytest.mark.parametrize(
    ("rule", "is_cause"),
    [
        (policy(destination=ip_network(SUBNETS[6][1])), True),
        (policy(source=ip_network(SUBNETS[6][0])), True),
        (policy(destination=ip_network(SUBNETS[6][0])), True),  # on the way back
        (policy(destination=ip_network("fc00:9::/64")), False),
        (policy(iif=NAMES[BRIDGE]), True),
        (policy(iif=NAMES[TUNNEL]), False),
        (policy("from all lookup main"), False),
        (replace(policy(), priority=0), False),
        (policy(family=4), False),
    ],
    ids=["to it", "from it", "the way back", "others", "by it", "by another", "main", "the kernel's", "IPv4"],
)
def test_policy_rule_about_the_packet_or_its_answer_is_the_cause(
    rule: PolicyRule, is_cause: bool, lost: Callable[..., list[Lost]]
) -> None:
    (one,) = lost(View({CONTAINERS[6][1]: way(UPLINK)}, [rule, *MAIN]), document(6))
    assert (one.cause, one.about) == (
        ("rule", f"100: {rule.text}") if is_cause else ("route", CONTAINERS[6][1])
    )


@pytest.mark.parametrize(
    ("rules", "kinds"),
    [
        ([], {(0, 0)}),
        ([policy(protocol=UDP)], {(0, 0), (UDP, 0), (UDP, 8472)}),
        ([policy(ports=(1, 9))], {(0, 0), (UDP, 0), (UDP, 8472)}),
        ([policy(protocol=TCP, ports=(1, 9))], {(0, 0), (TCP, 0), (UDP, 8472)}),
        ([policy(protocol=ICMP)], {(0, 0), (UDP, 8472)}),
        ([policy(protocol=99)], {(0, 0)}),
        ([policy(family=4, protocol=UDP)], {(0, 0)}),
    ],
    ids=["none", "a protocol", "ports", "both", "of IPv4", "another protocol", "another family"],
)
def test_routes_are_looked_up_for_the_kinds_of_packets_that_rules_are_about(
    rules: list[PolicyRule], kinds: set[tuple[int, int]], lost: Callable[..., list[Lost]]
) -> None:
    view = View({}, [*rules, *MAIN])
    assert lost(view, document(6)) == []
    assert {(each.protocol, each.port) for each in view.asked} == kinds


@pytest.mark.parametrize(
    ("hook", "mark", "marks"),
    [
        ("prerouting", (7, 7), {(CONTAINERS[6][1], 5), (CONTAINERS[6][0], 5), (NODES[6][1], 5)}),
        ("output", (7, 7), {(NODES[6][1], 5)}),
        ("postrouting", (7, 7), set()),
        ("prerouting", (0, 0), set()),
    ],
)
def test_routes_are_looked_up_with_the_marks_that_filters_set_before(
    hook: str, mark: tuple[int, int], marks: set[tuple[str, int]], lost: Callable[..., list[Lost]]
) -> None:
    """The packets of VXLAN have the mark of those of containers inside."""
    chains = {"c": (Rule(MARK, new_mark=(5, 0xFFFF)),)}
    view = View({}, [policy(mark=mark), *MAIN])
    lost(view, document(6), [BaseChain("native", 6, "inet t", "c", hook, False, chains)])
    asked = {(str(each.target), each.mark) for each in view.asked if each.mark}
    assert {each for each in asked if each[0] != NODES[6][0]} == marks


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ({}, "192.0.2.2 from None"),
        ({"source": ip_address("192.0.2.1")}, "192.0.2.2 from 192.0.2.1"),
        (
            {"iif": "cni0", "mark": 255, "protocol": UDP, "port": 53},
            "192.0.2.2 from None iif cni0 mark 0xff ipproto udp dport 53",
        ),
    ],
)
def test_question_is_shown_by_its_conditions(question: dict[str, Any], text: str) -> None:
    one = Question(TO_NODES, ip_address("192.0.2.2"), None, "", lambda _: True)
    assert str(replace(one, **question)) == text


def test_loss_is_noted_with_its_cause_and_what_corrects_it() -> None:
    one = Lost(TO_NODES, "filter", "eth0", "dropped", (("true",), ("false",)))
    assert one.note == "dropped; filter eth0; true; false"
    assert replace(one, about="", commands=()).note == "dropped"


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        ([], ""),
        ([("default", 0, 7)], "unreachable 0.0.0.0/0"),
        ([("10.6.0.0/16", 0, 7), ("10.6.0.0/24", 0, 6), ("10.6.0.0/20", 0, 8)], "blackhole 10.6.0.0/24"),
        ([("10.6.0.0/16", 0, 7), ("10.6.0.0/24", 0, RTN_UNICAST)], ""),
        ([("10.6.1.0/24", 0, 6)], ""),
    ],
    ids=["none", "the default one", "the longest", "a way", "of others"],
)
def test_most_specific_route_counts_if_it_leads_nowhere(
    routes: list[tuple[str, int, int]], found: str
) -> None:
    shown = [("0.0.0.0/0" if net == "default" else net, table, kind) for net, table, kind in routes]
    assert dead_end(View({}, routes=shown), ip_address("10.6.0.2")) == found  # type: ignore[arg-type]


# ---- neighbours ---------------------------------------------------------------------------------------

FAILED, REACHABLE = 0x20, 0x02
ROUTER = "192.0.2.254"
MAC = "02:00:00:00:00:07"


def neighbor(address: str, index: int, state: int) -> bytes:
    """An entry as the kernel dumps it: struct ndmsg, NDA_DST and NDA_LLADDR."""
    ip = ip_address(address)
    attributes = ((1, ip.packed), (2, bytes.fromhex(MAC.replace(":", ""))))
    packed = (
        struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
        for kind, value in attributes
    )
    return struct.pack("=BxxxiHBB", AF[ip.version], index, state, 0, 1) + b"".join(packed)


@pytest.mark.parametrize(
    ("found", "entry", "hops"),
    [
        (way(UPLINK), neighbor("198.18.0.1", UPLINK, FAILED), [("198.18.0.1", "198.18.0.1")]),
        (
            way(UPLINK, ROUTER),
            neighbor(ROUTER, UPLINK, FAILED),
            [("198.18.0.1", ROUTER)],
        ),
        (way(UPLINK, ROUTER), neighbor("198.18.0.1", UPLINK, FAILED), []),
        (way(UPLINK), neighbor("198.18.0.1", UPLINK, REACHABLE), []),
        (way(UPLINK), neighbor("198.18.0.2", UPLINK, FAILED), []),
        (errno.ENETUNREACH, neighbor("198.18.0.1", UPLINK, FAILED), []),
    ],
    ids=["the node", "its router", "a node behind a router", "it answered", "another", "no route"],
)
def test_next_hop_that_did_not_answer_is_told(
    found: LookupResult | int, entry: bytes, hops: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "HostView", lambda: View({"198.18.0.1": found}, neighbors=[entry]))
    assert list(neighbors.unresolved([ip_address("198.18.0.1")])) == hops


def test_neighbours_that_are_fixed_by_hand_are_those_of_both_families() -> None:
    entries = [
        neighbor("192.0.2.7", UPLINK, NUD_PERMANENT),
        neighbor("192.0.2.8", UPLINK, REACHABLE),
        neighbor("192.0.2.9", OTHER, NUD_PERMANENT),
        neighbor("2001:db8::7", UPLINK, NUD_PERMANENT),
    ]
    link = SeenLink(UPLINK, "eth0", MAC, 1500, True, ForeignLink("eth0", "a plain interface"))
    view: Any = View({}, neighbors=entries)
    assert list(neighbors.neighbors(view, [link])) == [
        Neighbor("eth0", ip_address(each), MAC) for each in ("192.0.2.7", "2001:db8::7")
    ]


@pytest.mark.parametrize(
    ("address", "setting"),
    [("192.0.2.1", "ipv4/ip_forward"), ("2001:db8::1", "ipv6/conf/all/forwarding")],
)
def test_host_forwards_a_family_unless_its_setting_is_0(address: str, setting: str) -> None:
    file = Path("/proc/sys/net", setting)
    is_on = file.exists() and file.read_text() != "0\n"
    assert does_not_forward(ip_address(address)) is not is_on


BY_SOURCE = PolicyRule(4, 512, "from 192.0.2.1 lookup 1001", source=ip_network("192.0.2.1"))


@pytest.mark.parametrize(
    ("rules", "gateway", "state", "causes"),
    [
        ([BY_SOURCE, *MAIN], ROUTER, FAILED, ["rule"]),
        ([BY_SOURCE, *MAIN], ROUTER, REACHABLE, []),
        ([BY_SOURCE, *MAIN], None, FAILED, []),
        (MAIN, ROUTER, FAILED, []),
    ],
    ids=["a rule", "it answers", "no router", "no rule"],
)
def test_policy_rule_that_leads_to_a_router_without_an_answer_loses_packets(
    rules: list[PolicyRule],
    gateway: str | None,
    state: int,
    causes: list[str],
    lost: Callable[..., list[Lost]],
) -> None:
    found = way(UPLINK, gateway) if gateway else way(UPLINK)
    view = View({NODES[4][1]: found}, rules=rules, neighbors=[neighbor(ROUTER, UPLINK, state)])
    assert [each.cause for each in lost(view, document(4))] == causes
