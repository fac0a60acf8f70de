"""A cluster switches from one backend to another, node by node, while its containers talk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.lab import Lab, Node, Ping, wait_for
from tests.lab.lab import NETWORK
from tests.netns.pair import connect
from tests.netns.wire import wire

WIREGUARD = {"Type": "wireguard", "PSK": "ZmxhbmVsZCBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="}
DEVICES = {"vxlan": "flannel.1", "host-gw": "eth0", "wireguard": "flannel-wg"}

Config = Mapping[str, Any]


def start(node: Node) -> None:
    node.start(environment={"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")})
    node.wait_ready(60)
    node.wait_for_log("In sync with", 60)


def restart_each(lab: Lab, nodes: Sequence[Node], pings: Sequence[Ping], **backend: Any) -> None:
    """Give the nodes another config, one after the other."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": backend})
    for node in nodes:
        node.stop()
        start(node)
        for ping in pings:
            ping.wait_for_replies(2, deadline=60)


def ways(node: Node) -> dict[str, str]:
    """Return the device that leads to each subnet of the network."""
    return {
        row["dst"]: row["dev"]
        for row in node.routes()
        if row["dst"].startswith("10.5.") and row.get("dev") not in (None, "cni0")
    }


def wait_for_way(nodes: Sequence[Node], backend: str) -> None:
    def are_used() -> bool:
        return all(
            ways(node) == {peer.subnet(): DEVICES[backend] for peer in nodes if peer is not node}
            for node in nodes
        )

    wait_for(are_used, 60, f"all nodes to use {backend}")


@contextmanager
def pings(nodes: Sequence[Node]) -> Iterator[list[Ping]]:
    """Have each container ping each other one, and see at the end that nothing was lost."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(one.container().ping(other.container(), 0.1))
            for one, other in itertools.permutations(nodes, 2)
        ]
        for ping in running:
            ping.wait_for_replies(2, deadline=60)
        yield running
        assert [ping.lost() for ping in running] == [0] * len(running)


def cluster(lab: Lab, backend: Config) -> list[Node]:
    lab.etcd.put_config({"Network": NETWORK, "Backend": dict(backend)})
    nodes = lab.add_nodes(3)
    for node in nodes:
        start(node)
    for one, other in itertools.permutations(nodes, 2):
        connect(one, other)
    return nodes


def test_host_gw_to_vxlan_and_nothing_is_lost(lab: Lab) -> None:
    nodes = cluster(lab, {"Type": "host-gw"})
    with pings(nodes) as running:
        restart_each(lab, nodes, running, Type="host-gw", Also={"Type": "vxlan"})
        wait_for_way(nodes, "host-gw")
        restart_each(lab, nodes, running, Type="vxlan", Also={"Type": "host-gw"})
        wait_for_way(nodes, "vxlan")
        restart_each(lab, nodes, running, Type="vxlan")
        wait_for_way(nodes, "vxlan")
    assert {lease["BackendType"] for lease in lab.etcd.leases().values()} == {"vxlan"}


@pytest.mark.long
@pytest.mark.needs_kernel("wireguard")
@pytest.mark.parametrize("former", ["vxlan", "host-gw"])
def test_to_wireguard_nothing_is_lost_and_nothing_can_be_read(lab: Lab, former: str) -> None:
    nodes = cluster(lab, {"Type": former})
    with pings(nodes) as running:
        restart_each(lab, nodes, running, Type=former, Also=WIREGUARD)
        wait_for_way(nodes, former)
        with wire(lab, *nodes[:2]) as before:
            restart_each(lab, nodes[:2], running, **WIREGUARD, Also={"Type": former})
        assert before.readable > 0
        # Phase 2 has begun at both ends of this pair.
        with wire(lab, *nodes[:2]) as capture:
            restart_each(lab, nodes[2:], running, **WIREGUARD, Also={"Type": former})
            wait_for_way(nodes, "wireguard")
            restart_each(lab, nodes, running, **WIREGUARD)
            wait_for_way(nodes, "wireguard")
            for ping in running:
                ping.wait_for_replies(2, deadline=60)
        assert capture.seen
        assert capture.readable == 0
    assert not any(node.link("flannel.1") for node in nodes)


@pytest.mark.needs_kernel("wireguard")
def test_an_encrypted_node_reaches_none_in_the_clear_unless_that_is_allowed(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
    node, peer = lab.add_nodes(2)
    for each in (node, peer):
        start(each)
    connect(node, peer)
    with pings([peer]):
        restart_each(lab, [node], [], **WIREGUARD, Also={"Type": "vxlan"})
    assert ways(node) == {}
    assert "would be reached unencrypted" in node.log()
    restart_each(lab, [node], [], **WIREGUARD, Also={"Type": "vxlan", "AllowUnencryptedPeers": True})
    assert ways(node) == {peer.subnet(): "flannel.1"}
    connect(node, peer)
    connect(peer, node)
