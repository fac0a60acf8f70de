"""IPv6 beside IPv4, and alone: the same network once more, on a device and with routes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.pair import DEVICES, DUAL_STACK, SOON, Pair, Pairs, connect

IPV6_ONLY: dict[str, Any] = {**DUAL_STACK, "EnableIPv4": False}
DEVICE = "flannel-v6.1"

STACKS = [pytest.param(DUAL_STACK, id="dual stack"), pytest.param(IPV6_ONLY, id="IPv6 only")]

ANY_BACKEND = [
    pytest.param("ip -6 route append {subnet6} via fd00:18::fe", "Restored route {subnet6}", id="a rival"),
    pytest.param("ip -6 route del {subnet6}", "Restored route {subnet6}", id="a deleted route"),
    pytest.param("ip -6 route replace {subnet6} dev lo", "Restored route {subnet6}", id="a changed route"),
]

VXLAN = [
    pytest.param("ip neigh del {base6} dev flannel-v6.1", "Restored neigh {base6}", id="a deleted NDP entry"),
    pytest.param("bridge fdb del {mac6} dev flannel-v6.1", "Restored fdb {mac6}", id="a deleted FDB entry"),
    pytest.param(
        "bridge fdb replace {mac6} dev flannel-v6.1 dst fd00:18::99 self permanent",
        "Restored fdb {mac6}",
        id="a changed FDB entry",
    ),
    pytest.param(
        "ip address del {own6}/128 dev flannel-v6.1", "Restored address {own6}/128", id="a deleted address"
    ),
    pytest.param("ip link del flannel-v6.1", "Restored link flannel-v6.1", id="a deleted device"),
    pytest.param("ip link set flannel-v6.1 down", "Restored link flannel-v6.1", id="a device set down"),
]


def base(node: Node) -> str:
    return node.subnet(6).removesuffix("/64")


def destinations(node: Node) -> set[str]:
    return {row["dst"] for family in (4, 6) for row in node.routes(family=family)}


def env(node: Node) -> list[str]:
    return node.subnet_file.read_text().splitlines()


# ---- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
def test_containers_reach_each_other(lab: Lab, backend: dict[str, Any], stack: dict[str, Any]) -> None:
    nodes = lab.cluster(backend, nodes=3, **stack)
    for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        connect(one, other)
        assert list(one.container().addresses) == ([6] if stack is IPV6_ONLY else [4, 6])


def test_three_objects_lead_to_a_peer_in_each_family(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, **DUAL_STACK)
    wait_for(lambda: {peer.subnet(), peer.subnet(6)} <= destinations(node), SOON, "the peer")
    link, mac = node.link(DEVICE) or {}, (peer.link(DEVICE) or {})["address"]
    data = link["linkinfo"]["info_data"]
    assert (link["mtu"], data["id"], data["port"], data["local6"]) == (1430, 1, 8472, node.ipv6_address)
    assert f"{base(node)}/128" in node.addresses(DEVICE, 6)
    (route,) = (row for row in node.routes(DEVICE, 6) if row["dst"] == peer.subnet(6))
    assert (route["gateway"], route["flags"], route["metric"]) == (base(peer), ["onlink"], 1024)
    assert node.neighbors(DEVICE, 6) == [{"dst": base(peer), "lladdr": mac, "state": ["PERMANENT"]}]
    assert [(row["mac"], row["dst"]) for row in node.fdb(DEVICE)] == [(mac, peer.ipv6_address)]
    assert (node.link("flannel.1") or {})["mtu"] == 1450


def test_a_lease_is_written_as_later_flannels_do(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, **DUAL_STACK)
    assert lab.etcd.leases() == {
        f"{node.subnet()}&{node.subnet(6)}": {
            "PublicIP": "198.18.0.1",
            "PublicIPv6": "fd00:18::1",
            "BackendType": "vxlan",
            "BackendData": {"VNI": 1, "VtepMAC": (node.link("flannel.1") or {})["address"]},
            "BackendV6Data": {"VNI": 1, "VtepMAC": (node.link(DEVICE) or {})["address"]},
        }
    }


def test_subnet_env_has_both_families(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, **DUAL_STACK)
    assert env(node) == [
        "FLANNEL_NETWORK=10.5.0.0/16",
        f"FLANNEL_SUBNET={node.subnet().removesuffix('0/24')}1/24",
        "FLANNEL_IPV6_NETWORK=fc00:5::/48",
        f"FLANNEL_IPV6_SUBNET={base(node)}1/64",
        "FLANNEL_MTU=1430",
        "FLANNEL_IPMASQ=false",
    ]


def test_without_ipv4_there_is_no_trace_of_it(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"}, **IPV6_ONLY)
    connect(node, peer)
    assert env(node) == [
        "FLANNEL_IPV6_NETWORK=fc00:5::/48",
        f"FLANNEL_IPV6_SUBNET={base(node)}1/64",
        "FLANNEL_MTU=1430",
        "FLANNEL_IPMASQ=false",
    ]
    assert node.link("flannel.1") is None
    assert lab.etcd.leases().keys() == {f"0.0.0.0/0&{each.subnet(6)}" for each in (node, peer)}


def test_a_peer_without_ipv6_is_reached_over_ipv4(lab: Lab) -> None:
    data = {"VtepMAC": "02:00:00:00:00:07"}
    lab.etcd.put_lease("10.5.7.0/24", {"PublicIP": "198.18.0.7", "BackendType": "vxlan", "BackendData": data})
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1, **DUAL_STACK)
    wait_for(lambda: [row["dst"] for row in node.routes("flannel.1")] == ["10.5.7.0/24"], SOON, "the route")
    assert node.fdb(DEVICE) == node.neighbors(DEVICE, 6) == []


# ---- what is kept ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    pairs = Pairs()
    yield pairs
    pairs.close()


@pytest.fixture
def vxlan(pairs: Pairs) -> Pair:
    return pairs.get("vxlan", dual_stack=True)


@pytest.fixture
def pair(pairs: Pairs, backend: dict[str, Any]) -> Pair:
    return pairs.get(backend["Type"], dual_stack=True)


@pytest.mark.parametrize(("command", "healed"), ANY_BACKEND)
def test_the_way_to_a_peer_heals(pair: Pair, command: str, healed: str) -> None:
    pair.check_healing([command], [healed])


@pytest.mark.parametrize(("command", "healed"), VXLAN)
def test_the_tunnel_heals(vxlan: Pair, command: str, healed: str) -> None:
    vxlan.check_healing([command], [healed])


def test_a_restart_changes_nothing(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend, **DUAL_STACK)
    connect(node, peer)
    before = node.kernel_state(*DEVICES)
    with node.changes() as changes:
        node.kill()
        node.start()
        node.wait_ready()
        wait_for(lambda: "In sync with" in node.log(), SOON, "the first snapshot")
        assert changes.during(0.3) == []
    assert node.kernel_state(*DEVICES) == before


def test_a_vanished_peer_leaves_nothing(lab: Lab, backend: dict[str, Any]) -> None:
    node, stays, gone = lab.cluster(backend, nodes=3, **DUAL_STACK)
    connect(node, stays)
    connect(node, gone)
    leases = lab.etcd.leases()
    assert traces(node, gone)
    node.kill()
    gone.stop()
    (lease,) = (key for key in leases if key.startswith(gone.subnet()))
    lab.etcd.delete_lease(lease)
    node.start()
    wait_for(lambda: "In sync with" in node.log(), SOON, "the first snapshot")
    assert traces(node, gone) == []
    connect(node, stays)


def traces(node: Node, peer: Node) -> list[str]:
    """What in a node's kernel leads to a peer in either family."""
    found = str([node.kernel_state(device) for device in DEVICES])
    names = (peer.subnet(4), peer.subnet(6), f"'{base(peer)}'", f"'{peer.address}'", f"'{peer.ipv6_address}'")
    return [name for name in names if name in found]
