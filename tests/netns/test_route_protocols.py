"""Protocol numbers of many routes, from the flag to the kernel."""

from __future__ import annotations

import pytest

from tests.bench.cluster import OVERLAY, open_leases
from tests.lab import Lab, Node, wait_for
from tests.netns.test_cleanup import cleanup
from tests.netns.test_plan import plan

PEERS = 600
OFF = "--route-protocol-spread=off"


@pytest.fixture
def node(lab: Lab) -> Node:
    """A node without a daemon yet, whose network has many peers."""
    lab.etcd.put_config({"Network": OVERLAY, "SubnetLen": 24, "Backend": {"Type": "vxlan"}})
    with open_leases(lab.etcd, "vxlan") as leases:
        leases.load(PEERS)
    (node,) = lab.add_nodes(1)
    return node


def protocols(node: Node) -> list[str]:
    """Return the number of each peer's route; ``ip`` leaves that of ``boot`` out."""
    rows = node.namespace.json("ip", "-j", "-N", "route", "show", "dev", "flannel.1")
    return [row.get("protocol", "3") for row in rows]


def start(node: Node, *flags: str) -> None:
    node.start(*flags)
    node.wait_ready()
    wait_for(lambda: len(protocols(node)) == PEERS, 20, "all routes")


def test_the_numbers_of_many_routes_differ_and_a_restart_without_the_option_keeps_them(
    lab: Lab, node: Node
) -> None:
    planned = [line for line in plan(lab, node).splitlines() if line.startswith("ip route replace")]
    start(node)
    assert len(set(protocols(node))) == 106
    # A command of the plan makes the same route.
    assert {line.split(" proto ")[1].split()[0] for line in planned} == set(protocols(node))
    node.stop()
    with node.changes() as changes:
        node.start(OFF)
        node.wait_ready()
        node.wait_for_log("In sync with")
        assert changes.seen() == []
    wait_for(lambda: plan(lab, node) == "", what="the rules to be in place, too")
    node.stop()
    cleanup(node)
    assert node.link("flannel.1") is None


def test_the_option_leaves_gos_number(node: Node) -> None:
    start(node, OFF)
    assert set(protocols(node)) == {"3"}
