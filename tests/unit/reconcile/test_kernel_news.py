"""Notifications of the kernel: which of them the daemon looks at, and what it says of them."""

from __future__ import annotations

import errno

import pytest
from msgspec.structs import replace

from flanneld.backends import vxlan
from flanneld.backends.host_gw import HostGw
from flanneld.compat.glog import V
from flanneld.model import Family, Snapshot
from flanneld.network.rtnetlink.kernel import (
    HostRouteChanged,
    InterfaceChanged,
    Notification,
    Overrun,
    ResourceChanged,
    ResourceRemoved,
    Unmonitored,
)
from flanneld.state.resources import ForeignLink, Route
from tests.unit.reconcile.controlled_node import (
    FAR,
    INSIDE,
    LEASE,
    OUTSIDE,
    OVERLAY,
    OWN_SUBNET,
    PEER,
    PEER_SUBNET,
    ROUTE,
    VXLAN_LEASE,
    Node,
)
from tests.unit.simulation.node import UPLINK
from tests.unit.simulation.world import World


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


def test_storm_of_notifications_leads_to_five_looks_a_second(
    node: Node, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, local = [], node.kernel.local

    def look(family: Family) -> object:
        looks.append(world.time)
        return local(family)

    monkeypatch.setattr(node.kernel, "local", look)
    for _ in range(100):
        world.time += 0.01
        node.tell_of("veth1", FAR)
        node.controller.step(world.time)
    assert len(looks) in (5, 6)


def test_route_of_others_into_an_encrypted_network_is_told_of_until_it_is_gone(world: World) -> None:
    class Encrypting(HostGw):
        encrypts = True

    node = Node(world, Encrypting)
    past = Route(INSIDE, UPLINK, PEER)
    watch = node.controller.encryption
    assert watch.problem == ""
    node.kernel.add_route(past, 4)
    node.kernel.monitor.tell(ResourceChanged(past))
    node.step()
    assert f"another program's route {INSIDE} via {PEER} dev {UPLINK};" in watch.problem
    node.kernel.delete_route(past)
    node.kernel.monitor.tell(ResourceRemoved(past.key))
    node.step()
    assert watch.problem == ""


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


def test_lost_notifications_are_counted_and_all_tables_read(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(V(1), "flanneld")
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    node.kernel.delete_route(ROUTE)
    node.kernel.monitor.tell(Overrun())
    node.step()
    assert node.routes_to_peer() == [ROUTE]
    assert node.controller.tables.work.overruns == 1
    assert "Kernel notifications lost: auditing all tables" in caplog.messages


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
