"""Milestones are logged in upstream's words: scripts and tests of its users wait for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.lab import Lab, Node, own_command
from tests.netns.kube import start as start_in_kubernetes
from tests.netns.kube import write_net_conf

ROOT = Path(__file__).parents[2]
#: The log of Go's v0.12.0 in the runs below, a part for each, and how it was recorded.
RECORDED = ROOT / "tests" / "unit" / "golden" / "v0.12.0-log.txt"
HOST_GW, VXLAN = {"Type": "host-gw"}, {"Type": "vxlan"}
#: None that the node may take: its own is among the first hundred.
PEER = "10.5.209.0/24"


def live_on_host_gw(lab: Lab, command: Sequence[str]) -> Node:
    """Wait for the config, see a peer come and go, renew the lease, stop, start, and lose the lease."""
    (node,) = lab.add_nodes()
    own = (f"--iface={node.address}", f"--public-ip={node.address}")
    node.start(*own, "--ip-masq", "--healthz-port=8471", command=command)
    node.wait_for_log("Couldn't fetch network config")
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": HOST_GW})
    node.wait_ready()
    lab.etcd.put_lease(PEER, {"PublicIP": "198.18.0.200", "BackendType": "host-gw"})
    node.wait_for_log("Subnet added: ")
    lab.etcd.delete_lease(PEER)
    node.wait_for_log("Subnet removed: ")
    node.wait_for_log("FORWARD chain policy")
    lab.etcd.put_lease(node.subnet(), lab.etcd.leases()[node.subnet()], ttl=600)
    node.wait_for_log("Lease renewed, new expiration: ")
    node.stop()
    node.start(*own, command=command)
    node.wait_for_log("to renew lease")
    lab.etcd.delete_lease(node.subnet())
    node.daemon.wait(20)
    node.start(*own, command=command)
    node.wait_for_log("to renew lease")
    node.stop()
    return node


def live_on_vxlan(lab: Lab, command: Sequence[str]) -> Node:
    """Find the interface by the default route, make the device, and stop."""
    (node,) = lab.cluster(VXLAN, nodes=1, command=command)
    node.wait_for_log("to renew lease")
    node.wait_for_log("FORWARD chain policy")
    node.stop()
    return node


def live_in_kubernetes(lab: Lab, command: Sequence[str]) -> Node:
    """See a peer come and go. Go's daemon does not always end here at SIGTERM."""
    write_net_conf(lab, HOST_GW)
    (node,) = lab.add_nodes()
    lab.kube.add(node)
    start_in_kubernetes(lab, node, command=command)
    node.wait_ready()
    node.wait_for_log("Node controller sync successful")
    lab.kube.control.put_peer("n200", PEER, "198.18.0.200", "host-gw", None)
    node.wait_for_log("Subnet added: ")
    lab.kube.control.delete_node("n200")
    node.wait_for_log("Subnet removed: ")
    node.wait_for_log("FORWARD chain policy")
    node.kill()
    return node


def fail(lab: Lab, command: Sequence[str]) -> Node:
    """Find no interface, then have credentials that are not there, then a config that cannot be."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan", "VNI": "one"}})
    (node,) = lab.add_nodes()
    node.namespace.ip("route del default")
    node.start(command=command)
    node.daemon.wait(20)
    node.start("--iface=eth0", "--etcd-cafile=/nowhere", command=command)
    node.daemon.wait(20)
    node.start("--iface=eth0", command=command)
    node.daemon.wait(20)
    return node


RUNS: dict[str, Callable[[Lab, Sequence[str]], Node]] = {
    "host-gw": live_on_host_gw,
    "vxlan": live_on_vxlan,
    "Kubernetes": live_in_kubernetes,
    "failures": fail,
}


def upstreams_words() -> list[str]:
    """Return the words in the table of docs/running.md."""
    section = (ROOT / "docs" / "running.md").read_text().partition("### Upstream's words\n")[2]
    return re.findall(r"(?:\| |<br>)`([^`]+)`: ", section.partition("\n## ")[0])


def recorded(run: str) -> str:
    return RECORDED.read_text().partition(f"\n## {run}\n")[2].partition("\n## ")[0]


def occur(words: str, log: str) -> bool:
    pattern = re.sub(r"%[svd]", ".+", re.escape(words))
    return re.search(pattern, log) is not None


@pytest.mark.parametrize("run", RUNS)
def test_daemon_logs_a_milestone_in_the_words_of_v0_12_0(lab: Lab, run: str) -> None:
    theirs = [words for words in upstreams_words() if occur(words, recorded(run))]
    ours = RUNS[run](lab, own_command()).logs()
    assert [words for words in theirs if not occur(words, ours)] == []


def test_the_words_in_the_documentation_are_those_of_v0_12_0() -> None:
    log = RECORDED.read_text()
    assert [words for words in upstreams_words() if not occur(words, log)] == []
    assert len(upstreams_words()) == 34
