"""A node with the daemon's controller on the model of a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from flanneld import config
from flanneld.backends.contract import Factory
from flanneld.backends.host_gw import HostGw
from flanneld.model import IPAddress, Lease, LeaseAttrs, Uplink
from flanneld.network.rtnetlink.kernel import (
    InterfaceChanged,
    Notification,
)
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.last_run import Device, LastRun, device_of
from flanneld.reconcile.local_node import LocalNode, UplinkManager, find_uplink
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.permits import RemovalGuard
from flanneld.state.resources import ForeignLink, Link, Route, Vxlan
from flanneld.subnet.subnet_file import NetworkAndSubnet
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kernel_tables import KernelTable, tables
from tests.unit.simulation.node import BRIDGE, UPLINK, Inbox
from tests.unit.simulation.world import World

HERE, PEER = IPv4Address("172.16.0.1"), IPv4Address("172.16.0.2")
THERE = IPv4Address("172.16.0.77")
OWN_SUBNET, PEER_SUBNET = IPv4Network("10.5.1.0/24"), IPv4Network("10.5.2.0/24")
STALE = Vxlan("flannel.7", 7, 2, HERE, 8472, "02:00:00:00:00:07", 1450)
LEASE = Lease(LeaseAttrs(PEER, backend_type="host-gw"), PEER_SUBNET)
ROUTE = Route(PEER_SUBNET, UPLINK, PEER)
VXLAN_LEASE = Lease(
    LeaseAttrs(PEER, backend_type="vxlan", backend_data={"VNI": 1, "VtepMAC": "02:00:00:00:00:02"}),
    PEER_SUBNET,
)
OVERLAY = Route(PEER_SUBNET, "flannel.1", PEER_SUBNET.network_address, onlink=True)
INSIDE, OUTSIDE = IPv4Network("10.5.9.0/24"), IPv4Network("198.51.100.0/24")
FAR = IPv4Address("192.0.2.9")


class Node:
    """A host with a bridge for its containers, and the daemon's controller on it."""

    def __init__(
        self,
        world: World,
        make_backend: Factory = HostGw,
        *,
        unreadable: str = "",
        adopts: bool = False,
        former: tuple[NetworkAndSubnet, ...] = (),
    ) -> None:
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
        #: Devices each time they were recorded.
        self.devices: list[tuple[Device, ...]] = []
        last_run = LastRun(Path("/nonexistent/subnet.env"), is_dry_run=True)
        last_run.devices = tuple(filter(None, [self.device(STALE.name)]))
        last_run.adopts, last_run.former = adopts, former
        last_run.record = self._record
        local = LocalNode(
            kernel,
            kernel.monitor,
            manager,
            Lease(manager.backend.attributes(), OWN_SUBNET),
            last_run,
            lambda left: tuple(self._tables(left, unreadable)),
        )
        self.tables: dict[str, KernelTable] = {}
        self.inbox = Inbox(lambda: None, world.now)
        #: The peers' public IPs each time when leases may have changed.
        self.told: list[set[IPAddress] | None] = []
        #: Uplinks after each move, and the network's MTU each time it was lowered.
        self.moves: list[Uplink] = []
        self.mtus: list[int] = []
        self.controller = Controller(
            local,
            RemovalGuard(),
            stop=threading.Event(),
            make_loop=Supervisor().loop,
            on_move=lambda: self.moves.append(manager.uplink),
            on_mtu=lambda: self.mtus.append(manager.mtu),
            on_synced=lambda: None,
            on_leases=lambda: self.told.append(self.controller.peers.public_ips()),
            reread=lambda: None,
            event_queue=self.inbox,
        )
        self.controller.prepare()

    def _record(self, **changes: Any) -> None:
        self.record.update(changes)
        if "devices" in changes:
            self.devices.append(changes["devices"])

    def _tables(self, left: Callable[[], Iterable[Link]], unreadable: str) -> Iterator[KernelTable]:
        for table in tables(self.kernel, left).values():
            table.unreadable = table.name == unreadable
            self.tables[table.name] = table
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

    def move(self, name: str = UPLINK) -> None:
        """Take the address away from the uplink; another one is on this interface then."""
        self.kernel.delete_address(UPLINK, HERE)
        if name != UPLINK:
            self.kernel.add_link(ForeignLink(name, "plain"))
        self.kernel.add_address(name, THERE, 16)
        self.kernel.add_route(Route(IPv4Network("0.0.0.0/0"), name, IPv4Address("172.16.0.254")), 3)
        self.tell_of(UPLINK, HERE)
        self.step()

    def asks_for(self, *news: Notification) -> bool:
        """Return True if the daemon looks at something within a second of these notifications."""
        self.step()
        self.kernel.monitor.tell(*news)
        self._world.time += 1.0
        return self.controller.step(self._world.time) < self._world.time + 1.0

    def routes_to_peer(self) -> list[Route]:
        return [held.route for held in self.kernel.at(PEER_SUBNET)]
