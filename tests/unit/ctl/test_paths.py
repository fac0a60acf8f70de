"""The search for the largest packet that a path carries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.backends import registry
from flanneld.backends.contract import Host, OuterPackets
from flanneld.config import parse
from flanneld.ctl import paths as module
from flanneld.ctl.compare import RouteTaken
from flanneld.ctl.paths import (
    DISCOVERY,
    FROM_CONTAINERS,
    FROM_PORTS,
    INWARDS,
    THROUGH,
    TO_CONTAINERS,
    TO_PORTS,
    Flow,
    PathToPeer,
    addresses_behind,
    at_ports,
    chosen_of,
    container_of,
    flows,
    listed,
    of_container,
    paths,
    peer_named,
    sample,
    some,
    with_losses,
)
from flanneld.diagnostics.status import PeerStatus
from flanneld.errors import FlannelError
from flanneld.model import IPAddress, Uplink
from flanneld.network.firewall.fate import Packet
from flanneld.network.firewall.foreign import Opening
from flanneld.network.survey import Sized, largest
from flanneld.state.resources import Address, Route
from tests.unit.ctl.documents import object_of, status_of

PSKS = {"ipsec": "x" * 96}
PEER: dict[str, Any] = {
    "subnets": ["10.5.2.0/24", "fd00:5:0:2::/64"],
    "public_ips": ["192.0.2.2"],
    "state": "in the kernel",
    "objects": [],
}
DOCUMENT: dict[str, Any] = {
    "network": {"backend": "wireguard"},
    "uplink": {"name": "eth0", "mtu": 1500},
    "mtu": 1420,
    "lease": {"subnets": ["10.5.1.0/24", "fd00:5:0:1::/64"]},
    "local": [object_of(Address("flannel-wg", ip_address("10.5.1.0")))],
    "peers": [{**PEER, "state": "refused", "subnets": ["10.5.9.0/24"]}, PEER],
}


def peer_of(told: dict[str, Any]) -> PeerStatus:
    return msgspec.convert(told, PeerStatus)


def probe(rtt: float | None) -> dict[str, Any]:
    return {"target": "10.5.2.0", "time": 1.0, "rtt": rtt}


@given(st.lists(st.tuples(st.integers(0, 9100), st.integers(576, 9000)), max_size=3))
def test_the_largest_sizes_are_found_in_few_rounds(paths: list[tuple[int, int]]) -> None:
    rounds: list[bool] = []

    def carried(questions: list[Sized], is_patient: bool) -> list[Sized]:
        rounds.append(is_patient)
        return [(path, size) for path, size in questions if size <= paths[path][0]]

    found = largest([(576, most) for _, most in paths], carried)
    assert found == [min(size, most) if size >= 576 else None for size, most in paths]
    assert rounds.count(False) <= 3
    assert rounds.count(True) <= 1


def test_size_that_was_lost_by_chance_is_found_with_patience() -> None:
    """The answers take longer than the first rounds wait."""
    assert largest(
        [(576, 1500)], lambda asked, is_patient: [each for each in asked if is_patient and each[1] <= 1400]
    ) == [1400]


def asked(questions: Sequence[tuple[IPAddress, int]]) -> list[int]:
    return [size - 100 if target == ip_address("192.0.2.2") else size for target, size in questions]


def test_the_underlay_and_the_tunnel_are_asked() -> None:
    found = paths([peer_of(PEER)], status_of(DOCUMENT), asked)
    assert found == [
        PathToPeer("underlay", ip_address("192.0.2.2"), 1500, 1400, "10.5.2.0/24", "Backend.MTU", 80),
        PathToPeer("tunnel", ip_address("10.5.2.0"), 1420, 1420, "10.5.2.0/24", "Backend.MTU", 80),
    ]
    assert [each.state for each in found] == ["PROBLEM", "ok"]
    assert found[0].note == (
        "larger packets are lost or taken apart: set Backend.MTU to 1400 or less, which leaves 1320 inside"
        " the tunnel; then restart flanneld on all nodes, and recreate their containers"
    )
    assert sample(status_of(DOCUMENT), asked) == found


@pytest.mark.parametrize(
    "name", ["alloc", "extension", "gce", "host-gw", "ipip", "ipsec", "udp", "vxlan", "wireguard"]
)
def test_a_setting_is_named_that_the_backend_takes_its_mtu_from(name: str) -> None:
    def inner(uplink: int, **options: int) -> int:
        backend = {"Type": name, "PSK": PSKS.get(name, ""), **options}
        config = parse(json.dumps({"Network": "10.5.0.0/16", "Backend": backend}))
        address = IPv4Address("192.0.2.1")
        host = Host(Uplink("eth0", 2, uplink, address, address), None, lambda _: None, lambda _: None, bytes)
        return registry.load(name)(config, host).mtu

    document = {**DOCUMENT, "network": {"backend": name}, "mtu": inner(1500)}
    note = paths([peer_of(PEER)], status_of(document), asked)[0].note
    change = {"set Backend.MTU": inner(1500, MTU=1400), "set the MTU of eth0 on all nodes": inner(1400)}
    lowered = next(mtu for words, mtu in change.items() if f"{words} to 1400 or less" in note)
    assert lowered == inner(1500) - 100
    assert (inner(1500, MTU=1400) == lowered) == ("set Backend.MTU" in note)


def test_backend_without_headers_has_paths_of_the_whole_mtu() -> None:
    document = {**DOCUMENT, "network": {"backend": "host-gw"}, "mtu": 1500}
    found = paths([peer_of(PEER)], status_of(document), asked)
    assert [(each.required, each.headers) for each in found] == [(1500, 0), (1500, 0)]
    assert "inside the tunnel" not in found[0].note


def test_document_without_an_uplink_has_only_paths_through_the_tunnel() -> None:
    document = {**DOCUMENT, "network": {"backend": "ipip"}}
    del document["uplink"]
    (path,) = paths([peer_of(PEER)], status_of(document), asked)
    assert (path.name, path.setting) == ("tunnel", "the MTU of the external interface on all nodes")


def test_peers_that_were_silent_when_probed_are_asked_first() -> None:
    peers = [
        {**PEER, "subnets": [f"10.5.{n}.0/24"], "probe": probe(None if n == 50 else 0.1)} for n in range(60)
    ]
    found = sample(status_of({**DOCUMENT, "peers": peers}), lambda questions: [None] * len(questions))
    names = list(dict.fromkeys(each.peer for each in found))
    assert names == ["10.5.50.0/24", *(f"10.5.{n}.0/24" for n in range(7))]


def test_a_peer_that_does_not_answer_is_unknown() -> None:
    path = PathToPeer("tunnel", ip_address("10.5.2.0"), 1420, None)
    assert (path.state, path.note) == ("unknown", "no answer: ICMP may be filtered, or nothing is there")
    tunnel = PathToPeer("tunnel", ip_address("10.5.2.0"), 1420, 1320, headers=80)
    assert tunnel.note.startswith("larger packets of containers are lost: set Backend.MTU to 1400 or less")


def test_path_that_carries_what_the_tunnel_sends_is_well() -> None:
    """After the remedy: Backend.MTU is 1400, and the uplink still has 1500."""
    document = {**DOCUMENT, "mtu": 1320}
    found = paths(
        [peer_of(PEER)],
        status_of(document),
        lambda questions: [1320 if size < 1400 else 1400 for _, size in questions],
    )
    assert [(each.required, each.state) for each in found] == [(1400, "ok"), (1320, "ok")]


@pytest.mark.parametrize("name", ["10.5.2.0/24", "10.5.2.7", "192.0.2.2", "fd00:5:0:2::7"])
def test_a_peer_is_named_by_subnet_address_or_public_ip(name: str) -> None:
    assert peer_named(name, status_of({"peers": [PEER]})) == peer_of(PEER)


@pytest.mark.parametrize("name", ["10.6.0.1", "node7", "192.0.2.3"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(FlannelError):
        peer_named(name, status_of({"peers": [PEER]}))


def test_without_a_daemon_and_a_store_no_name_is_blamed() -> None:
    with pytest.raises(FlannelError, match="no peers are known here; start flanneld"):
        peer_named("10.5.2.0/24", status_of({}))


def test_peer_is_named_and_shown_by_its_node_where_the_store_tells_that() -> None:
    named, other = peer_of(PEER | {"node": "worker-2"}), peer_of(PEER)
    assert peer_named("worker-2", status_of({"peers": [PEER | {"node": "worker-2"}]})) == named
    assert named.place == named.name == f"{other.name} (worker-2)"
    assert other.place == f"{other.name} ({other.public_ips[0]})"
    assert other.name == ",".join(PEER["subnets"])


# ---- flows --------------------------------------------------------------------------------------------

V4, V6 = ("10.5.2.0/24", "10.5.1.0/24"), ("fd00:5:0:2::/64", "fd00:5:0:1::/64")


def dual(**changes: Any) -> dict[str, Any]:
    """A node with both families, whose peer announces its IPv6 address first."""
    routes = [Route(ip_network(net[0]), "flannel.1", ip_network(net[0])[0]) for net in (V4, V6)]
    peer = {
        "subnets": [V4[0], V6[0]],
        "public_ips": ["2001:db8::2", "192.0.2.2"],
        "state": "in the kernel",
        "objects": [object_of(each) for each in routes],
    }
    ranges = [{"network": "10.5.0.0/16", "subnet_len": 24}, {"network": "fd00:5::/48", "subnet_len": 64}]
    return {
        "network": {"backend": "vxlan", "ranges": ranges},
        "uplink": {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1", "2001:db8::1"]},
        "lease": {"subnets": [V4[1], V6[1]]},
        "peers": [peer | changes],
    }


def test_flows_of_both_families_are_between_addresses_of_one() -> None:
    told = status_of(dual())
    found = list(flows(told, chosen_of(told), {4: "cni0", 6: "cni6"}))
    ends = {(each.name, str(each.packet.source), str(each.packet.destination)) for each in found}
    assert ends == {
        ("UDP 8472 from its peers", "192.0.2.2", "192.0.2.1"),
        ("UDP 8472 to its peers", "192.0.2.1", "192.0.2.2"),
        ("UDP 8472 from its peers", "2001:db8::2", "2001:db8::1"),
        ("UDP 8472 to its peers", "2001:db8::1", "2001:db8::2"),
        (DISCOVERY, "2001:db8::2", "2001:db8::1"),
        (FROM_CONTAINERS, "10.5.1.2", "10.5.2.2"),
        (TO_CONTAINERS, "10.5.2.2", "10.5.1.2"),
        (FROM_CONTAINERS, "fd00:5:0:1::2", "fd00:5:0:2::2"),
        (TO_CONTAINERS, "fd00:5:0:2::2", "fd00:5:0:1::2"),
    }
    assert {(each.family, each.packet.iif) for each in found if each.name == FROM_CONTAINERS} == {
        (4, "cni0"),
        (6, "cni6"),
    }
    assert {each.packet.icmp for each in found if each.name == DISCOVERY} == {
        "nd-neighbor-solicit",
        "nd-neighbor-advert",
    }
    assert {str(each) for each in found if each.name == TO_CONTAINERS} == {
        f"{kind} {TO_CONTAINERS}" for kind in ("TCP", "ICMP")
    }


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"public_ips": ["2001:db8::2"], "subnets": [V6[0]]}, {6}),
        ({"public_ips": ["192.0.2.2"], "subnets": [V4[0]]}, {4}),
        ({"public_ips": [], "objects": []}, set()),
    ],
    ids=["IPv6", "IPv4", "neither"],
)
def test_flows_to_a_peer_are_of_the_families_that_it_has(changes: dict[str, Any], names: set[int]) -> None:
    told = status_of(dual(**changes))
    assert {each.family for each in flows(told, chosen_of(told), {})} == names


HERE, THERE = ["192.0.2.1", "2001:db8::1"], ["2001:db8::2", "192.0.2.2"]


@pytest.mark.parametrize("backend", ["host-gw", "vxlan"])
@pytest.mark.parametrize(
    ("here", "there", "is_seen"),
    [
        (HERE, THERE, True),
        ([*HERE, "2001:db8::9"], [*THERE, "2001:db8::8"], True),
        (HERE[:1], THERE, False),
        (HERE, THERE[1:], False),
        (None, THERE, False),
    ],
    ids=["both have IPv6", "several addresses", "not this host", "not the peer", "no uplink is known"],
)
def test_nodes_with_ipv6_addresses_discover_each_other_with_a_tunnel_or_without(
    here: list[str] | None, there: list[str], is_seen: bool, backend: str
) -> None:
    document = dual(public_ips=there)
    document["network"]["backend"] = backend
    document["uplink"] = here and document["uplink"] | {"addresses": here}
    told = status_of({name: value for name, value in document.items() if value is not None})
    ends = ip_address("2001:db8::2"), ip_address("2001:db8::1")
    assert [each for each in flows(told, chosen_of(told), {}) if each.name == DISCOVERY] == [
        Flow(
            DISCOVERY,
            Packet("eth0", "", *ends, "ipv6-icmp", state="untracked", icmp=kind),
            INWARDS,
            (Opening("ipv6-icmp"),),
        )
        for kind in ("nd-neighbor-solicit", "nd-neighbor-advert")
        if is_seen
    ]


CONTAINER, BEHIND = ip_address("10.5.1.2"), ip_address("10.5.2.2")
GOING = Flow(FROM_CONTAINERS, Packet("cni0", "flannel.1", CONTAINER, BEHIND, "tcp", 80), THROUGH, (), "TCP")
COMING = Flow(TO_CONTAINERS, Packet("flannel.1", "cni0", BEHIND, CONTAINER, "tcp", 80), THROUGH, (), "TCP")


@pytest.mark.parametrize(
    ("flow", "changed"), [(GOING, "source"), (COMING, "destination")], ids=["from it", "to it"]
)
def test_flow_of_containers_is_that_of_the_one_with_an_address(flow: Flow, changed: str) -> None:
    address = ip_address("10.5.1.7")
    assert of_container(flow, address) == replace(flow, packet=replace(flow.packet, **{changed: address}))


@pytest.mark.parametrize(
    ("flow", "found"),
    [
        (
            GOING,
            [
                replace(
                    GOING, packet=replace(GOING.packet, iif=port, oif="", source=address), hooks=FROM_PORTS
                )
                for port, address in (("veth1", CONTAINER + 5), ("veth2", CONTAINER))
            ],
        ),
        (
            COMING,
            [
                replace(
                    COMING,
                    packet=replace(COMING.packet, iif="", oif=port, destination=address),
                    hooks=TO_PORTS,
                )
                for port, address in (("veth1", CONTAINER + 5), ("veth2", CONTAINER))
            ],
        ),
        (replace(GOING, hooks=INWARDS), []),
        (replace(GOING, packet=replace(GOING.packet, iif=None)), []),
        (replace(COMING, packet=replace(COMING.packet, oif="docker0")), []),
    ],
    ids=["from containers", "to containers", "not through this host", "no bridge", "another bridge"],
)
def test_flow_of_containers_passes_the_ports_of_their_bridge_with_the_addresses_behind_them(
    flow: Flow, found: list[Flow], monkeypatch: pytest.MonkeyPatch
) -> None:
    brif = Path("/sys/class/net/cni0/brif")
    ports = [brif / "veth1", brif / "veth2"]
    monkeypatch.setattr(Path, "glob", lambda path, _: ports if path == brif else [])
    held: Any = {("veth1", 4): CONTAINER + 5, ("veth2", 6): ip_address("fd00:5:0:1::2")}
    assert list(at_ports(flow, held)) == found


@pytest.mark.parametrize(
    ("subnet", "container"),
    [
        ("10.5.2.0/24", "10.5.2.2"),
        ("10.5.2.0/31", "10.5.2.0"),
        ("10.5.2.4/32", "10.5.2.4"),
        ("fd00::/64", "fd00::2"),
    ],
)
def test_container_is_inside_its_subnet_however_small(subnet: str, container: str) -> None:
    assert str(container_of(ip_network(subnet))) == container


@pytest.mark.parametrize(
    ("packets", "text"),
    [
        ([], ""),
        ([OuterPackets("udp", 500)], "UDP port 500"),
        ([OuterPackets("udp", 500), OuterPackets("esp")], "UDP port 500 and IP protocol 50"),
        (
            [OuterPackets("udp", 500), OuterPackets("ipencap"), OuterPackets("gre")],
            "UDP port 500, IP protocol 4 and IP protocol gre",
        ),
        ([OuterPackets("udp", 7, "ListenPort")], "the UDP port of Backend.ListenPort (7)"),
        ([OuterPackets("udp", 7, "Port")], "UDP port 7"),
    ],
)
def test_packets_between_nodes_are_named_for_people(packets: list[OuterPackets], text: str) -> None:
    assert listed(packets) == text


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"carried": 1450}, ""),
        (
            {"carried": 1350, "headers": 50},
            "larger packets of containers are lost: set Backend.MTU to 1400 or",
        ),
        (
            {"carried": 1350, "headers": 0},
            "larger packets of containers are lost: set Backend.MTU to 1350 or",
        ),
        ({"name": "underlay", "carried": 1350, "headers": 50}, "larger packets are lost or taken apart: set"),
    ],
)
def test_note_of_a_path_names_the_mtu_that_fits(changes: dict[str, Any], note: str) -> None:
    path = replace(PathToPeer("tunnel", ip_address("10.5.2.0"), 1450, None), **changes)
    assert path.note.startswith(note)
    assert bool(path.note) == bool(note)
    inside = {"tunnel": 1350, "underlay": 1300}[path.name]
    assert (f"to {inside + path.headers} or less, which leaves {inside} inside the tunnel;" in path.note) == (
        path.headers > 0
    )


def test_peers_are_spread_over_all_and_refused_ones_are_left_out() -> None:
    states = ["in the kernel", "refused", "unsafe", "pending"]
    peers = [PEER | {"subnets": [f"10.6.{n}.0/24"], "state": states[n % 4]} for n in range(256)]
    chosen = [each.status.name for each in chosen_of(status_of({"peers": peers}))]
    assert chosen == [f"10.6.{n}.0/24" for n in range(0, 256, 4)]
    few = chosen_of(status_of({"peers": peers[:12]}))
    assert [each.status.state for each in few] == ["in the kernel", "pending"] * 3


OUTSIDE, INSIDE = "203.0.113.0/24", "10.6.9.0/24"


@pytest.mark.parametrize(
    ("networks", "names"),
    [
        ([], ["10.6.0.0/24", "10.6.1.0/24"]),
        ([OUTSIDE], ["10.6.0.0/24", "10.6.1.0/24"]),
        ([INSIDE, INSIDE], ["10.6.0.0/24", "10.6.1.0/24", INSIDE]),
        (["10.6.1.0/24"], ["10.6.0.0/24", "10.6.1.0/24"]),
        (["198.18.0.8/29", "10.6.8.0/23"], ["10.6.0.0/24", "10.6.1.0/24", "10.6.8.0/24"]),
    ],
    ids=["none", "of nobody", "of one", "of one of the few", "by its node"],
)
def test_some_peers_are_a_few_and_one_in_each_network(networks: list[str], names: list[str]) -> None:
    peers = [
        peer_of(PEER | {"subnets": [f"10.6.{n}.0/24"], "public_ips": [f"198.18.0.{n}"]}) for n in range(20)
    ]
    chosen = some(peers, list(map(ip_network, networks)), 2)
    assert [each.status.name for each in chosen] == names


@pytest.mark.parametrize(
    ("device", "carried", "targets"),
    [("eth0", 1500, ["10.5.2.2"]), ("flannel.1", 1500, []), ("eth0", None, [])],
    ids=["without a tunnel", "through a tunnel", "the node is silent"],
)
def test_containers_behind_a_node_are_those_without_a_tunnel(
    device: str, carried: int | None, targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    route = Route(ip_network(V4[0]), device, ip_address("192.0.2.2"))
    told = status_of(dual(objects=[object_of(route)]))
    monkeypatch.setattr(module, "route_lookup", lambda: lambda _: RouteTaken(device, ip_address("192.0.2.2")))
    there = [PathToPeer("underlay", ip_address("192.0.2.2"), 1500, carried, V4[0])]
    assert list(map(str, addresses_behind(told, there))) == targets


@pytest.mark.parametrize(
    ("underlay", "tunnel", "lost"),
    [
        ((0, 0), (0, 8), 8),
        ((0, 0), (2, 3), 5),
        ((0, 8), (1, 8), 1),
        ((1, 0), (0, 8), 0),
        (None, (2, 8), 2),
    ],
    ids=[
        "a limit of the tunnel",
        "losses, too",
        "a limit of ICMP",
        "losses between the nodes",
        "silent node",
    ],
)
def test_what_only_the_tunnel_loses_is_no_limit_of_icmp(
    underlay: tuple[int, int] | None, tunnel: tuple[int, int], lost: int
) -> None:
    node, end = ip_address("192.0.2.2"), ip_address("10.5.2.0")
    found = [
        PathToPeer("underlay", node, 1500, 1500 if underlay else None, "10.5.2.0/24"),
        PathToPeer("tunnel", end, 1450, 1450, "10.5.2.0/24"),
    ]
    losses = {end: tunnel} | ({node: underlay} if underlay else {})
    assert [each.lost for each in with_losses(found, losses)][1] == lost
