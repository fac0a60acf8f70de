"""Changes of the host beneath the network: what they do to routes and record, on the model of a kernel."""

from __future__ import annotations

import logging
import re
from ipaddress import IPv4Address, IPv4Network

import pytest
from msgspec.structs import replace

from flanneld.backends import vxlan
from flanneld.errors import Fatal, Retryable
from flanneld.model import Cached, Snapshot
from flanneld.network.obstacles import HostNetworks, Obstacle, What
from flanneld.network.rtnetlink.kernel import (
    InterfaceChanged,
    ResourceRemoved,
)
from flanneld.reconcile.host_watch import demand_free_names, demand_free_networks, networks_around
from flanneld.state.resources import Address, ForeignLink, Ipip, Route, Vxlan
from tests.unit.reconcile.controlled_node import (
    FAR,
    HERE,
    INSIDE,
    LEASE,
    OUTSIDE,
    OVERLAY,
    PEER,
    PEER_SUBNET,
    ROUTE,
    STALE,
    THERE,
    VXLAN_LEASE,
    Node,
)
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.node import BRIDGE, UPLINK
from tests.unit.simulation.world import World


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


def test_any_interface_may_be_the_next_uplink_while_none_is_usable(node: Node) -> None:
    node.kernel.delete_address(UPLINK, HERE)
    node.tell_of(UPLINK, HERE)
    node.step()
    assert node.moves == []
    node.kernel.add_link(ForeignLink("eth1", "plain"))
    node.kernel.add_address("eth1", THERE, 16)
    node.kernel.add_route(Route(IPv4Network("0.0.0.0/0"), "eth1", IPv4Address("172.16.0.254")), 3)
    node.tell_of("eth1")
    node.step()
    assert [each.name for each in node.moves] == ["eth1"]


def test_peer_that_has_come_onto_a_link_is_followed_by_a_backend_that_asks_for_its_way(node: Node) -> None:
    around = Route(IPv4Network("172.16.0.2/32"), UPLINK, IPv4Address("172.16.0.254"))
    node.kernel.add_route(around, 3)
    node.inbox.put([Snapshot((LEASE,))])
    node.step()
    assert node.routes_to_peer() == []
    node.kernel.delete_route(around)
    node.kernel.monitor.tell(ResourceRemoved(around.key))
    node.step()
    assert node.routes_to_peer() == [ROUTE]
    assert node.moves == []


def test_lower_mtu_is_given_to_the_devices_and_told_once(world: World) -> None:
    node = Node(world, vxlan.VxlanBackend)
    node.controller.lower_mtu(1300)
    for _ in range(2):
        node.step()
        seen = node.kernel.link("flannel.1")
        assert seen is not None
        assert (seen.make.name, seen.mtu) == ("flannel.1", 1300)
        assert node.mtus == [1300]


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


def test_only_a_connected_network_is_around_those_of_nodes() -> None:
    wide, ranges = IPv4Network("10.5.32.0/20"), [(IPv4Network("10.5.0.0/16"), 24)]
    kinds: tuple[What, ...] = ("address", "gateway", "network", "store")
    found = {kind: Obstacle(wide, "br7", kind) for kind in kinds}
    assert networks_around(HostNetworks(frozenset(found.values())), ranges) == [found["network"]]
