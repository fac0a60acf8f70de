"""dist/cni/flannel with Debian's bridge, host-local and portmap, under real daemons."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.lab import CommandError, Container, Lab, Node, wait_for
from tests.lab.namespace import batch
from tests.netns.cni_runtime import Runtime
from tests.netns.pair import DUAL_STACK

AT_ONCE = 4
PATIENCE = 30  # seconds


def ports(node: Node) -> list[str]:
    """The devices in the bridge."""
    rows = node.namespace.json("ip", "-j", "link", "show", "master", "cni0")
    return [row["ifname"] for row in rows]


def everywhere(work: Iterable[Any]) -> None:
    """Raise the first error of what was started."""
    for _ in work:
        pass


@pytest.mark.parametrize("count", [12, pytest.param(25, marks=pytest.mark.long)])
def test_many_pods_on_two_nodes_come_and_go_and_leave_nothing(lab: Lab, count: int) -> None:
    numbers = range(1, count + 1)
    one, other = (Runtime(node, cniVersion="0.4.0") for node in lab.cluster({"Type": "vxlan"}))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pods, peers = ([*pool.map(runtime.add, numbers)] for runtime in (one, other))
        everywhere(
            pool.map(lambda pair: pair[0].wait_for_reply(pair[1], PATIENCE), zip(pods, peers, strict=True))
        )
        for runtime in (one, other):
            everywhere(pool.map(runtime.check, numbers))
            assert len(ports(runtime.node)) == len(runtime.records()) == len(runtime.reserved()) == count
            everywhere(pool.map(runtime.delete, numbers))
    for runtime in (one, other):
        assert (ports(runtime.node), runtime.records(), runtime.reserved()) == ([], [], [])
    assert len({pod.address for pod in pods + peers}) == 2 * count


def test_a_pod_is_made_as_subnet_env_and_the_configuration_say(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    pod = Runtime(node).add(1)
    gateway = node.env()["FLANNEL_SUBNET"].partition("/")[0]
    (link,) = pod.namespace.json("ip", "-j", "link", "show", "eth0")
    routes = pod.namespace.json("ip", "-j", "route")
    assert link["mtu"] == int(node.env()["FLANNEL_MTU"])
    assert {(route["dst"], route.get("gateway")) for route in routes} == {
        ("default", gateway),
        (node.env()["FLANNEL_NETWORK"], gateway),
        (node.subnet(), None),
    }
    assert node.addresses("cni0") == [node.env()["FLANNEL_SUBNET"]]


def test_hairpin_mode_lets_a_pod_reach_itself_through_the_port_of_its_node(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    mapping = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
    pod = Runtime(node).add(1, portMappings=[mapping])
    (port,) = node.namespace.json("ip", "-j", "-d", "link", "show", "master", "cni0")
    assert port["linkinfo"]["info_slave_data"]["hairpin"] is True
    assert accepts(pod, 80, client=pod, address=(node.address, 8080))


def accepts(server: Container, port: int, client: Container, address: tuple[str, int]) -> bool:
    """Does a connection from ``client`` to ``address`` come out at this port of ``server``?"""
    with server.namespace.entered():
        listener = socket.create_server(("", port))
    with listener, client.namespace.entered(), suppress(OSError):
        socket.create_connection(address, timeout=PATIENCE).close()
        listener.settimeout(PATIENCE)
        listener.accept()[0].close()
        return True
    return False


@pytest.mark.parametrize("kind", ["vxlan", "host-gw"])
def test_pods_have_both_families(lab: Lab, kind: str) -> None:
    runtimes = [Runtime(node, cniVersion="1.0.0") for node in lab.cluster({"Type": kind}, **DUAL_STACK)]
    one, other = (runtime.add(1) for runtime in runtimes)
    for family in (4, 6):
        one.wait_for_reply(other.addresses[family], PATIENCE)
    for runtime in runtimes:
        runtime.check(1)
        runtime.delete(1)
        assert (ports(runtime.node), runtime.records(), runtime.reserved()) == ([], [], [])


def test_check_notices_what_a_pod_has_lost(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    runtime = Runtime(node, cniVersion="1.0.0")
    pod = runtime.add(1)
    pod.namespace.ip("address flush dev eth0")
    with pytest.raises(CommandError, match=pod.address):
        runtime.check(1)


def test_a_pod_can_be_deleted_twice_when_its_namespace_and_flanneld_are_gone(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, nodes=1)
    runtime = Runtime(node)
    pod = runtime.add(1)
    node.stop()
    node.subnet_file.unlink()
    batch(f"netns del {pod.namespace.name}")
    for _ in range(2):
        runtime.delete(1)
    assert (runtime.records(), runtime.reserved()) == ([], [])
    wait_for(lambda: not ports(node), PATIENCE, "the kernel to remove the interface")


def test_a_pod_that_comes_before_flanneld_is_told_to_wait(lab: Lab) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    (node,) = lab.add_nodes()
    runtime = Runtime(node)
    with pytest.raises(CommandError, match='"code": 11') as refusal:
        runtime.add(1)
    assert "flanneld" in str(refusal.value)
    node.start()
    node.wait_ready(PATIENCE)
    assert runtime.add(2).reaches(node.address, PATIENCE)
