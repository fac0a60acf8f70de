"""The sweep of what an earlier run left, by the controller on the model of a kernel."""

from __future__ import annotations

import errno
import logging
from ipaddress import IPv4Address, IPv4Network

import pytest
from msgspec.structs import replace

from flanneld.backends import vxlan
from flanneld.model import Lease, LeaseAttrs, LeaseKey, Snapshot
from flanneld.network.rtnetlink.kernel import InterfaceChanged
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Route
from tests.unit.reconcile.controlled_node import (
    HERE,
    INSIDE,
    LEASE,
    OWN_SUBNET,
    PEER,
    PEER_SUBNET,
    ROUTE,
    STALE,
    Node,
)
from tests.unit.simulation.node import UPLINK
from tests.unit.simulation.world import World

NETWORK = IPv4Network("10.5.0.0/16")
OWN = Lease(LeaseAttrs(HERE, backend_type="host-gw"), OWN_SUBNET)
PEERS = tuple(replace(LEASE, subnet=IPv4Network(f"10.5.{200 + each}.0/24")) for each in range(20))
FORMER = (IPv4Network("10.9.0.0/16"), IPv4Network("10.9.1.0/24"))
UNREADABLE = IPv4Network("10.9.7.0/24")
SWEPT = "Removed, left by an earlier run: "


def refuse(*_: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


def left(node: Node, number: int) -> list[Route]:
    """Have routes of an earlier run; return them."""
    routes = [Route(IPv4Network(f"10.5.{100 + each}.0/24"), UPLINK, PEER) for each in range(number)]
    for route in routes:
        node.kernel.add_route(route, PROTO_FLANNEL)
    return routes


def there(node: Node, *routes: Route) -> list[Route]:
    return [route for route in routes if node.kernel.at(route.destination)]


@pytest.mark.parametrize(("number", "more"), [(9, []), (10, [f"{SWEPT}1 more objects"])])
def test_first_ten_swept_objects_are_told_of_and_then_their_number(
    node: Node, caplog: pytest.LogCaptureFixture, number: int, more: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    routes = left(node, number)
    node.inbox.put([Snapshot(PEERS)])
    node.step()
    assert there(node, *routes) == []
    lines = [line for line in caplog.messages if line.startswith(SWEPT)]
    assert lines[10:] == more
    in_sync = f"In sync with 20 peers: made 20 objects, removed {number + 1} left by an earlier run"
    assert in_sync in caplog.messages
    assert f"{SWEPT}{routes[0]}" in lines


def test_sweep_of_most_routes_is_held(node: Node) -> None:
    routes = left(node, 40)
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert there(node, *routes) == routes
    assert node.device(STALE.name) is not None
    assert node.routes_to_peer() == [ROUTE]


def test_sweep_is_repeated_until_the_tables_can_be_read(node: Node) -> None:
    (route,) = left(node, 1)
    node.tables["links"].unreadable = True
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert node.device(STALE.name) is not None
    assert "adopts" not in node.record
    assert node.controller.networks is None
    node.tables["links"].unreadable = False
    node.step()
    assert (node.device(STALE.name), there(node, route)) == (None, [])
    assert node.record["adopts"] is False
    assert node.controller.networks == ((NETWORK, OWN_SUBNET),)


def test_sweep_that_is_over_is_not_repeated(node: Node, world: World) -> None:
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert node.controller.step(world.time) > world.time + 10.0


# ---- another flanneld before ---------------------------------------------------------------------


def test_right_route_of_another_flanneld_is_adopted_and_a_stale_one_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(world, adopts=True)
    stale = Route(INSIDE, UPLINK, PEER)
    for route in (ROUTE, stale):
        node.kernel.add_route(route, PROTO_BOOT)
    node.inbox.put([Snapshot((LEASE,))])
    with monkeypatch.context() as broken:
        broken.setattr(node.kernel, "left_behind", refuse)
        node.step()
    assert "adopts" not in node.record
    node.step()
    assert there(node, ROUTE, stale) == [ROUTE]
    assert (node.record["adopted"], node.record["adopts"]) == ({PEER_SUBNET}, False)


@pytest.mark.parametrize(
    ("unreadable", "networks"),
    [
        ((), [(NETWORK, OWN_SUBNET)]),
        ((INSIDE,), [(NETWORK, OWN_SUBNET)]),
        ((UNREADABLE,), [(NETWORK, OWN_SUBNET), FORMER]),
    ],
    ids=["all leases are read", "one of this network is not", "one of a former network is not"],
)
def test_former_network_may_have_objects_while_a_lease_there_is_unreadable(
    world: World, unreadable: tuple[IPv4Network, ...], networks: list[tuple[IPv4Network, IPv4Network]]
) -> None:
    node = Node(world, former=((NETWORK, OWN_SUBNET), FORMER))
    keys: frozenset[LeaseKey] = frozenset((net, None) for net in unreadable)
    node.inbox.put([Snapshot((LEASE,), keys)])
    node.step()
    assert node.controller.networks == tuple(networks)
    node.inbox.put([Snapshot((OWN, LEASE))])
    node.step()
    assert node.controller.networks == ((NETWORK, OWN_SUBNET),)


# ---- devices -------------------------------------------------------------------------------------


def test_device_is_recorded_before_it_is_made(world: World) -> None:
    node = Node(world, vxlan.VxlanBackend)
    made = node.device("flannel.1")
    assert made is not None
    before = node.device(STALE.name)
    assert node.devices[0] == (before, replace(made, index=0))
    assert node.devices[-1] == (made, before)


@pytest.mark.parametrize(
    ("name", "address", "is_told"),
    [
        ("flannel.5", INSIDE[0], True),
        ("flannel.5", IPv4Address("192.0.2.9"), False),
        ("vxlan5", INSIDE[0], False),
    ],
    ids=["like ours", "with an address outside", "with another name"],
)
def test_device_like_those_of_an_earlier_run_is_left_alone_and_told_of(
    world: World, caplog: pytest.LogCaptureFixture, name: str, address: IPv4Address, is_told: bool
) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.kernel.add_link(replace(STALE, name=name, vni=5))
    node.kernel.add_address(name, address, 32)
    node.inbox.put([Snapshot(())])
    node.step()
    assert node.device(name) is not None
    told = f"Left alone: {name} has an address in our network, but is not in our record; "
    assert any(line.startswith(told) for line in caplog.messages) is is_told


def test_device_that_cannot_be_removed_where_it_was_moved_is_told_of(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.step()
    monkeypatch.setattr(node.kernel, "take_back", refuse)
    index = node.kernel.indexes["flannel.1"]
    node.kernel.monitor.tell(InterfaceChanged(index, "flannel.1", moved=(3, 7)))
    node.step()
    told = "Cannot remove flannel.1 in the network namespace to which it was moved: Too many open files; "
    assert any(line.startswith(told) for line in caplog.messages)
