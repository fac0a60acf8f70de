"""The controller of a node, on the model of a kernel."""

from __future__ import annotations

import ctypes
from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.model import Lease, LeaseAttrs, Snapshot
from tests.unit.reconcile.controlled_node import Node
from tests.unit.simulation.world import World


@pytest.mark.parametrize(("peers", "times"), [(3001, 1), (20, 0)], ids=["many", "few"])
def test_memory_goes_back_to_the_kernel_once_after_many_routes_were_made(
    peers: int, times: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []

    class Library:
        malloc_trim = staticmethod(trimmed.append)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    node = Node(world)
    first, home = int(IPv4Address("10.5.128.0")), int(IPv4Address("172.16.1.0"))
    leases = tuple(
        Lease(
            LeaseAttrs(IPv4Address(home + each), backend_type="host-gw"), IPv4Network((first + each * 8, 29))
        )
        for each in range(peers)
    )
    node.inbox.put([Snapshot(leases)])
    node.step()
    assert trimmed == []
    for _ in range(200):  # an audit of a large table takes several steps
        world.time += 1.0
        node.controller.step(world.time)
    assert len(trimmed) == times
