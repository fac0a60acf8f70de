"""Together with another daemon, named by ``FLANNELD_PEER``: in one network, and by turns on one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.lab import Lab, Node, own_command, peer_command, wait_for
from tests.netns.test_etcd_move import migrate, nothing_lost, restart, subnets_in
from tests.netns.test_probes import probe

DEVICES = ("flannel.1", "flannel.ipip", "eth0")
OURS, THEIRS = own_command(), peer_command()


def mixed(lab: Lab, backend: dict[str, Any], *commands: Sequence[str]) -> list[Node]:
    """A node for each command, all of them connected."""
    nodes = [lab.cluster(backend, nodes=1, command=command)[0] for command in commands]
    for node in nodes:
        for other in nodes:
            node.container().wait_for_reply(other.container())
    return nodes


def own_part(node: Node) -> dict[str, Any]:
    """What a node must not lose when its daemon changes; route protocol numbers are each daemon's own."""
    state = node.kernel_state(*DEVICES)
    for device in state.values():
        for route in [*device["routes-4"], *device["routes-6"]]:
            route.pop("protocol", None)
    return {"subnet": node.subnet(), "kernel": state}


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours-first", "theirs-first"])
def test_nodes_of_both_reach_each_other(
    lab: Lab, backend: dict[str, Any], order: tuple[list[str], list[str]]
) -> None:
    first, second = mixed(lab, backend, *order)
    assert set(lab.etcd.leases()) == {first.subnet(), second.subnet()}


@pytest.mark.parametrize("kind", ["vxlan", "udp"])
def test_a_node_of_the_other_answers_probes_at_its_end_of_the_tunnel(lab: Lab, kind: str) -> None:
    (theirs,) = lab.cluster({"Type": kind}, nodes=1, command=THEIRS)
    (ours,) = lab.cluster({"Type": kind}, nodes=1, flags=("--peer-probes=600",))
    theirs.container()
    wait_for(lambda: probe(ours).get("rtt"), 60, "an answer")
    assert probe(ours)["target"] == theirs.subnet().removesuffix("/24")


def test_a_node_that_leaves_is_led_to_by_neither(lab: Lab, backend: dict[str, Any]) -> None:
    ours, theirs, gone = mixed(lab, backend, OURS, THEIRS, OURS)
    gone.stop()
    lab.etcd.delete_lease(gone.subnet())
    for node in (ours, theirs):
        node.wait_for_no_route(gone.subnet())
    assert ours.container().reaches(theirs.container())


@pytest.mark.parametrize(
    "turns", [(OURS, THEIRS, OURS), (THEIRS, OURS, THEIRS)], ids=["from-ours", "from-theirs"]
)
def test_changing_the_daemon_on_a_live_node_loses_nothing(
    lab: Lab, backend: dict[str, Any], turns: tuple[list[str], ...]
) -> None:
    node, peer = mixed(lab, backend, turns[0], turns[1])
    before = own_part(node)
    with (
        node.container().ping(peer.container()) as there,
        peer.container().ping(node.container()) as back,
    ):
        for command in turns[1:]:
            node.kill()
            there.wait_for_replies()
            node.start(command=command)
            node.wait_ready()
            # A lease that comes and goes shows that the new daemon has read all others.
            lab.etcd.put_lease("10.5.0.0/24", lab.etcd.leases()[peer.subnet()] | newcomer(backend))
            node.wait_for_route("10.5.0.0/24")
            lab.etcd.delete_lease("10.5.0.0/24")
            node.wait_for_no_route("10.5.0.0/24")
            wait_for(lambda: own_part(node) == before, what="the node to be as it was")
            there.wait_for_replies()
            back.wait_for_replies()
        assert (there.lost(), back.lost()) == (0, 0)


def newcomer(backend: dict[str, Any]) -> dict[str, Any]:
    data = {"BackendData": {"VtepMAC": "02:00:00:00:00:c8"}} if backend["Type"] == "vxlan" else {}
    return {"PublicIP": "198.18.0.200", **data}


def test_a_cluster_of_the_other_daemon_moves_to_v3_of_etcd(lab: Lab) -> None:
    nodes = lab.cluster({"Type": "vxlan"}, nodes=2, command=THEIRS)
    subnets = [node.subnet() for node in nodes]
    with nothing_lost(nodes):
        for node in nodes:
            node.kill()
            node.start("-etcd-api=both")
            node.wait_ready(20)
        migrate(lab, nodes[0])
        for node in nodes:
            restart(node, "v3")
    assert [node.subnet() for node in nodes] == subnets
    assert subnets_in(lab, "v3") == set(subnets)
