"""What an earlier run left: kept while it may be needed, gone once the leases say that it is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.apis import both_apis
from tests.netns.pair import SOON, connect

#: As a Go flanneld leaves its routes; 10.5.0.0/24 is a subnet that no node can have.
LEFT_BY_GO = "route add 10.5.0.0/24 via 198.18.0.99 dev eth0"

#: What flannel never makes. The subnets are below the lowest that a node may have in this test.
FOREIGN = [
    "route add 192.0.2.0/24 via 198.18.0.99",
    "route add 10.5.0.0/25 via 198.18.0.99",
    "route add 10.5.2.0/23 via 198.18.0.99",
    "route add 10.5.4.0/24 dev eth0",
    "route add 10.5.5.0/24 via 198.18.0.99 proto static",
    "route add 10.5.6.0/24 via 198.18.0.99 metric 50",
    "route add blackhole 10.5.7.0/24",
]


def traces(node: Node, peer: Node) -> list[dict[str, Any]]:
    """What in a node's kernel leads to a peer's subnet or to its VTEP."""
    inside = peer.subnet().removesuffix("0/24")
    return [
        *(route for route in node.routes() if route["dst"].startswith(inside)),
        *(entry for entry in node.neighbors("flannel.1") if entry["dst"].startswith(inside)),
        *(entry for entry in node.fdb("flannel.1") if entry["dst"] == peer.address),
    ]


def in_sync(node: Node) -> bool:
    return "In sync with" in node.log()


def start(node: Node) -> None:
    node.start()
    node.wait_ready()
    wait_for(lambda: in_sync(node), SOON, "the first snapshot")


def destinations(node: Node, device: str = "") -> set[str]:
    return {route["dst"] for route in node.routes(device)}


# ---- peers that went while nobody looked ----------------------------------------------------------


@both_apis
def test_what_led_to_a_vanished_peer_is_removed_at_the_next_start(lab: Lab, backend: dict[str, Any]) -> None:
    node, stays, gone = lab.cluster(backend, nodes=3)
    connect(node, stays)
    connect(node, gone)
    node.kill()
    gone.stop()
    lab.etcd.delete_lease(gone.subnet())
    assert len(traces(node, gone)) == (3 if backend["Type"] == "vxlan" else 1)
    with node.container().ping(stays.container()) as ping:
        start(node)
        assert traces(node, gone) == []
        assert ping.lost() == 0


def test_nothing_is_removed_while_the_store_does_not_answer(lab: Lab, backend: dict[str, Any]) -> None:
    node, stays, gone = lab.cluster(backend, nodes=3)
    connect(node, stays)
    connect(node, gone)
    node.kill()
    gone.stop()
    lab.etcd.delete_lease(gone.subnet())
    wait_for(lambda: not traces(stays, gone), what="the news to arrive")
    before = node.kernel_state("flannel.1", "eth0")
    lab.etcd.stop()
    with node.container().ping(stays.container()) as ping, node.changes() as changes:
        node.start()
        wait_for(lambda: "Waiting for" in node.log(), what="the daemon to find that etcd is away")
        assert changes.during(1) == []
        assert node.kernel_state("flannel.1", "eth0") == before
        lab.etcd.start()
        node.wait_ready()
        wait_for(lambda: not traces(node, gone), what="the first snapshot")
        assert ping.lost() == 0


def test_a_restart_changes_nothing(lab: Lab, backend: dict[str, Any]) -> None:
    node, peer = lab.cluster(backend)
    connect(node, peer)
    before = node.kernel_state("flannel.1", "eth0")
    with node.changes() as changes:
        node.stop()
        start(node)
        assert changes.during(0.3) == []
    assert node.kernel_state("flannel.1", "eth0") == before


# ---- routes without our mark ----------------------------------------------------------------------


def test_an_unmarked_route_to_a_vanished_peer_is_removed_once(lab: Lab) -> None:
    """Only at the start: what comes later was put there by an operator."""
    node, peer = lab.cluster({"Type": "host-gw"})
    connect(node, peer)
    node.stop()
    node.namespace.ip(LEFT_BY_GO)
    start(node)
    assert "10.5.0.0/24" not in destinations(node)
    with node.paused():
        node.namespace.ip(LEFT_BY_GO, f"route del {peer.subnet()}")
    wait_for(lambda: peer.subnet() in destinations(node), SOON, "another look at all routes")
    assert "10.5.0.0/24" in destinations(node)


def test_an_unmarked_route_to_a_peer_is_adopted(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "host-gw"})
    node.stop()
    node.namespace.ip(f"route replace {peer.subnet()} via {peer.address} dev eth0 proto boot")
    with node.changes() as changes:
        start(node)
        assert changes.during(0.3) == []
    lab.etcd.delete_lease(peer.subnet())
    wait_for(lambda: not traces(node, peer), SOON, "the route to go with the lease")


def test_routes_that_flannel_never_makes_stay(lab: Lab) -> None:
    (node,) = lab.add_nodes(1)
    network = {"Network": "10.5.0.0/16", "SubnetMin": "10.5.128.0", "Backend": {"Type": "host-gw"}}
    lab.etcd.put_config(network)
    node.namespace.ip(*FOREIGN)
    before = node.routes()
    node.namespace.ip(LEFT_BY_GO)
    start(node)
    assert node.routes() == before


# ---- peers that moved -----------------------------------------------------------------------------


def leading_to(node: Node, subnet: str) -> dict[str, Any]:
    """All that a node's kernel has about one peer, the only one."""
    return {
        "routes": [row.get("gateway") for row in node.routes() if row["dst"] == subnet],
        "neighbors": {row["dst"]: row["lladdr"] for row in node.neighbors("flannel.1")},
        "fdb": {row["mac"]: row["dst"] for row in node.fdb("flannel.1")},
    }


@pytest.mark.parametrize("restart", [False, True], ids=["while we run", "while we are away"])
@pytest.mark.parametrize(
    ("public_ip", "mac"),
    [
        pytest.param("198.18.0.7", "02:00:00:00:00:09", id="another MAC"),
        pytest.param("198.18.0.9", "02:00:00:00:00:07", id="another address"),
        pytest.param("198.18.0.9", "02:00:00:00:00:09", id="another machine"),
    ],
)
def test_a_peer_that_moved_leaves_nothing_behind(lab: Lab, restart: bool, public_ip: str, mac: str) -> None:
    def attributes(public_ip: str, mac: str) -> dict[str, Any]:
        return {"PublicIP": public_ip, "BackendType": "vxlan", "BackendData": {"VtepMAC": mac}}

    def led_to(public_ip: str, mac: str) -> bool:
        neighbors = {"10.5.7.0": mac}
        wanted = {"routes": ["10.5.7.0"], "neighbors": neighbors, "fdb": {mac: public_ip}}
        return leading_to(node, "10.5.7.0/24") == wanted

    lab.etcd.put_lease("10.5.7.0/24", attributes("198.18.0.7", "02:00:00:00:00:07"))
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    wait_for(lambda: led_to("198.18.0.7", "02:00:00:00:00:07"), SOON, "the peer")
    if restart:
        node.kill()
    lab.etcd.put_lease("10.5.7.0/24", attributes(public_ip, mac))
    if restart:
        start(node)
    wait_for(lambda: led_to(public_ip, mac), SOON, "the peer at its new place")


def test_a_peer_gateway_that_moved_is_followed(lab: Lab) -> None:
    lab.etcd.put_lease("10.5.7.0/24", {"PublicIP": "198.18.0.7", "BackendType": "host-gw"})
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1)
    wait_for(lambda: leading_to(node, "10.5.7.0/24")["routes"] == ["198.18.0.7"], SOON, "the peer")
    lab.etcd.put_lease("10.5.7.0/24", {"PublicIP": "198.18.0.9", "BackendType": "host-gw"})
    wait_for(lambda: leading_to(node, "10.5.7.0/24")["routes"] == ["198.18.0.9"], SOON, "the new gateway")


# ---- another backend, another segment -------------------------------------------------------------


def switch(lab: Lab, nodes: list[Node], backend: dict[str, Any]) -> None:
    """Restart all nodes with another backend; the last node never comes back."""
    *staying, gone = nodes
    for node in nodes:
        node.stop()
    lab.etcd.delete_lease(gone.subnet())
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": backend})
    for node in staying:
        node.start()
    wait_for(lambda: all(map(in_sync, staying)), SOON, "the first snapshots")


def test_host_gw_leaves_no_route_of_vxlan(lab: Lab) -> None:
    """The device stays, as with Go flannel, and leads nowhere."""
    nodes = lab.cluster({"Type": "vxlan"}, nodes=3)
    connect(nodes[0], nodes[1])
    connect(nodes[0], nodes[2])
    switch(lab, nodes, {"Type": "host-gw"})
    node, peer, gone = nodes
    wait_for(lambda: peer.subnet() in destinations(node, "eth0"), SOON, "the direct route")
    assert gone.subnet() not in destinations(node)
    assert node.routes("flannel.1") == []
    connect(node, peer)


def test_vxlan_leaves_no_route_of_host_gw(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "host-gw"}, nodes=3)
    connect(nodes[0], nodes[1])
    connect(nodes[0], nodes[2])
    switch(lab, nodes, {"Type": "vxlan"})
    node, peer, gone = nodes
    wait_for(lambda: peer.subnet() in destinations(node, "flannel.1"), SOON, "the tunnel to the peer")
    assert gone.subnet() not in destinations(node)
    assert peer.subnet() not in destinations(node, "eth0")
    connect(node, peer)


def test_another_segment_leaves_no_route_of_the_old_one(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "vxlan"}, nodes=3)
    connect(nodes[0], nodes[1])
    connect(nodes[0], nodes[2])
    switch(lab, nodes, {"Type": "vxlan", "VNI": 2})
    node, peer, gone = nodes
    wait_for(lambda: peer.subnet() in destinations(node, "flannel.2"), SOON, "the tunnel to the peer")
    assert gone.subnet() not in destinations(node)
    assert node.routes("flannel.1") == []
    connect(node, peer)
