"""Together with Go flannel 0.6.2, named by ``FLANNELD_PEER_V06``: its server, its clients, its networks."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.lab import Lab, Node, own_command, peer_command, wait_for
from tests.lab.daemon import Daemon
from tests.lab.lab import ADDRESS, NETWORK
from tests.netns.test_networks import BLUE, RED, directory, leads_to, put, subnet

THEIRS = [*peer_command("v0.6"), "-logtostderr"]
REMOTE = f"-remote={ADDRESS}:8888"
kinds = pytest.mark.parametrize("kind", ["vxlan", "host-gw"])


@contextmanager
def serving(lab: Lab, *command: str) -> Iterator[Daemon]:
    """Run a server of leases on the switch, where etcd is."""
    flags = [f"-listen={ADDRESS}:8888", f"-etcd-endpoints={lab.etcd.endpoint}"]
    daemon = Daemon(lab.switch, [*command, *flags], lab.directory / "server.log")
    wait_for(lambda: "running as server" in daemon.log(), what="the server to listen")
    try:
        yield daemon
    finally:
        if daemon.status() is None:
            daemon.end(signal.SIGKILL, 10)


def start(node: Node, command: list[str], *flags: str) -> None:
    node.start(*flags, command=command)


def connect(nodes: list[Node]) -> None:
    for one, other in itertools.permutations(nodes, 2):
        one.container().wait_for_reply(other.container(), 60)


@kinds
@pytest.mark.parametrize("place", ["etcd, their server", "etcd, our server", "our file"])
def test_clients_of_both_share_a_network(kind: str, place: str) -> None:
    config: dict[str, Any] = {"Network": NETWORK, "Backend": {"Type": kind}}
    with Lab(api="v2") as lab:
        lab.etcd.put_config(config)
        if place == "etcd, their server":
            with serving(lab, *THEIRS):
                check(lab.add_nodes(3), REMOTE)
        elif place == "etcd, our server":
            with serving(lab, *own_command(), "-etcd-api=v2"):
                check(lab.add_nodes(3), REMOTE)
        else:
            first, *others = lab.add_nodes(4)
            store = first.directory / "leases.db"
            flags = [f"-listen={first.address}:8888", f"-store={store}", f"-network={json.dumps(config)}"]
            start(first, own_command(), *flags)
            first.wait_ready()
            check(others, f"-remote={first.address}:8888", first)


def check(nodes: list[Node], remote: str, *more: Node) -> None:
    """Two of Go's and one of ours reach each other, and none takes the others' writes for a rival's."""
    one, other, ours = nodes
    for node in (one, other):
        start(node, THEIRS, remote)
    start(ours, own_command(), remote)
    for node in nodes:
        node.wait_ready()
    connect([*nodes, *more])
    for node in (ours, *more):
        assert "another node" not in node.log()


def test_networks_of_both_are_the_same() -> None:
    with Lab(api="v2") as lab:
        put(lab, "blue", BLUE)
        put(lab, "red", RED)
        theirs, ours = nodes = lab.add_nodes(2)
        for node, command in zip(nodes, (THEIRS, own_command()), strict=True):
            start(node, command, f"-subnet-dir={directory(node)}", "-networks=blue,red")
        # With vxlan, 0.6.2 has one route for the whole network, and learns the peers from misses.
        for node, peer, name in ((ours, theirs, "blue"), (theirs, ours, "blue"), (ours, theirs, "red")):
            gateway = subnet(peer, name)
            wait_for(partial(leads_to, node, gateway), 60, f"a route to {gateway}")
        assert subnet(ours, "red") != subnet(theirs, "red")
