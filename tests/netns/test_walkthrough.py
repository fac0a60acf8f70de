"""What a vxlan network looks like in the kernel, object by object, as upstream's guide shows it."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest

from tests.lab import Container, Lab, Namespace, Node, wait_for
from tests.netns.pair import SOON

DEVICE = "flannel.18888"
WALKTHROUGH: dict[str, Any] = {"Network": "1.1.0.0/16", "Backend": {"Type": "vxlan", "VNI": 18888}}


def base(node: Node) -> str:
    return node.subnet().removesuffix("/24")


def walk(lab: Lab, number: int = 3) -> list[Node]:
    nodes = lab.cluster({}, nodes=number, **WALKTHROUGH)
    wait_for(lambda: all(len(node.routes(DEVICE)) == number - 1 for node in nodes), SOON, "the peers")
    return nodes


def info(node: Node, device: str) -> dict[str, Any]:
    found: dict[str, Any] = (node.link(device) or {})["linkinfo"]["info_data"]
    return found


def test_the_device_carries_the_segments_number_and_the_subnets_base_address(lab: Lab) -> None:
    (node,) = lab.cluster({}, nodes=1, **WALKTHROUGH)
    link = node.link(DEVICE) or {}
    assert link["linkinfo"]["info_kind"] == "vxlan"
    assert link["mtu"] == 1450
    assert {"UP", "LOWER_UP"} <= set(link["flags"])
    assert int(link["address"][:2], 16) & 3 == 2  # made up here, for one device
    found = info(node, DEVICE)
    assert (found["id"], found["port"], found["learning"]) == (18888, 8472, False)
    assert (found["link"], found["local"]) == ("eth0", node.address)
    assert "gbp" not in found
    assert node.addresses(DEVICE) == [f"{base(node)}/32"]
    assert base(node).startswith("1.1.")
    assert lab.etcd.leases()[node.subnet()] == {
        "PublicIP": node.address,
        **({"PublicIPv6": None} if lab.etcd.api == "v3" else {}),
        "BackendType": "vxlan",
        "BackendData": {"VNI": 18888, "VtepMAC": link["address"]},
    }


def test_three_objects_lead_to_each_peer(lab: Lab) -> None:
    nodes = walk(lab)
    macs = {node.name: (node.link(DEVICE) or {})["address"] for node in nodes}
    for node in nodes:
        peers = sorted((peer for peer in nodes if peer is not node), key=base)
        assert sorted(node.routes(DEVICE), key=lambda row: row["dst"]) == [
            {"dst": peer.subnet(), "gateway": base(peer), "flags": ["onlink"]} for peer in peers
        ]
        assert sorted(node.neighbors(DEVICE), key=lambda row: row["dst"]) == [
            {"dst": base(peer), "lladdr": macs[peer.name], "state": ["PERMANENT"]} for peer in peers
        ]
        assert sorted(node.fdb(DEVICE), key=lambda row: row["dst"]) == [
            {"mac": macs[peer.name], "dst": peer.address, "flags": ["self"], "state": "permanent"}
            for peer in sorted(peers, key=lambda peer: peer.address)
        ]


def test_subnet_env_tells_the_containers_bridge_what_it_needs(lab: Lab) -> None:
    (node,) = lab.cluster({}, nodes=1, **WALKTHROUGH)
    assert node.subnet_file.read_text() == (
        "FLANNEL_NETWORK=1.1.0.0/16\n"
        f"FLANNEL_SUBNET={base(node).removesuffix('.0')}.1/24\n"
        "FLANNEL_MTU=1450\n"
        "FLANNEL_IPMASQ=false\n"
    )


def caller(source: Namespace, target: Container) -> str:
    """The address that a container sees when someone connects to it."""
    with target.namespace.entered():
        server = socket.create_server((target.address, 8080))
    with server:
        server.settimeout(60)
        with source.entered(), socket.create_connection((target.address, 8080), timeout=60):
            connection, (address, _) = server.accept()
            connection.close()
    return str(address)


def test_a_container_sees_who_calls(lab: Lab) -> None:
    """Other containers by their own address, a host by the base address of its subnet."""
    first, second = walk(lab, 2)
    container, target = first.container(), second.container()
    container.wait_for_reply(target)
    assert caller(container.namespace, target) == container.address
    assert caller(first.namespace, target) == base(first)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param({"Port": 4789}, {"port": 4789}, id="Port"),
        pytest.param({"GBP": True}, {"gbp": True}, id="GBP"),
        pytest.param({"Learning": True}, {"learning": True}, id="Learning"),
        pytest.param({"port": 4790, "vni": 1}, {"port": 4790}, id="in any case"),
    ],
)
def test_an_option_is_seen_on_the_device(lab: Lab, options: dict[str, Any], told: dict[str, Any]) -> None:
    first, second = lab.cluster({"Type": "vxlan", **options})
    assert info(first, "flannel.1").items() >= told.items()
    first.container().wait_for_reply(second.container())


def test_the_mtu_is_that_of_the_uplink_unless_the_config_says_otherwise(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    node.namespace.ip("link set eth0 mtu 1400")
    node.start()
    assert node.wait_ready()["FLANNEL_MTU"] == "1350"
    assert (node.link("flannel.1") or {})["mtu"] == 1350
    node.stop()
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "MTU": 1300}})
    node.start()
    assert node.wait_ready()["FLANNEL_MTU"] == "1250"
    assert (node.link("flannel.1") or {})["mtu"] == 1250


# ---- DirectRouting --------------------------------------------------------------------------------


def ways(node: Node, peer: Node) -> dict[str, Any]:
    """How a node reaches a peer: by which devices and gateways, and with what of the tunnel."""
    return {
        "routes": [(row["dev"], row["gateway"]) for row in node.routes() if row["dst"] == peer.subnet()],
        "neighbors": [row["dst"] for row in node.neighbors("flannel.1") if row["dst"] == base(peer)],
        "fdb": [row["dst"] for row in node.fdb("flannel.1") if row["dst"] == peer.address],
    }


def direct(peer: Node, device: str = "eth0") -> dict[str, Any]:
    return {"routes": [(device, peer.address)], "neighbors": [], "fdb": []}


def tunnel(peer: Node) -> dict[str, Any]:
    return {"routes": [("flannel.1", base(peer))], "neighbors": [base(peer)], "fdb": [peer.address]}


def start_direct(lab: Lab) -> tuple[Node, Node, Node]:
    """Two nodes on one link, and one behind a router."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "DirectRouting": True}})
    nodes = [*lab.add_nodes(2), *lab.add_nodes(1, routed=True)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.wait_ready()
    for one, other in itertools.permutations(nodes, 2):
        one.container().wait_for_reply(other.container())
    return nodes[0], nodes[1], nodes[2]


def test_a_peer_on_our_link_is_reached_directly_one_behind_a_router_through_the_tunnel(lab: Lab) -> None:
    first, second, far = start_direct(lab)
    assert ways(first, second) == direct(second)
    assert ways(second, first) == direct(first)
    for near in (first, second):
        assert ways(near, far) == tunnel(far)
        assert ways(far, near) == tunnel(near)


def test_a_peer_that_moves_to_our_link_and_away_leaves_nothing_behind(lab: Lab) -> None:
    first, second, far = start_direct(lab)
    lease = lab.etcd.leases()[far.subnet()]
    home = far.address
    far.kill()
    far.address = "198.18.0.77"
    lab.etcd.put_lease(far.subnet(), {**lease, "PublicIP": far.address})
    wait_for(lambda: ways(first, far) == direct(far), SOON, "the direct route")
    wait_for(lambda: home not in {row["dst"] for row in first.fdb("flannel.1")}, SOON, "the tunnel to go")
    far.address = home
    lab.etcd.put_lease(far.subnet(), lease)
    wait_for(lambda: ways(first, far) == tunnel(far), SOON, "the tunnel")
    assert ways(first, second) == direct(second)


def test_a_link_that_is_shared_from_now_on_is_used(lab: Lab) -> None:
    first, second, far = start_direct(lab)
    first.namespace.ip(
        f"link add eth1 type veth peer name second netns {lab.switch.name}",
        "address add 198.19.0.100/24 dev eth1",
        "link set eth1 up",
    )
    lab.switch.ip("link set second master br1 up")
    wait_for(lambda: ways(first, far) == direct(far, "eth1"), SOON, "the direct route")
    first.container().wait_for_reply(far.container())
    first.namespace.ip("link del eth1")
    wait_for(lambda: ways(first, far) == tunnel(far), SOON, "the tunnel")
    first.container().wait_for_reply(far.container())
    assert ways(first, second) == direct(second)


def test_direct_routing_turned_off_leaves_no_direct_route(lab: Lab) -> None:
    first, second, _ = start_direct(lab)
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    for node in (first, second):
        node.stop()
        node.start()
        node.wait_ready()
    wait_for(lambda: ways(first, second) == tunnel(second), SOON, "the tunnel")
    assert [row for row in first.routes("eth0") if row["dst"].startswith("10.5.")] == []
    first.container().wait_for_reply(second.container())
