"""Together with another daemon in one Kubernetes cluster, and by turns on one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.interop.mixed import own_part
from tests.lab import Lab, Node, own_command, peer_command, wait_for
from tests.netns.kube import SOON, notes, start, write_net_conf
from tests.netns.pair import connect

OURS = own_command()
THEIRS = peer_command() or peer_command("v3")


def mixed(lab: Lab, backend: dict[str, Any], *commands: Sequence[str]) -> list[Node]:
    """A node for each command, all of them connected."""
    write_net_conf(lab, backend)
    nodes = lab.add_nodes(len(commands))
    for node, command in zip(nodes, commands, strict=True):
        lab.kube.add(node)
        start(lab, node, command=command)
    for node in nodes:
        node.wait_ready(20)
    for node in nodes:
        for other in nodes:
            connect(node, other)
    return nodes


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours-first", "theirs-first"])
def test_nodes_of_both_reach_each_other_and_see_each_other_leave(
    lab: Lab, backend: dict[str, Any], order: tuple[list[str], list[str]]
) -> None:
    first, second = mixed(lab, backend, *order)
    said = [notes(lab, node) for node in (first, second)]
    assert [each["public-ip"] for each in said] == [first.address, second.address]
    assert said[0].keys() == said[1].keys()
    lab.kube.control.delete_node(second.name)
    first.wait_for_no_route(second.subnet(), SOON)


@pytest.mark.parametrize(
    "turns", [(OURS, THEIRS, OURS), (THEIRS, OURS, THEIRS)], ids=["from-ours", "from-theirs"]
)
def test_changing_the_daemon_on_a_live_node_loses_nothing(
    lab: Lab, backend: dict[str, Any], turns: tuple[list[str], ...]
) -> None:
    node, peer = mixed(lab, backend, turns[0], turns[1])
    before = own_part(node)
    with node.container().ping(peer.container()) as there, peer.container().ping(node.container()) as back:
        for command in turns[1:]:
            node.kill()
            there.wait_for_replies()
            start(lab, node, command=command)
            node.wait_ready(20)
            # A node that comes and goes shows that the new daemon has read all others.
            data = {"VtepMAC": "02:00:00:00:00:c8"} if backend["Type"] == "vxlan" else None
            lab.kube.control.put_peer("n200", "10.5.200.0/24", "198.18.0.200", backend["Type"], data)
            node.wait_for_route("10.5.200.0/24", SOON)
            lab.kube.control.delete_node("n200")
            node.wait_for_no_route("10.5.200.0/24", SOON)
            wait_for(lambda: own_part(node) == before, SOON, "the node to be as it was")
            there.wait_for_replies()
            back.wait_for_replies()
        assert (there.lost(), back.lost()) == (0, 0)
