"""Changes of the host beneath the network: what they do to routes and record, on the model of a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld import config
from flanneld.backends import vxlan
from flanneld.backends.contract import Factory
from flanneld.backends.host_gw import HostGw
from flanneld.errors import Retryable
from flanneld.model import Cached, IPAddress, Lease, LeaseAttrs, Snapshot
from flanneld.network.rtnetlink.kernel import InterfaceChanged, ResourceRemoved
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.last_run import Device, LastRun, device_of
from flanneld.reconcile.local_node import LocalNode, UplinkManager, find_uplink
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.permits import RemovalGuard
from flanneld.state.resources import ForeignLink, Link, Route, Vxlan
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kernel_tables import KernelTable, tables
from tests.unit.simulation.node import BRIDGE, UPLINK, Inbox
from tests.unit.simulation.world import World

HERE, PEER = IPv4Address("172.16.0.1"), IPv4Address("172.16.0.2")
OWN_SUBNET, PEER_SUBNET = IPv4Network("10.5.1.0/24"), IPv4Network("10.5.2.0/24")
STALE = Vxlan("flannel.7", 7, 2, HERE, 8472, "02:00:00:00:00:07", 1450)
LEASE = Lease(LeaseAttrs(PEER, backend_type="host-gw"), PEER_SUBNET)
ROUTE = Route(PEER_SUBNET, UPLINK, PEER)


class Node:
    """A host with a bridge for its containers, and the daemon's controller on it."""

    def __init__(self, world: World, make_backend: Factory = HostGw, *, unreadable: str = "") -> None:
        self._world = world
        parsed = config.parse('{"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}}')
        self.kernel = kernel = Kernel(UPLINK, (HERE, 16))
        kernel.add_route(Route(IPv4Network("0.0.0.0/0"), UPLINK, IPv4Address("172.16.0.254")), 3)
        kernel.add_link(ForeignLink(BRIDGE, "bridge"))
        kernel.add_address(BRIDGE, OWN_SUBNET.network_address + 1, 24)
        uplink = find_uplink(kernel, parsed, InterfaceChoice())
        manager = UplinkManager(kernel, parsed, InterfaceChoice(), make_backend, uplink, None)
        kernel.add_link(STALE)
        self.record: dict[str, Any] = {}
        last_run = LastRun(Path("/nonexistent/subnet.env"), is_dry_run=True)
        last_run.devices = tuple(filter(None, [self.device(STALE.name)]))
        last_run.record = self.record.update
        local = LocalNode(
            kernel,
            kernel.monitor,
            manager,
            Lease(manager.backend.attributes(), OWN_SUBNET),
            last_run,
            lambda left: tuple(self._tables(left, unreadable)),
        )
        self.inbox = Inbox(lambda: None, world.now)
        #: The peers' public IPs each time when leases may have changed.
        self.told: list[set[IPAddress] | None] = []
        self.controller = Controller(
            local,
            RemovalGuard(),
            stop=threading.Event(),
            make_loop=Supervisor().loop,
            on_move=lambda: None,
            on_synced=lambda: None,
            on_leases=lambda: self.told.append(self.controller.peers.public_ips()),
            reread=lambda: None,
            event_queue=self.inbox,
        )
        self.controller.prepare()

    def _tables(self, left: Callable[[], Iterable[Link]], unreadable: str) -> Iterator[KernelTable]:
        for table in tables(self.kernel, left).values():
            table.unreadable = table.name == unreadable
            yield table

    def step(self) -> None:
        """Let some seconds pass, in which the controller does what is due, and then waits for the next."""
        for _ in range(3):
            self._world.time += 1.0
            due = self.controller.step(self._world.time)
        assert due > self._world.time

    def device(self, name: str) -> Device | None:
        seen = self.kernel.link(name)
        return device_of(seen) if seen else None

    def tell_of(self, name: str, address: IPv4Address | None = None) -> None:
        """Notify the daemon of a change of an interface."""
        self.kernel.monitor.tell(InterfaceChanged(self.kernel.indexes.get(name, 0), name, address=address))

    def routes_to_peer(self) -> list[Route]:
        return [held.route for held in self.kernel.at(PEER_SUBNET)]


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    with world.running():
        yield world


@pytest.fixture
def node(world: World) -> Node:
    return Node(world)


@pytest.mark.parametrize("name", ["links", "addresses", "routes"])
def test_start_waits_while_a_table_cannot_be_read(name: str, world: World) -> None:
    with pytest.raises(Retryable, match=f"cannot read the {name}: the dump was interrupted"):
        Node(world, unreadable=name)


def test_bridge_of_our_own_containers_is_no_obstacle(node: Node) -> None:
    host = node.controller.peers.claims.host
    assert (host.obstacles, host.detours) == (frozenset(), frozenset())


def test_routes_of_cached_leases_stay_until_the_store_confirms_that_they_are_unsafe(node: Node) -> None:
    node.inbox.put([Cached((LEASE,), "a file")])
    node.step()
    assert node.routes_to_peer() == [ROUTE]
    node.kernel.add_address(UPLINK, PEER_SUBNET.network_address + 9, 32)
    node.tell_of(UPLINK, PEER_SUBNET.network_address + 9)
    node.step()
    assert node.controller.peers.unsafe()
    assert node.routes_to_peer() == [ROUTE]
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert node.routes_to_peer() == []


def test_changed_leases_are_told_of_once_all_are_known(node: Node) -> None:
    node.inbox.put([Cached((LEASE,), "a file")])
    node.step()
    assert node.told == []
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert node.told == [{PEER}]


def test_leases_that_the_host_made_unsafe_and_safe_are_told_of(node: Node) -> None:
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    node.told.clear()
    taken = PEER_SUBNET.network_address + 9
    node.kernel.add_address(UPLINK, taken, 32)
    node.tell_of(UPLINK, taken)
    node.step()
    node.step()
    assert node.told == [set()]
    node.kernel.delete_address(UPLINK, taken)
    node.tell_of(UPLINK, taken)
    node.step()
    node.step()
    assert node.told == [set(), {PEER}]


def test_device_that_another_program_removed_is_recorded_as_it_is_made_again(world: World) -> None:
    node = Node(world, vxlan.VxlanBackend)
    first = node.device("flannel.1")
    assert first in node.record["devices"]
    node.kernel.delete_link("flannel.1")
    node.tell_of("flannel.1")
    node.step()
    assert node.device("flannel.1") not in (None, first)
    assert node.record["devices"] == (node.device("flannel.1"), node.device(STALE.name))


def test_device_of_an_earlier_run_leaves_the_record_once_it_is_swept(node: Node) -> None:
    assert node.record["devices"] == (node.device(STALE.name),)
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert node.device(STALE.name) is None
    assert node.record["devices"] == ()


def test_pass_that_touches_no_device_writes_no_record(node: Node) -> None:
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    node.record.clear()
    node.kernel.delete_route(ROUTE)
    node.kernel.monitor.tell(ResourceRemoved(ROUTE.key))
    node.step()
    assert node.routes_to_peer() == [ROUTE]
    assert node.record == {}


@pytest.mark.parametrize("mac", ["", "02:00:00:00:00:99"], ids=["ours", "anothers"])
def test_device_of_ours_in_another_namespace_is_removed_there_and_made_again(world: World, mac: str) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.step()
    seen = node.kernel.link("flannel.1")
    assert seen is not None
    node.kernel.elsewhere[3, 7] = replace(seen, index=7, name="dev7", mac=mac or seen.mac)
    node.kernel.delete_link("flannel.1")
    node.kernel.monitor.tell(InterfaceChanged(seen.index, "flannel.1", moved=(3, 7)))
    node.step()
    assert bool(node.kernel.elsewhere) == bool(mac)
    assert node.device("flannel.1") is not None


def test_interface_of_others_that_is_moved_away_stays_there(world: World) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.step()
    seen = node.kernel.link(BRIDGE)
    assert seen is not None
    node.kernel.elsewhere[3, 7] = seen
    node.kernel.delete_link(BRIDGE)
    node.kernel.monitor.tell(InterfaceChanged(seen.index, BRIDGE, moved=(3, 7)))
    node.step()
    assert node.kernel.elsewhere
