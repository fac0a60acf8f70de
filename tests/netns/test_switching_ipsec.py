"""A cluster switches to ipsec or away from it, node by node, while its containers talk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from tests.lab import Lab, Node, Ping, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, associations, charon_of, with_own_run
from tests.netns.pair import connect
from tests.netns.test_switching import WIREGUARD, pings, ways
from tests.netns.wire import Wire, wire

pytestmark = [pytest.mark.needs_kernel("esp"), pytest.mark.needs_kernel("wireguard")]

DEVICES = {"vxlan": "flannel.1", "host-gw": "eth0", "wireguard": "flannel-wg", "ipsec": "flannel-ipsec"}
CONFIGS: dict[str, Mapping[str, Any]] = {
    "vxlan": {"Type": "vxlan"},
    "host-gw": {"Type": "host-gw"},
    "wireguard": WIREGUARD,
    "ipsec": IPSEC,
}


def start(node: Node) -> None:
    node.start(
        command=with_own_run(node, *own_command()),
        environment={"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")},
    )
    node.wait_ready(60)
    node.wait_for_log("In sync with", 60)


def give(lab: Lab, first: str, second: str = "", **options: Any) -> None:
    also = {"Also": {**CONFIGS[second], **options}} if second else {}
    lab.etcd.put_config({"Network": NETWORK, "Backend": {**CONFIGS[first], **also}})


def restart_each(nodes: Sequence[Node], running: Sequence[Ping] = ()) -> None:
    for node in nodes:
        node.stop()
        start(node)
        for ping in running:
            ping.wait_for_replies(2, deadline=60)


def wait_for_way(nodes: Sequence[Node], backend: str) -> None:
    def are_used() -> bool:
        return all(
            ways(node) == {peer.subnet(): DEVICES[backend] for peer in nodes if peer is not node}
            for node in nodes
        )

    wait_for(are_used, 60, f"all nodes to use {backend}")


def wait_for_associations(nodes: Sequence[Node]) -> None:
    """Wait until each node has SAs with each other one, as ``flannelctl peers`` shows."""

    def is_complete() -> bool:
        return all(
            sum(bool(each.children) for each in associations(node).values()) == len(nodes) - 1
            for node in nodes
        )

    wait_for(is_complete, 60, "SAs between all nodes")


def cluster(lab: Lab, backend: str, number: int = 3) -> list[Node]:
    give(lab, backend)
    nodes = lab.add_nodes(number)
    for node in nodes:
        start(node)
    for one, other in itertools.permutations(nodes, 2):
        connect(one, other)
    return nodes


@pytest.mark.long
@pytest.mark.parametrize("former", ["wireguard", "vxlan", "host-gw"])
def test_to_ipsec_nothing_is_lost_and_nothing_can_be_read(lab: Lab, former: str) -> None:
    nodes = cluster(lab, former)
    one, other, last = nodes
    is_clear = former != "wireguard"
    with pings(nodes) as running:
        whole: AbstractContextManager[Wire | None] = nullcontext() if is_clear else wire(lab, one, other)
        with whole as throughout:
            give(lab, former, "ipsec")
            restart_each(nodes, running)
            wait_for_way(nodes, former)
            wait_for_associations(nodes)
            if is_clear:
                with wire(lab, one, other) as before:
                    before.wait_for_readable()
            give(lab, "ipsec", former)
            restart_each([one, other], running)
            # Phase 2 has begun at both ends of this pair.
            with wire(lab, one, other) as since:
                restart_each([last], running)
                wait_for_way(nodes, "ipsec")
                give(lab, "ipsec")
                restart_each(nodes, running)
                wait_for_way(nodes, "ipsec")
                since.wait_for_packets()
            assert since.readable == 0
        assert throughout is None or throughout.readable == 0
    assert not any(node.link(DEVICES[former]) for node in nodes if former != "host-gw")


@pytest.mark.long
def test_from_ipsec_to_wireguard_nothing_is_lost_and_nothing_can_be_read(lab: Lab) -> None:
    nodes = cluster(lab, "ipsec")
    with pings(nodes) as running, wire(lab, *nodes[:2]) as throughout:
        give(lab, "ipsec", "wireguard")
        restart_each(nodes, running)
        give(lab, "wireguard", "ipsec")
        restart_each(nodes, running)
        wait_for_way(nodes, "wireguard")
        give(lab, "wireguard")
        restart_each(nodes, running)
        throughout.wait_for_packets()
    assert throughout.readable == 0
    check_no_ipsec(nodes)


def check_no_ipsec(nodes: Sequence[Node]) -> None:
    wait_for(lambda: not any(charon_of(node) for node in nodes), what="charon to end")
    for node in nodes:
        assert node.run("ip", "xfrm", "policy").stdout == ""
        assert node.link(DEVICES["ipsec"]) is None


def test_from_ipsec_to_wireguard_at_one_blow_nothing_can_be_read_and_all_meet_again(lab: Lab) -> None:
    """Without ``Also`` nodes of both backends do not reach each other, and send nothing in the clear."""
    nodes = cluster(lab, "ipsec", 2)
    one, other = nodes
    give(lab, "wireguard")
    with wire(lab, *nodes) as throughout, one.container().ping(other.container()) as ping:
        throughout.wait_for_packets()
        restart_each([one])
        assert not [way for node in nodes for way in ways(node).values() if way != DEVICES["ipsec"]]
        restart_each([other])
        wait_for_way(nodes, "wireguard")
        ping.wait_for_replies(2, deadline=60)
    assert throughout.readable == 0
    check_no_ipsec(nodes)


def test_a_node_with_ipsec_reaches_none_in_the_clear_unless_that_is_allowed(lab: Lab) -> None:
    node, peer = cluster(lab, "vxlan", 2)
    give(lab, "ipsec", "vxlan")
    restart_each([node])
    assert ways(node) == {}
    assert "would be reached unencrypted" in node.log()
    give(lab, "ipsec", "vxlan", AllowUnencryptedPeers=True)
    restart_each([node])
    assert ways(node) == {peer.subnet(): DEVICES["vxlan"]}
    connect(node, peer)
    connect(peer, node)
