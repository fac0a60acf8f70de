"""Whatever removes or changes what the daemon has made, it puts it right at once and then is quiet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import SOON, Pair, Pairs, connect, state

ANY_BACKEND = [
    pytest.param(
        ["ip route replace {subnet} nexthop via {gateway} nexthop via 198.18.0.2"],
        ["Restored route {subnet}"],
        id="a route with two gateways",
    ),
    pytest.param(
        ["ip route append {subnet} via {gateway}", "ip route del {subnet}"],
        ["Restored route {subnet}"],
        id="a second route in its place",
    ),
    pytest.param(["ip route del {subnet}"], ["Restored route {subnet}"], id="a deleted route"),
    pytest.param(
        ["ip route replace {subnet} via {gateway}"],
        ["Restored route {subnet}"],
        id="a route to another gateway",
    ),
    pytest.param(
        ["ip route replace {subnet} dev lo"], ["Restored route {subnet}"], id="a route to another device"
    ),
    pytest.param(
        ["ip route replace blackhole {subnet}"], ["Restored route {subnet}"], id="a route into the void"
    ),
]

VXLAN = [
    pytest.param(["ip neigh del {base} dev flannel.1"], ["Restored neigh {base}"], id="a deleted ARP entry"),
    pytest.param(
        ["ip neigh replace {base} lladdr 02:00:00:00:00:99 dev flannel.1 nud permanent"],
        ["Restored neigh {base}"],
        id="a changed ARP entry",
    ),
    pytest.param(
        ["ip neigh replace {base} lladdr {mac} dev flannel.1 nud stale"],
        ["Restored neigh {base}"],
        id="an ARP entry that may expire",
    ),
    pytest.param(["bridge fdb del {mac} dev flannel.1"], ["Restored fdb {mac}"], id="a deleted FDB entry"),
    pytest.param(
        ["bridge fdb replace {mac} dev flannel.1 dst 198.18.0.99 self permanent"],
        ["Restored fdb {mac}"],
        id="a changed FDB entry",
    ),
    pytest.param(
        ["bridge fdb replace {mac} dev flannel.1 dst 198.18.0.2 port 99 self permanent"],
        ["Restored fdb {mac}"],
        id="an FDB entry to another port",
    ),
    pytest.param(
        ["bridge fdb replace {mac} dev flannel.1 dst 198.18.0.2 vni 99 self permanent"],
        ["Restored fdb {mac}"],
        id="an FDB entry to another segment",
    ),
    pytest.param(
        ["ip address del {own}/32 dev flannel.1"], ["Restored address {own}/32"], id="a deleted address"
    ),
    pytest.param(["ip link del flannel.1"], ["Restored link flannel.1"], id="a deleted device"),
    pytest.param(
        ["ip link set flannel.1 down", "ip link set flannel.1 name other", "ip link set other up"],
        ["Device flannel.1 was renamed to other", "Restored link flannel.1"],
        id="a device with another name",
    ),
    pytest.param(["ip link set flannel.1 down"], ["Restored link flannel.1"], id="a device set down"),
    pytest.param(
        ["ip link set flannel.1 down", "ip link set flannel.1 up"],
        ["Restored route {subnet}"],
        id="a device set down and up",
    ),
    pytest.param(
        ["ip link set flannel.1 address 02:00:00:00:00:99"], ["Restored link flannel.1"], id="a changed MAC"
    ),
    pytest.param(["ip link set flannel.1 mtu 1400"], ["Restored link flannel.1"], id="a changed MTU"),
    pytest.param(
        ["ip link set flannel.1 type vxlan learning"], ["Restored link flannel.1"], id="learning turned on"
    ),
    pytest.param(
        ["ip link del flannel.1", "ip link add flannel.1 type bridge", "ip link set flannel.1 up"],
        ["Restored link flannel.1"],
        id="a device of another kind",
    ),
    pytest.param(
        [
            "ip link del flannel.1",
            "ip link add flannel.1 type vxlan id 2 dev eth0 local 198.18.0.1 dstport 8472",
        ],
        ["Restored link flannel.1"],
        id="a device of another segment",
    ),
    pytest.param(
        [
            "ip route flush dev flannel.1",
            "ip neigh flush dev flannel.1 nud permanent",
            "bridge fdb del {mac} dev flannel.1",
            "ip address flush dev flannel.1 scope global",
        ],
        [
            "Restored route {subnet}",
            "Restored neigh {base}",
            "Restored fdb {mac}",
            "Restored address {own}/32",
        ],
        id="everything flushed",
    ),
]

UNWANTED = [
    pytest.param("ip route add 10.99.0.0/16 dev flannel.1", "route 10.99.0.0/16", id="a route"),
    pytest.param(
        "ip neigh add 10.5.0.7 lladdr 02:00:00:00:00:99 dev flannel.1 nud permanent",
        "neigh 10.5.0.7",
        id="an ARP entry",
    ),
    pytest.param(
        "bridge fdb add 02:00:00:00:00:99 dev flannel.1 dst 198.18.0.99",
        "fdb 02:00:00:00:00:99",
        id="an FDB entry",
    ),
    pytest.param(
        "bridge fdb add 02:00:00:00:00:99 dev flannel.1 dst 198.18.0.99 port 99",
        "fdb 02:00:00:00:00:99",
        id="an FDB entry to another port",
    ),
    pytest.param("ip address add 10.5.0.7/32 dev flannel.1", "address 10.5.0.7/32", id="an address"),
]

FOREIGN = [
    "route add 192.0.2.0/24 via 198.18.0.254",
    "route add 10.5.0.0/24 via 198.18.0.254",  # no node gets a network's first subnet
    "neighbor add 198.18.0.99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
    "address add 198.18.0.201/24 dev eth0",
]
FOREIGN_ON_TUNNEL = ["address add 192.168.77.1/24 dev flannel.1"]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


@pytest.fixture
def vxlan(pairs: Pairs) -> Pair:
    return pairs.get("vxlan")


@pytest.fixture
def pair(pairs: Pairs, backend: dict[str, Any]) -> Pair:
    return pairs.get(backend["Type"])


@pytest.mark.parametrize(("commands", "healed"), ANY_BACKEND)
def test_the_way_to_a_peer_heals(pair: Pair, commands: list[str], healed: list[str]) -> None:
    pair.check_healing(commands, healed)


def test_a_route_of_others_that_comes_before_ours_goes_behind_it(pair: Pair) -> None:
    node, subnet = pair.node, pair.peer.subnet()
    ours = routes_to(node, subnet)
    rival = pair.fill_in("{subnet} via {gateway} dev eth0")
    pair.damage(f"ip route prepend {rival}")
    wait_for(lambda: routes_to(node, subnet)[:1] == ours, what="our route to be the first")
    assert len(routes_to(node, subnet)) == 2
    connect(node, pair.peer)
    node.namespace.ip(f"route del {rival}")
    pair.wait_until_healed()


def routes_to(node: Node, subnet: str) -> list[str]:
    """In the kernel's order: the first is taken."""
    return node.run("ip", "route", "show", subnet).stdout.splitlines()


@pytest.mark.parametrize(("commands", "healed"), VXLAN)
def test_the_tunnel_heals(vxlan: Pair, commands: list[str], healed: list[str]) -> None:
    vxlan.check_healing(commands, healed)


@pytest.mark.parametrize(("command", "removed"), UNWANTED)
def test_stale_objects_on_our_device_are_removed(vxlan: Pair, command: str, removed: str) -> None:
    vxlan.check_healing([command], [f"Removed {removed}"])


def test_foreign_objects_stay(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend)
    connect(node, peer)
    node.namespace.ip(*FOREIGN, *(FOREIGN_ON_TUNNEL if backend["Type"] == "vxlan" else []))
    before = state(node)
    with node.paused():
        node.namespace.ip(f"route del {peer.subnet()}")
    wait_for(lambda: state(node) == before, SOON, "the kernel to be as it was")
    connect(node, peer)


def test_damage_while_the_daemon_works_heals(vxlan: Pair) -> None:
    for _ in range(5):
        vxlan.node.run("ip", "link", "del", "flannel.1")
        vxlan.wait_until_healed()
    connect(vxlan.node, vxlan.peer)


def test_device_moved_into_another_namespace_is_made_again(vxlan: Pair) -> None:
    """It keeps its VNI there, so the kernel makes no other one as long as it exists."""
    there = vxlan.node.container().namespace
    vxlan.damage(f"ip link set flannel.1 netns {there.name}")
    vxlan.wait_until_healed()
    vxlan.node.wait_for_log("Removed flannel.1 in the network namespace to which it was moved")
    assert there.json("ip", "-j", "link", "show", "type", "vxlan") == []
    connect(vxlan.node, vxlan.peer)


def test_device_with_another_mac_stays_in_the_namespace_it_was_moved_to(lab: Lab) -> None:
    node, _ = lab.cluster({"Type": "vxlan"})
    there = node.container().namespace
    with node.paused():
        node.run("ip", "link", "set", "flannel.1", "netns", there.name)
        there.ip("link set flannel.1 address 02:00:00:00:00:99")
    node.wait_for_log("File exists")
    assert there.json("ip", "-j", "link", "show", "dev", "flannel.1") != []


def test_nothing_is_written_in_a_steady_state(pair: Pair) -> None:
    pair.wait_until_quiet(2)
