"""Kubernetes keeps the leases: nodes come, change, go and come again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.credentials import as_pod
from tests.lab.kube import TOKEN
from tests.lab.kube_api.crowd import PREFIX
from tests.netns.go_daemon import write_as_go
from tests.netns.kube import HEALTH_PORT, SOON, notes, overlay_routes, readiness, start, write_net_conf
from tests.netns.pair import DUAL_STACK, connect

VXLAN = {"Type": "vxlan"}


def ring(nodes: list[Node]) -> None:
    """See that each reaches the next one, and the last the first."""
    for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        connect(one, other)


def wait_for_condition(lab: Lab, node: Node) -> None:
    """Wait until the node is marked as connected."""
    found = wait_for(lambda: lab.kube.control.condition(node.name), SOON, f"a condition of {node.name}")
    assert found
    assert (found["status"], found["reason"]) == ("False", "FlannelIsUp")


# ---- a cluster ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["vxlan", "host-gw", "udp", pytest.param("ipip", marks=pytest.mark.needs_kernel("ipip"))]
)
def test_containers_of_all_nodes_reach_each_other(lab: Lab, kind: str) -> None:
    nodes = lab.kube_cluster({"Type": kind}, nodes=3)
    ring(nodes)
    for node in nodes:
        assert node.env()["FLANNEL_SUBNET"] == f"10.5.{node.number}.1/24"
        said = notes(lab, node)
        data = json.loads(said.pop("backend-data"))
        announced = "" if kind == "udp" else kind
        assert said == {
            "kube-subnet-manager": "true", "backend-type": announced, "public-ip": node.address
        }  # fmt: skip
        if kind == "vxlan":
            assert data == {"VNI": 1, "VtepMAC": (node.link("flannel.1") or {})["address"]}
        else:
            assert data is None
        wait_for_condition(lab, node)
    rights = {("list", "nodes"), ("watch", "nodes"), ("patch", "nodes/status")}
    assert {(request["verb"], request["resource"]) for request in lab.kube.control.requests()} == rights


def test_both_families_take_part(lab: Lab, backend: dict[str, Any]) -> None:
    write_net_conf(lab, backend, **DUAL_STACK)
    nodes = lab.add_nodes(2)
    for node in nodes:
        lab.kube.add(node, f"10.5.{node.number}.0/24", f"fc00:5:0:{node.number}::/64")
        start(lab, node)
    for node in nodes:
        node.wait_ready()
        assert notes(lab, node)["public-ipv6"] == node.ipv6_address
    assert list(nodes[0].container().addresses) == [4, 6]
    ring(nodes)


def test_ipv6_alone_takes_no_ipv4_podcidr(lab: Lab) -> None:
    write_net_conf(lab, VXLAN, **DUAL_STACK, EnableIPv4=False)
    nodes = lab.add_nodes(2)
    for node in nodes:
        lab.kube.add(node, f"fc00:5:0:{node.number}::/64")
        start(lab, node)
    for node in nodes:
        node.wait_ready()
        assert sorted(notes(lab, node)) == [
            "backend-type", "backend-v6-data", "kube-subnet-manager", "public-ipv6"
        ]  # fmt: skip
    ring(nodes)


def test_a_change_in_one_family_only_is_followed(lab: Lab) -> None:
    write_net_conf(lab, VXLAN, **DUAL_STACK)
    (node,) = lab.add_nodes()
    lab.kube.add(node, "10.5.1.0/24", "fc00:5:0:1::/64")
    said = {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": '{"VNI":1,"VtepMAC":"02:00:00:00:00:09"}',
        "public-ip": "198.18.0.9",
        "backend-v6-data": '{"VNI":1,"VtepMAC":"02:00:00:00:06:09"}',
        "public-ipv6": "fd00:18::9",
    }
    lab.kube.control.put_node(
        "n9", "10.5.9.0/24", "fc00:5:0:9::/64", annotations={PREFIX + key: text for key, text in said.items()}
    )
    start(lab, node)
    node.wait_ready()
    wait_for(lambda: [entry["dst"] for entry in node.fdb("flannel-v6.1")] == ["fd00:18::9"], SOON)
    node.wait_for_route("10.5.9.0/24", SOON)
    before = node.kernel_state("flannel.1")
    lab.kube.control.annotate("n9", {f"{PREFIX}public-ipv6": "fd00:18::99"})
    wait_for(lambda: [entry["dst"] for entry in node.fdb("flannel-v6.1")] == ["fd00:18::99"], SOON)
    assert node.kernel_state("flannel.1") == before


def test_a_daemon_that_stops_takes_no_peer_along_and_comes_back_unnoticed(lab: Lab) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    before, patches = first.kernel_state("flannel.1"), len(lab.kube.control.patches(first.name))
    with second.container().ping(first.container()) as ping:
        assert first.stop().status == 0
        assert first.kernel_state("flannel.1") == before
        start(lab, first)
        first.wait_for_log("In sync with 1 peer", SOON)
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert first.kernel_state("flannel.1") == before
    # Nothing had changed, so only the condition is written again.
    wait_for(lambda: len(lab.kube.control.patches(first.name)) > patches, SOON)
    assert [*lab.kube.control.patches(first.name)[patches]] == ["status"]


# ---- nodes change ---------------------------------------------------------------------------------


def test_a_node_that_is_deleted_is_led_to_no_more_and_comes_back_by_itself(lab: Lab) -> None:
    first, second, third = lab.kube_cluster(VXLAN, nodes=3)
    ring([first, second, third])
    old = notes(lab, third)
    with first.container().ping(second.container()) as ping:
        lab.kube.control.delete_node(third.name)
        for node in (first, second):
            node.wait_for_no_route(third.subnet(), SOON)
        third.wait_for_log("was deleted", SOON)
        assert overlay_routes(third) == {first.subnet(), second.subnet()}
        lab.kube.add(third)
        wait_for(lambda: notes(lab, third) == old, SOON, "the annotations to be written again")
        wait_for_condition(lab, third)
        ring([first, second, third])
        assert ping.lost() == 0


@pytest.mark.parametrize("gone", ["public-ip", "kube-subnet-manager"])
def test_our_annotations_are_put_right(lab: Lab, gone: str) -> None:
    first, second = lab.kube_cluster(VXLAN)
    connect(first, second)
    old = notes(lab, second)
    lab.kube.control.annotate(second.name, {PREFIX + gone: None})
    wait_for(lambda: notes(lab, second) == old, SOON, "the annotation to be written again")
    connect(first, second)
    assert len(second.wait_for_log("rewriting them")) == 1


def test_an_overwritten_public_ip_is_taken_up_at_once(lab: Lab) -> None:
    first, second = lab.kube_cluster({"Type": "vxlan"})
    connect(first, second)
    second.run("ip", "address", "add", "198.18.0.77/24", "dev", "eth0")
    lab.kube.control.annotate(second.name, {f"{PREFIX}public-ip-overwrite": "198.18.0.77"})
    wait_for(lambda: [entry["dst"] for entry in first.fdb("flannel.1")] == ["198.18.0.77"], SOON)
    assert second.running
    lab.kube.control.annotate(second.name, {f"{PREFIX}public-ip-overwrite": None})
    wait_for(lambda: [entry["dst"] for entry in first.fdb("flannel.1")] == [second.address], SOON)
    connect(first, second)


def test_an_operator_says_where_a_node_is(lab: Lab) -> None:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    node.namespace.ip("link add eth7 type bridge", "address add 192.0.2.7/24 dev eth7", "link set eth7 up")
    lab.kube.add(node, annotations={f"{PREFIX}node-public-ip": "192.0.2.7"})
    start(lab, node)
    node.wait_ready()
    assert "Using interface with name eth7" in node.log()
    assert notes(lab, node)["public-ip"] == "192.0.2.7"


def test_another_pod_cidr_makes_another_node_of_it(lab: Lab) -> None:
    first, second = lab.kube_cluster({"Type": "host-gw"})
    first.wait_for_route("10.5.2.0/24", SOON)
    lab.kube.control.delete_node(second.name)
    lab.kube.add(second, "10.5.7.0/24")
    assert second.daemon.wait(SOON).status == 0
    assert "10.5.7.0/24" in second.wait_for_log("The podCIDR of our node")[0]
    start(lab, second)
    assert second.wait_ready()["FLANNEL_SUBNET"] == "10.5.7.1/24"
    first.wait_for_route("10.5.7.0/24", SOON)
    first.wait_for_no_route("10.5.2.0/24", SOON)


def test_stale_go_routes_are_removed_for_any_subnet_size(lab: Lab) -> None:
    write_net_conf(lab, {"Type": "host-gw"})
    (node,) = lab.add_nodes()
    lab.kube.add(node, "10.5.1.64/26")
    node.namespace.ip("route add 10.5.9.128/26 via 198.18.0.99", "route add 10.5.8.0/24 via 198.18.0.98")
    write_as_go(node)
    start(lab, node)
    assert node.wait_ready()["FLANNEL_SUBNET"] == "10.5.1.65/26"
    node.wait_for_no_route("10.5.9.128/26", SOON)
    assert overlay_routes(node) == {"10.5.8.0/24"}


# ---- how it starts --------------------------------------------------------------------------------


def test_a_pod_cidr_that_comes_late_is_waited_for_with_a_clear_reason(lab: Lab) -> None:
    write_net_conf(lab, VXLAN)
    (node,) = lab.add_nodes()
    lab.kube.control.put_token("teller", extra=[("create", "events")])
    lab.kube.control.put_node(node.name, address=node.address)
    kubeconfig = lab.kube.kubeconfig(lab.directory / "kubeconfig", "teller")
    start(
        lab, node, f"--kubeconfig-file={kubeconfig}", f"-healthz-port={HEALTH_PORT}", "-healthz-ip=127.0.0.1"
    )
    reason = f"waiting for a lease: node {node.name} has no podCIDR yet"
    wait_for(lambda: reason in readiness(node)[1], SOON)
    status, body = readiness(node)
    assert (status, body.splitlines()[0]) == (503, "flanneld is not ready yet")
    wait_for(lambda: any(reason in line for line in node.service_manager.heard()), SOON)
    (event,) = wait_for(lab.kube.control.events, SOON)
    assert reason in event["message"]
    lab.kube.control.set_pod_cidrs(node.name, "10.5.1.0/24")
    assert node.wait_ready()["FLANNEL_SUBNET"] == "10.5.1.1/24"
    wait_for(lambda: readiness(node) == (200, "flanneld is ready"), SOON)
    assert len(node.wait_for_log("no podCIDR yet")) == 1


def test_a_pod_finds_its_node_and_the_api_server_by_itself(lab: Lab) -> None:
    write_net_conf(lab, VXLAN)
    lab.kube.stop()
    lab.kube.start(tls=True)
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    lab.kube.control.put_pod("kube-flannel", "flannel-x", node.name)
    account = lab.kube.service_account(lab.directory / "account")
    node.start(
        "--kube-subnet-mgr",
        f"--net-config-path={lab.directory / 'net-conf.json'}",
        command=as_pod(account, own_command()),
        environment={"POD_NAME": "flannel-x", "POD_NAMESPACE": "kube-flannel", **lab.kube.in_cluster()},
    )
    node.wait_ready()
    node.wait_for_log("In sync with", SOON)
    lab.kube.control.put_token("rotated")
    lab.kube.service_account(lab.directory / "account", "rotated")
    lab.kube.control.revoke_token(TOKEN)
    lab.kube.control.close_connections()
    lab.kube.control.put_peer("n9", "10.5.9.0/24", "198.18.0.9", "vxlan", {"VtepMAC": "02:00:00:00:00:09"})
    node.wait_for_route("10.5.9.0/24", 30)


def test_the_condition_stays_as_it_is_if_that_is_wanted(lab: Lab) -> None:
    (node,) = lab.kube_cluster(VXLAN, nodes=1, flags=["--set-node-network-unavailable=false"])
    lab.kube.control.annotate(node.name, {f"{PREFIX}public-ip": None})
    wait_for(lambda: notes(lab, node).get("public-ip"), SOON)
    assert lab.kube.control.condition(node.name) is None
