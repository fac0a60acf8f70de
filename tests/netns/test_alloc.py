"""The alloc backend: a subnet, subnet.env and masquerading, and no way to any peer."""

from __future__ import annotations

from typing import Any

from tests.lab import Lab, Node, wait_for
from tests.lab.lab import NETWORK
from tests.netns.kube import SOON, notes

ALLOC = {"Type": "alloc"}
VXLAN_LEASE = {
    "PublicIP": "198.18.0.9",
    "BackendType": "vxlan",
    "BackendData": {"VNI": 1, "VtepMAC": "02:00:00:00:00:09"},
}


def overlay(node: Node) -> dict[str, Any]:
    """Return the devices and routes that some backend of flannel made."""
    return {
        "devices": [
            row["ifname"]
            for row in node.namespace.json("ip", "-j", "link")
            if row["ifname"].startswith("flannel")
        ],
        "routes": [row for row in node.routes() if row["dst"].startswith("10.5.") and row["dev"] != "cni0"],
    }


def masquerades(node: Node) -> bool:
    rules = node.run("iptables-save", "-t", "nat").stdout.splitlines()
    return any(f"-s {NETWORK}" in rule and "-j MASQUERADE" in rule for rule in rules)


def test_nodes_get_subnets_and_masquerade_and_know_no_way(lab: Lab) -> None:
    lab.etcd.put_lease("10.5.209.0/24", VXLAN_LEASE)
    nodes = lab.cluster(ALLOC, flags=("--ip-masq",))
    for node in nodes:
        env = node.env()
        assert (env["FLANNEL_NETWORK"], env["FLANNEL_MTU"], env["FLANNEL_IPMASQ"]) == (
            NETWORK,
            "1500",
            "true",
        )
        assert lab.etcd.lease_values()[node.subnet()] == f'{{"PublicIP":"{node.address}"}}'
        assert masquerades(node)
    lab.etcd.put_lease("10.5.210.0/24", VXLAN_LEASE)
    for node in nodes:
        node.wait_for_log("In sync with")
        assert overlay(node) == {"devices": [], "routes": []}
    assert nodes[0].subnet() != nodes[1].subnet()


def test_the_store_is_not_watched_for_peers(lab: Lab) -> None:
    """A peer that would be named in the log with any other backend is not heard of."""
    (node,) = lab.cluster(ALLOC, nodes=1)
    lab.etcd.put_lease("10.5.209.0/24", VXLAN_LEASE)
    lab.etcd.delete_lease(node.subnet())
    wait_for(lambda: not node.running, SOON, "the daemon to end: its own lease was revoked")
    assert "10.5.209.0/24" not in node.log()


def test_a_switch_from_vxlan_removes_device_and_routes(lab: Lab) -> None:
    node, peer = lab.cluster({"Type": "vxlan"})
    wait_for(lambda: overlay(node)["routes"], SOON, "a route to the peer")
    subnet = node.subnet()
    node.stop()
    lab.etcd.put_config({"Network": NETWORK, "Backend": ALLOC})
    node.start()
    node.wait_ready()
    empty: dict[str, Any] = {"devices": [], "routes": []}
    wait_for(lambda: overlay(node) == empty, SOON, "the overlay to be gone")
    assert node.subnet() == subnet
    assert peer.running


def test_with_kubernetes_only_the_own_node_is_watched(lab: Lab) -> None:
    lab.kube.control.put_peer("far", "10.5.99.0/24", "198.18.0.99", "vxlan", VXLAN_LEASE["BackendData"])
    node, _ = lab.kube_cluster(ALLOC)
    asked = [
        request["query"].get("fieldSelector")
        for verb in ("list", "watch")
        for request in lab.kube.control.requests(verb, "nodes")
        if request["user"]
    ]
    assert set(asked) == {"metadata.name=n1", "metadata.name=n2"}
    said = notes(lab, node)
    assert (said["backend-type"], said["backend-data"]) == ("", "null")
    assert overlay(node) == {"devices": [], "routes": []}
    # The watch of the own node works: what somebody else writes there is put right.
    lab.kube.control.annotate("n1", {"flannel.alpha.coreos.com/public-ip": "198.18.0.77"})
    wait_for(lambda: notes(lab, node)["public-ip"] == node.address, SOON, "the public IP to be put right")
    wait_for(lambda: lab.kube.control.condition("n1"), SOON, "the condition NetworkUnavailable")
