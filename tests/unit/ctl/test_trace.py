"""``flannelctl trace``: the way to an address, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.compare import ActualState, RouteTaken
from flanneld.ctl.drops import Drop
from flanneld.ctl.inside import Container
from flanneld.ctl.losses import Lost
from flanneld.ctl.output import State
from flanneld.ctl.paths import TO_CONTAINERS
from flanneld.ctl.trace import Hop, from_container, trace
from flanneld.model import IPAddress
from flanneld.network.firewall.fate import Rule
from flanneld.network.firewall.rules import FLANNEL_POSTRTG, Nets, Purpose, desired_rules
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.state.resources import FdbEntry, ForeignLink, Neighbor, Resource, Route, Vxlan
from tests.unit.ctl.documents import object_of, status_of

MAC = "02:00:00:00:00:02"
BASE = IPv4Address("10.5.2.0")
ROUTE = Route(IPv4Network("10.5.2.0/24"), "flannel.1", BASE, onlink=True)
NEIGH = Neighbor("flannel.1", BASE, MAC)
FDB = FdbEntry("flannel.1", MAC, IPv4Address("192.0.2.2"))
LINK = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, "02:00:00:00:00:01", 1450)

DOCUMENT: dict[str, Any] = {
    "network": {"ranges": [{"network": "10.5.0.0/16", "subnet_len": 24}]},
    "lease": {"subnets": ["10.5.1.0/24"]},
    "uplink": {"name": "eth0", "mtu": 1500},
    "devices": ["flannel.1"],
    "local": [object_of(LINK)],
    "peers": [
        {
            "subnets": ["10.5.2.0/24"],
            "public_ips": ["192.0.2.2"],
            "state": "in the kernel",
            "reason": "",
            "conflicts": [],
            "objects": [object_of(each) for each in (NEIGH, FDB, ROUTE)],
        }
    ],
}
WAYS = {
    "10.5.1.7": RouteTaken("cni0"),
    "10.5.2.7": RouteTaken("flannel.1", ip_address("10.5.2.0")),
    "192.0.2.2": RouteTaken("eth0"),
    "203.0.113.1": RouteTaken("eth0", ip_address("192.0.2.254")),
}


NETS = Nets(IPv4Network("10.5.0.0/16"), IPv4Network("10.5.1.0/24"))
MASQUERADING = desired_rules("own-chains", NETS, Purpose(masquerade=True))[FLANNEL_POSTRTG]
SPARING = desired_rules(
    "own-chains", NETS.sparing([IPv4Network("203.0.113.0/24")]), Purpose(masquerade=True)
)[FLANNEL_POSTRTG]


def found(*without: Resource, link: Vxlan = LINK) -> ActualState:
    objects: dict[Resource, bool] = {each: True for each in (ROUTE, NEIGH, FDB, link) if each not in without}
    links = (
        SeenLink(2, "eth0", "", 1500, True, ForeignLink("eth0", "a plain interface")),
        SeenLink(3, "flannel.1", link.mac, link.mtu, link.up, link),
    )
    return ActualState(objects, links)


def hops(
    target: str,
    *without: Resource,
    link: Vxlan = LINK,
    document: Mapping[str, Any] = DOCUMENT,
    ways: Mapping[str, RouteTaken] = WAYS,
) -> dict[str, Hop]:
    def look_up_route(address: IPAddress) -> RouteTaken:
        return ways.get(str(address), RouteTaken(""))

    return {
        hop.hop: hop
        for hop in trace(ip_address(target), status_of(document), found(*without, link=link), look_up_route)
    }


@pytest.mark.parametrize(
    ("state", "handshake", "verdict", "shown"),
    [
        ("established", 970.0, "ok", "192.0.2.2:51820, handshake: 30 s ago"),
        ("silent", None, "PROBLEM", "192.0.2.2:51820, handshake: no answer"),
        ("idle", None, "unknown", "192.0.2.2:51820, handshake: none yet"),
        ("idle", 1030.0, "unknown", "192.0.2.2:51820, handshake: in the future"),
    ],
)
def test_the_session_that_carries_the_packet_is_a_hop(
    state: str, handshake: float | None, verdict: str, shown: str
) -> None:
    session = {
        "subnet": "10.5.2.0/24",
        "state": state,
        "handshake": handshake,
        "rx_bytes": 0,
        "tx_bytes": 0,
        "endpoint": "192.0.2.2:51820",
    }
    peer = {**DOCUMENT["peers"][0], "sessions": [session]}
    found = hops("10.5.2.7", document={**DOCUMENT, "peers": [peer], "time": 1000.0})["session"]
    assert (found.state, found.found) == (verdict, shown)


def test_each_hop_to_a_peer_is_shown() -> None:
    way = hops("10.5.2.7")
    assert list(way) == ["lease", "route", "neigh", "fdb", "device", "uplink"]
    assert {hop.state for hop in way.values()} == {"ok"}
    assert way["uplink"].found == "192.0.2.2 dev eth0"


def test_the_hop_that_is_missing_is_named() -> None:
    for hop, wanted in (("route", ROUTE), ("neigh", NEIGH), ("fdb", FDB)):
        way = hops("10.5.2.7", wanted)
        assert [name for name, each in way.items() if each.state != "ok"] == [hop]
        assert str(wanted) in way[hop].note


def test_a_route_of_somebody_else_that_comes_first_is_a_problem() -> None:
    for other, text in (
        (RouteTaken("tun0"), "dev tun0"),
        (RouteTaken("flannel.1", ip_address("10.5.9.0")), "via 10.5.9.0 dev flannel.1"),
    ):
        way = hops("10.5.2.7", ways={**WAYS, "10.5.2.7": other})
        assert way["route"].state == "PROBLEM"
        assert way["route"].found == text


def test_a_device_that_is_not_as_wanted_is_a_problem() -> None:
    device = hops("10.5.2.7", link=replace(LINK, port=8473, parent=5))["device"]
    assert device.state == "PROBLEM"
    assert device.note == "has parent interface 5, wanted eth0; has port 8473, wanted 8472"


def test_a_peer_whose_host_is_not_reached_is_a_problem() -> None:
    way = hops("10.5.2.7", ways={**WAYS, "192.0.2.2": RouteTaken("")})
    assert (way["uplink"].state, way["uplink"].found) == ("PROBLEM", "192.0.2.2 nowhere")


def test_a_lease_that_was_refused_says_why() -> None:
    refused = {**DOCUMENT["peers"][0], "state": "refused", "reason": "no VtepMAC", "objects": []}
    way = hops("10.5.2.7", document={**DOCUMENT, "peers": [refused]})
    assert way["lease"].note == "refused: no VtepMAC"
    assert way["route"].state == "PROBLEM"


def test_a_container_of_this_node_is_behind_a_bridge() -> None:
    assert [hop.state for hop in hops("10.5.1.7").values()] == ["ok", "ok"]


def test_our_own_subnet_without_a_bridge_is_a_problem() -> None:
    way = hops("10.5.1.7", ways={"10.5.1.7": RouteTaken("eth0", ip_address("192.0.2.254"))})
    assert way["route"].state == "PROBLEM"


def test_an_address_of_nobody_is_a_problem() -> None:
    assert hops("10.5.99.7")["lease"] == Hop("lease", "none", State.PROBLEM, "no node has a lease for it")


def test_an_address_outside_the_network_goes_the_hosts_way() -> None:
    way = hops("203.0.113.1")
    assert way["lease"].found == "outside the network"
    assert way["route"].found == "via 192.0.2.254 dev eth0"


def test_without_a_daemon_and_a_store_the_lease_is_not_known() -> None:
    host = {"network": DOCUMENT["network"], "lease": DOCUMENT["lease"]}
    assert hops("10.5.2.7", document=host)["lease"].state == "unknown"


@pytest.mark.parametrize("target", ["192.0.2.1", "10.5.1.1"])
def test_a_packet_to_this_host_stays_here(target: str) -> None:
    way = RouteTaken("lo", is_here=True)
    told = trace(ip_address(target), status_of(DOCUMENT), found(), lambda _: way)
    assert [(hop.state, hop.found) for hop in told][1] == ("ok", "this host")


@pytest.mark.parametrize(
    ("way", "state"),
    [(RouteTaken("eth0"), "unknown"), (RouteTaken(""), "PROBLEM"), (RouteTaken("lo", is_here=True), "ok")],
)
def test_without_the_network_nobody_says_that_an_address_is_outside(way: RouteTaken, state: str) -> None:
    lease, route = trace(ip_address("10.5.2.7"), status_of({}), found(), lambda _: way)
    assert (lease.state, route.state) == ("unknown", state)


@pytest.mark.parametrize(
    ("rules", "source", "note"),
    [
        (MASQUERADING, "this node's address on eth0", "-j MASQUERADE"),
        (SPARING, "the container's address in 10.5.1.0/24", "-d 203.0.113.0/24"),
        ((), "the container's address in 10.5.1.0/24", "no rule of flannel's is about it"),
    ],
)
def test_source_that_an_outsider_sees_is_told_with_its_rule(
    rules: tuple[Rule, ...], source: str, note: str
) -> None:
    told = status_of({**DOCUMENT, "firewall": {"place": "nft", "masquerade": True}})
    target = ip_address("203.0.113.1")
    way = WAYS[str(target)]
    *_, hop = trace(target, told, found(), lambda _: way, (), lambda _: rules)
    assert (hop.hop, hop.found, hop.state) == ("source", source, "ok")
    assert note in hop.note


def test_rules_that_cannot_be_read_leave_the_source_unknown() -> None:
    told = status_of({**DOCUMENT, "firewall": {"place": "nft", "masquerade": True}})
    *_, hop = trace(
        ip_address("203.0.113.1"), told, found(), lambda _: RouteTaken("eth0"), (), lambda _: None
    )
    assert (hop.hop, hop.state) == ("source", "unknown")


def test_what_drops_the_packets_here_is_a_hop_with_its_rule() -> None:
    drops = (
        Drop("chain INPUT of table ip filter", "UDP 8472 from its peers", "-A INPUT -j DROP", ()),
        Drop("chain c of table inet wall", "UDP 8472 to its peers", "", (), doubt="limit accept # handle 3"),
    )
    told = status_of(DOCUMENT)
    *_, sure, unsure = trace(ip_address("10.5.2.7"), told, found(), lambda way: WAYS[str(way)], drops)
    assert sure == Hop(
        "filter",
        "chain INPUT of table ip filter",
        State.PROBLEM,
        "drops UDP 8472 from its peers: -A INPUT -j DROP",
    )
    assert (unsure.hop, unsure.state) == ("filter", "unknown")
    assert unsure.note.endswith("its policy; unless this rule passes them: limit accept # handle 3")


CONTAINER = Container(
    "/run/netns/a", "eth0", ip_address("10.5.1.7"), True, 1450, reached_by="cni0", attached_to="cni0"
)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, ""),
        ({"is_routed": False, "reached_by": ""}, "it has no route to the containers of other nodes"),
        ({"reached_by": "eth0"}, "packets for it leave by eth0"),
        ({"reached_by": "a0"}, "packets for it leave by a0"),
        ({"reached_by": ""}, "packets for it leave by no interface"),
        ({"mtu": 1451}, "its MTU is above that of the network, 1450: recreate it"),
        ({"mtu": 1449}, ""),
    ],
)
def test_container_that_sends_is_a_hop_with_what_is_wrong_there(changes: dict[str, Any], note: str) -> None:
    at = replace(CONTAINER, **changes)
    hop = from_container(at, status_of({**DOCUMENT, "mtu": 1450}))
    assert (hop.hop, hop.found) == ("container", f"10.5.1.7 on cni0, MTU {at.mtu}")
    assert hop.state == ("PROBLEM" if note else "ok")
    assert hop.note.startswith(note)
    assert bool(hop.note) == bool(note)
    assert from_container(replace(CONTAINER, mtu=9000), status_of({})).state == "ok"


def test_hops_that_are_well_have_no_note() -> None:
    assert {hop.note for hop in hops("10.5.2.7").values()} == {""}
    assert hops("10.5.2.7")["device"].found == "flannel.1, MTU 1450, up"


@pytest.mark.parametrize(
    ("without", "link", "note"),
    [
        ((LINK,), LINK, "there is no flannel.1"),
        ((), replace(LINK, up=False), "has up off, wanted on"),
    ],
)
def test_device_that_is_missing_or_down_is_a_problem(
    without: tuple[Resource, ...], link: Vxlan, note: str
) -> None:
    kernel = found(*without, link=link)
    if without:
        kernel = ActualState(kernel.objects, kernel.links[:1])
    told = trace(ip_address("10.5.2.7"), status_of(DOCUMENT), kernel, lambda ip: WAYS[str(ip)])
    (device,) = [hop for hop in told if hop.hop == "device"]
    assert (device.state, device.note) == ("PROBLEM", note)


def test_device_of_another_configuration_that_is_down_is_a_problem() -> None:
    device = hops("10.5.2.7", link=replace(LINK, up=False), document={**DOCUMENT, "local": []})["device"]
    assert (device.found, device.note) == ("flannel.1, MTU 1450, down", "is down")


@pytest.mark.parametrize(
    ("ways", "state", "note"),
    [
        ({}, "ok", ""),
        ({"192.0.2.2": RouteTaken("eth1")}, "unknown", "the uplink is eth0"),
        ({"192.0.2.2": RouteTaken("")}, "PROBLEM", "the uplink is eth0"),
    ],
)
def test_tunnel_that_leaves_by_another_interface_is_told(
    ways: dict[str, RouteTaken], state: str, note: str
) -> None:
    both = {**DOCUMENT["peers"][0], "public_ips": ["2001:db8::2", "192.0.2.2"]}
    way = hops("10.5.2.7", document={**DOCUMENT, "peers": [both]}, ways={**WAYS, **ways})
    assert (way["uplink"].state, way["uplink"].note) == (state, note)
    assert way["uplink"].found.startswith("192.0.2.2 ")


def test_public_ip_of_another_family_is_no_way() -> None:
    six = {**DOCUMENT["peers"][0], "public_ips": ["2001:db8::2"]}
    assert "uplink" not in hops("10.5.2.7", document={**DOCUMENT, "peers": [six]})


def test_neighbour_is_the_gateway_of_the_route() -> None:
    other = replace(NEIGH, address=BASE - 1, mac="02:00:00:00:00:09")
    objects = [object_of(each) for each in (other, NEIGH, FDB, ROUTE)]
    way = hops("10.5.2.7", document={**DOCUMENT, "peers": [{**DOCUMENT["peers"][0], "objects": objects}]})
    assert way["neigh"].found == str(NEIGH)
    assert way["fdb"].found == str(FDB)


CAUSES = ("filter", "forwarding", "rule", "no rule", "route", "no route", "uplink", "arp")


@pytest.mark.parametrize(
    ("without", "shown"),
    [((), CAUSES[:6]), ((ROUTE,), CAUSES[:4])],
    ids=["no hop is wrong", "a hop is wrong"],
)
def test_losses_are_hops_unless_a_hop_tells_them(
    without: tuple[Resource, ...], shown: tuple[str, ...]
) -> None:
    lost = [Lost(TO_CONTAINERS, each, "", f"because of {each}") for each in CAUSES]
    told = trace(
        ip_address("10.5.2.7"), status_of(DOCUMENT), found(*without), lambda ip: WAYS[str(ip)], lost=lost
    )
    lookups = [hop for hop in told if hop.hop == "lookup"]
    assert [hop.note for hop in lookups] == [f"because of {each}" for each in shown]
    assert {(hop.found, hop.state) for hop in lookups} == {(TO_CONTAINERS, "PROBLEM")}


@pytest.mark.parametrize(
    ("way", "document", "state"),
    [
        (RouteTaken("cni0"), DOCUMENT, "ok"),
        (RouteTaken("lo", is_here=True), DOCUMENT, "ok"),
        (RouteTaken("eth0"), DOCUMENT, "PROBLEM"),
        (RouteTaken("flannel.1"), DOCUMENT, "PROBLEM"),
        (RouteTaken(""), DOCUMENT, "PROBLEM"),
        (RouteTaken("flannel.1"), {**DOCUMENT, "devices": []}, "ok"),
    ],
)
def test_packet_for_our_container_must_not_leave_by_the_uplink_or_the_tunnel(
    way: RouteTaken, document: dict[str, Any], state: str
) -> None:
    route = hops("10.5.1.7", document=document, ways={"10.5.1.7": way})["route"]
    assert route.state == state
    assert route.note == ("" if state == "ok" else NO_BRIDGE)


NO_BRIDGE = "no bridge of this node has this subnet: is the container runtime up?"


@pytest.mark.parametrize("state", ["refused", "unsafe", "contested"])
def test_lease_that_is_not_used_is_told_with_its_conflicts(state: str) -> None:
    peer = {**DOCUMENT["peers"][0], "state": state, "conflicts": ["10.5.3.0/24", "10.5.4.0/24"]}
    lease = hops("10.5.2.7", document={**DOCUMENT, "peers": [peer]})["lease"]
    assert (lease.state, lease.note) == ("PROBLEM", f"{state}: 10.5.3.0/24, 10.5.4.0/24")


@pytest.mark.parametrize(
    ("way", "lease", "state"),
    [(RouteTaken("eth0"), "the leases are not known", "unknown"), (RouteTaken(""), "", "PROBLEM")],
)
def test_route_to_an_address_of_an_unknown_node_is_shown(way: RouteTaken, lease: str, state: str) -> None:
    host = {"network": DOCUMENT["network"], "lease": DOCUMENT["lease"]}
    told = hops("10.5.2.7", document=host, ways={"10.5.2.7": way})
    assert told["lease"].note.startswith(lease)
    assert told["route"].state == state
    assert hops("10.5.99.7", ways={"10.5.99.7": way})["route"].state == "unknown"


@pytest.mark.parametrize(
    ("target", "way", "document"),
    [
        ("203.0.113.1", RouteTaken(""), DOCUMENT),
        ("203.0.113.1", RouteTaken("lo", is_here=True), DOCUMENT),
        ("2001:db8::1", RouteTaken("eth0"), DOCUMENT),
        ("203.0.113.1", RouteTaken("eth0"), {**DOCUMENT, "lease": None}),
    ],
    ids=["no route", "this host", "another family", "no lease"],
)
def test_source_is_told_only_of_packets_that_leave(
    target: str, way: RouteTaken, document: dict[str, Any]
) -> None:
    told = hops(target, document=document, ways={target: way})
    assert list(told) == ["lease", "route"]
    assert told["route"].state == ("ok" if way.device else "PROBLEM")
