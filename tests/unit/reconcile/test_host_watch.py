"""Changes of the host beneath the network: what they do to routes and record, on the model of a kernel."""

from __future__ import annotations

import errno
import logging
import re
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
from flanneld.errors import Fatal, Retryable
from flanneld.model import Cached, IPAddress, Lease, LeaseAttrs, Snapshot, Uplink
from flanneld.network.obstacles import HostNetworks, Obstacle
from flanneld.network.rtnetlink.kernel import (
    HostRouteChanged,
    InterfaceChanged,
    Notification,
    Overrun,
    ResourceChanged,
    ResourceRemoved,
    Unmonitored,
)
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.host_watch import demand_free_names, demand_free_networks
from flanneld.reconcile.last_run import Device, LastRun, device_of
from flanneld.reconcile.local_node import LocalNode, UplinkManager, find_uplink
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.permits import RemovalGuard
from flanneld.state.resources import Address, ForeignLink, Ipip, Link, Route, Vxlan
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


# ---- the uplink ----------------------------------------------------------------------------------


def test_devices_and_routes_follow_the_uplink_to_another_address(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = Node(world, vxlan.VxlanBackend)
    node.inbox.put([Snapshot((VXLAN_LEASE,))])
    node.step()
    caplog.clear()
    node.move()
    seen = node.kernel.link("flannel.1")
    assert seen is not None
    assert isinstance(seen.make, Vxlan)
    assert seen.make.local == THERE
    assert node.routes_to_peer() == [OVERLAY]
    assert [each.local(4) for each in node.moves] == [THERE]
    assert "Made 5 objects for the new uplink" in caplog.messages
    node.step()
    assert len(node.moves) == 1


def test_routes_follow_the_uplink_to_another_interface(node: Node) -> None:
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    node.move("eth1")
    assert node.routes_to_peer() == [replace(ROUTE, device="eth1")]
    assert node.kernel.domain.uplink == "eth1"
    assert [each.name for each in node.moves] == ["eth1"]


def test_lower_mtu_is_given_to_the_devices_and_told_once(world: World) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.controller.lower_mtu(1300)
    for _ in range(2):
        node.step()
        seen = node.kernel.link("flannel.1")
        assert seen is not None
        assert (seen.make.name, seen.mtu) == ("flannel.1", 1300)
        assert node.mtus == [1300]


# ---- what is heard -------------------------------------------------------------------------------

INSIDE, OUTSIDE = IPv4Network("10.5.9.0/24"), IPv4Network("198.51.100.0/24")
FAR = IPv4Address("192.0.2.9")


@pytest.mark.parametrize(
    ("news", "expected"),
    [
        pytest.param(Overrun(), True, id="lost notifications"),
        pytest.param(Unmonitored(), True, id="a time without notifications"),
        pytest.param(ResourceRemoved(OVERLAY.key), True, id="our route went"),
        pytest.param(ResourceRemoved(Route(OUTSIDE, UPLINK).key), False, id="another route went"),
        pytest.param(ResourceRemoved(Route(INSIDE, "eth1").key), True, id="one into the network went"),
        pytest.param(
            ResourceRemoved(Route(OUTSIDE, "eth1").key, gateway=INSIDE[9]), True, id="one by a gateway inside"
        ),
        pytest.param(ResourceChanged(OVERLAY), False, id="our route is as it was"),
        pytest.param(ResourceChanged(replace(OVERLAY, gateway=None)), True, id="our route changed"),
        pytest.param(ResourceChanged(Route(OUTSIDE, "flannel.1")), True, id="a new route by our device"),
        pytest.param(ResourceChanged(Route(OUTSIDE, UPLINK, FAR)), False, id="another new route"),
        pytest.param(ResourceChanged(Route(INSIDE, "eth1")), True, id="a new route into the network"),
        pytest.param(ResourceChanged(Route(OUTSIDE, "eth1", INSIDE[9])), True, id="a gateway in the network"),
        pytest.param(HostRouteChanged(OUTSIDE, (FAR,)), False, id="a route of another metric"),
        pytest.param(HostRouteChanged(INSIDE), True, id="one of another metric into the network"),
        pytest.param(HostRouteChanged(OUTSIDE, (FAR, INSIDE[9])), True, id="a second gateway inside"),
        pytest.param(HostRouteChanged(OWN_SUBNET), False, id="a route to our own containers"),
        pytest.param(InterfaceChanged(2, UPLINK), True, id="the uplink"),
        pytest.param(InterfaceChanged(2, None), True, id="the uplink, by its number"),
        pytest.param(InterfaceChanged(99, "flannel.1"), True, id="our device, by its name"),
        pytest.param(InterfaceChanged(99, "veth1"), False, id="another interface"),
        pytest.param(InterfaceChanged(99, None), False, id="an unknown interface"),
        pytest.param(InterfaceChanged(99, "veth1", address=FAR), True, id="an address of another interface"),
        pytest.param(InterfaceChanged(99, "br7"), True, id="an interface in our network"),
    ],
)
def test_daemon_looks_at_what_may_concern_it_at_once(
    world: World, news: Notification, expected: bool
) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.kernel.add_link(ForeignLink("br7", "bridge"))
    node.kernel.add_address("br7", INSIDE[7], 25)
    node.tell_of("br7", INSIDE[7])
    node.inbox.put([Snapshot((VXLAN_LEASE,))])
    node.step()
    assert node.asks_for(news) is expected


def test_program_that_changed_something_is_named_as_of_this_change(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = "ip (pid 812)"
    monkeypatch.setattr("flanneld.network.processes.process_at", lambda port: writer if port == 812 else "")
    node = Node(world, vxlan.VxlanBackend)
    node.inbox.put([Snapshot((VXLAN_LEASE,))])
    node.step()
    for writer in ("ip (pid 812)", "dhcpcd (pid 812)"):
        caplog.clear()
        world.time += 20.0
        node.kernel.delete_route(OVERLAY)
        node.kernel.monitor.tell(ResourceRemoved(OVERLAY.key, 812))
        node.step()
        (line,) = caplog.messages
        assert line.startswith(f"Restored {OVERLAY}, ")
        assert line.endswith(f" after a change by {writer}")
    caplog.clear()
    world.time += 20.0
    node.kernel.delete_link("flannel.1")
    node.kernel.monitor.tell(InterfaceChanged(9, "flannel.1", 812))
    node.step()
    assert len(caplog.messages) == 5
    assert all(line.endswith(" after a change by dhcpcd (pid 812)") for line in caplog.messages)


def test_lost_notifications_are_counted_and_all_tables_read(node: Node) -> None:
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    node.kernel.delete_route(ROUTE)
    node.kernel.monitor.tell(Overrun())
    node.step()
    assert node.routes_to_peer() == [ROUTE]
    assert node.controller.tables.work.overruns == 1


def test_host_that_cannot_be_read_changes_nothing_and_is_told_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    taken = PEER_SUBNET.network_address + 9
    for _ in range(2):
        caplog.clear()
        node.kernel.add_address(UPLINK, taken, 32)
        with monkeypatch.context() as broken:
            broken.setattr(node.kernel, "local", refuse)
            for _ in range(2):
                node.tell_of(UPLINK, taken)
                node.step()
        assert node.routes_to_peer() == [ROUTE]
        lines = [line for line in caplog.messages if line.startswith("Cannot read the kernel's tables: ")]
        assert len(lines) == 1
        node.step()
        assert node.routes_to_peer() == []
        node.kernel.delete_address(UPLINK, taken)
        node.tell_of(UPLINK, taken)
        node.step()
        assert node.routes_to_peer() == [ROUTE]


# ---- what a start demands ------------------------------------------------------------------------


def test_device_of_others_with_a_name_of_ours_is_fatal_where_its_owner_must_remove_it() -> None:
    kernel = Kernel(UPLINK)
    wanted = [Ipip("flannel.ipip", HERE, 1480), STALE]
    demand_free_names(kernel, wanted)
    for each in wanted:
        kernel.add_link(ForeignLink(each.name, "a plain interface"))
    demand_free_names(kernel, [STALE])
    problem = (
        "flannel.ipip is a plain interface, and we need a device of kind ipip; give it another name: ip link"
    )
    with pytest.raises(Fatal, match=re.escape(problem)):
        demand_free_names(kernel, wanted)
    kernel.delete_link("flannel.ipip")
    kernel.add_link(wanted[0])
    demand_free_names(kernel, wanted)


def test_connected_network_that_this_node_would_take_over_is_fatal() -> None:
    network = IPv4Network("10.5.0.0/16")
    route, other = Route(network, "flannel0"), Route(OUTSIDE, "flannel0")
    lan = Obstacle(network, "br7", "network")
    demand_free_networks([route], HostNetworks(frozenset({Obstacle(network, "br7", "store")})))
    demand_free_networks([other, Address("flannel0", FAR)], HostNetworks(frozenset({lan})))
    with pytest.raises(
        Fatal, match=r"^br7 is connected to 10\.5\.0\.0/16, and all of .* would go into flannel0"
    ):
        demand_free_networks([other, route], HostNetworks(frozenset({lan})))


def test_networks_on_links_that_are_larger_than_a_subnet_are_warned_of(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(world)
    assert caplog.messages == []
    for name, length in (("br7", 23), ("br8", 24)):
        node.kernel.add_link(ForeignLink(name, "bridge"))
        node.kernel.add_address(name, INSIDE[7] + (length << 8), length)
    node.controller.prepare()
    assert [line.split(";")[0] for line in caplog.messages] == [
        "Network overlap: br7 is connected to 10.5.32.0/23"
    ]
