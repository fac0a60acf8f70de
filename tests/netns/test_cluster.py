"""Whole clusters over a real etcd and a real kernel, with every backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.lab import Exit, Lab, Node, wait_for
from tests.netns.apis import both_apis

DEVICES = ("flannel.1", "eth0")

STOPS: list[Callable[[Node], Exit]] = [Node.stop, Node.kill]


def connect(nodes: list[Node]) -> None:
    """Give each node a container and wait until all of them reach each other."""
    for one, other in itertools.permutations(nodes, 2):
        one.container().wait_for_reply(other.container())


def destinations(node: Node) -> set[str]:
    return {route["dst"] for route in node.routes()}


def traces(node: Node, peer: Node) -> list[dict[str, Any]]:
    """What in a node's kernel leads to a peer's subnet or to its VTEP."""
    inside = peer.subnet().removesuffix("0/24")
    return [
        *(route for route in node.routes() if route["dst"].startswith(inside)),
        *(entry for entry in node.neighbors("flannel.1") if entry["dst"].startswith(inside)),
        *(entry for entry in node.fdb("flannel.1") if entry["dst"] == peer.address),
    ]


def wait_for_no_traces(node: Node, peer: Node) -> None:
    wait_for(lambda: not traces(node, peer), what=f"{peer.name}'s traces to go from {node.name}")


@both_apis
def test_containers_on_two_nodes_reach_each_other(lab: Lab, backend: dict[str, Any]) -> None:
    connect(lab.cluster(backend, nodes=2))


def test_containers_on_three_nodes_reach_each_other(lab: Lab, backend: dict[str, Any]) -> None:
    nodes = lab.cluster(backend, nodes=3)
    connect(nodes)
    assert set(lab.etcd.leases()) == {node.subnet() for node in nodes}
    assert len(lab.etcd.leases()) == 3


def test_a_node_that_joins_later_is_reached_by_all(lab: Lab, backend: dict[str, Any]) -> None:
    nodes = lab.cluster(backend, nodes=2)
    connect(nodes)
    connect([*nodes, *lab.cluster(backend, nodes=1)])


def test_sigterm_ends_with_0_and_leaves_the_kernel_as_it_is(lab: Lab, backend: dict[str, Any]) -> None:
    first, second = lab.cluster(backend)
    connect([first, second])
    before = first.kernel_state(*DEVICES)
    files = first.subnet_file.read_text()
    leases = lab.etcd.leases()
    assert first.stop().status == 0
    assert first.kernel_state(*DEVICES) == before
    assert first.subnet_file.read_text() == files
    assert lab.etcd.leases() == leases
    assert first.container().reaches(second.container())


@pytest.mark.parametrize("end", STOPS, ids=["SIGTERM", "SIGKILL"])
def test_a_restart_loses_no_packet(lab: Lab, backend: dict[str, Any], end: Callable[[Node], Exit]) -> None:
    first, second = lab.cluster(backend)
    connect([first, second])
    before = first.kernel_state(*DEVICES)
    env = first.env()
    with (
        first.container().ping(second.container()) as there,
        second.container().ping(first.container()) as back,
    ):
        end(first)
        there.wait_for_replies()
        first.start()
        assert first.wait_ready() == env
        # A later lease shows that the first snapshot has been dealt with.
        third = lab.cluster(backend, nodes=1)[0]
        wait_for(lambda: third.subnet() in destinations(first), what="the route to a new node")
        there.wait_for_replies()
        back.wait_for_replies()
        assert (there.lost(), back.lost()) == (0, 0)
    third.stop()
    lab.etcd.delete_lease(third.subnet())
    wait_for_no_traces(first, third)
    assert first.kernel_state(*DEVICES) == before


def test_a_deleted_lease_takes_its_routes_along(lab: Lab, backend: dict[str, Any]) -> None:
    first, second, gone = lab.cluster(backend, nodes=3)
    connect([first, second, gone])
    assert traces(first, gone)
    assert gone.stop().status == 0
    lab.etcd.delete_lease(gone.subnet())
    for node in (first, second):
        wait_for_no_traces(node, gone)
    assert traces(first, second)
    assert first.container().reaches(second.container())
