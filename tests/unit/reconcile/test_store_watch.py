"""When an address of the store is an obstacle, on a simulated kernel and a virtual clock."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import NoAnswer, Retryable
from flanneld.model import IPAddress, IPNetwork, network_around, single
from flanneld.network.obstacles import Obstacle
from flanneld.network.rtnetlink.domain import Domain
from flanneld.reconcile.last_run import LastRun, StoreAddress
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.store_watch import StoreWatch, answered, remembered
from flanneld.runtime import clock
from flanneld.state.resources import PROTO_FLANNEL, Key, Resource, Route, Vxlan
from flanneld.subnet.store import Store
from tests.clock import Clock
from tests.unit.simulation.kernel import Kernel

NETWORKS = (IPv4Network("10.0.0.0/8"), IPv6Network("fc00:5::/48"))
OWN = (IPv4Network("10.5.1.0/24"),)
STORE = {4: ip_address("10.77.0.9"), 6: ip_address("fc00:5:0:77::9")}
AROUND: dict[int, IPNetwork] = {4: IPv4Network("10.77.0.0/24"), 6: IPv6Network("fc00:5:0:77::/64")}
GATEWAY = {4: ip_address("192.0.2.254"), 6: ip_address("fd00::fe")}
TUNNEL = Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, "02:00:00:00:00:01", 1450)
LOST = NoAnswer("etcd does not answer")


class FakeStore:
    """What the watch asks of a store."""

    def __init__(self) -> None:
        self.addresses: frozenset[IPAddress] = frozenset(STORE.values())
        self.problem: Retryable | None = None
        self.connections = 1

    def reconnect(self) -> None:
        self.connections += 1


class Host:
    """A host with a default gateway for each family, and the watch on it; ``desired`` are followed routes."""

    def __init__(self, time: Clock, subnet_file: Path) -> None:
        self.time = time
        self.subnet_file = subnet_file
        self.store = FakeStore()
        self.kernel = Kernel("eth0", (ip_address("192.0.2.1"), 24), (ip_address("fd00::1"), 64))
        self.kernel.domain = Domain("eth0", frozenset({"flannel.1"}), ((NETWORKS[0], 24), (NETWORKS[1], 64)))
        self.kernel.add_link(TUNNEL)
        for gateway in GATEWAY.values():
            self.kernel.add_route(Route(network_around(type(gateway)(0), 0), "eth0", gateway), 3, 100)
        self.desired: dict[Key, Resource] = {}
        self.restart()

    def restart(self) -> None:
        """Begin a new run with what the last one has recorded."""
        unasked: Any = None
        node = LocalNode(
            self.kernel,
            self.kernel.monitor,
            unasked,
            unasked,
            LastRun(self.subnet_file),
            unasked,
            store=cast("Store", self.store),
        )
        self.watch = StoreWatch(node, lambda key: self.desired.get(key))

    def follow(self, family: int, device: str = "flannel.1") -> Route:
        """Have the daemon's route to the subnet around the store."""
        gateway = AROUND[family].network_address if device == "flannel.1" else GATEWAY[family]
        route = Route(AROUND[family], device, gateway, onlink=True)
        self.kernel.add_route(route, 3 if device == "flannel.1" else PROTO_FLANNEL)
        self.desired[route.key] = route
        return route

    def look(self) -> dict[IPAddress, Obstacle]:
        found = self.watch.look(self.time.time, NETWORKS, OWN)
        self.watch.applied()
        return {each.net.network_address: each for each in found}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    time = Clock()
    time.time = 1_000_000.0
    with clock.replaced(time):
        yield Host(time, tmp_path / "subnet.env")


families = pytest.mark.parametrize("family", [4, 6])


@families
def test_address_behind_default_gateway_is_obstacle_through_all_restarts(host: Host, family: int) -> None:
    obstacle = Obstacle(single(STORE[family]), "eth0", "store")
    assert host.look()[STORE[family]] == obstacle
    host.store.problem = LOST
    assert host.look()[STORE[family]] == obstacle
    host.restart()
    host.store.addresses = frozenset()  # the name cannot be looked up
    assert host.look()[STORE[family]] == obstacle


@families
def test_address_outside_stays_obstacle_when_another_daemon_has_made_a_route(host: Host, family: int) -> None:
    host.look()
    host.follow(family)
    assert host.look()[STORE[family]] == Obstacle(single(STORE[family]), "", "store")


@families
@pytest.mark.parametrize("device", ["flannel.1", "eth0"])
def test_address_behind_route_of_ours_is_no_obstacle_even_when_the_route_goes(
    host: Host, family: int, device: str
) -> None:
    route = host.follow(family, device)
    assert STORE[family] not in host.look()
    host.kernel.delete_route(route)
    assert STORE[family] not in host.look()
    host.restart()
    assert STORE[family] not in host.look()


def test_side_of_address_is_not_judged_while_store_does_not_answer(host: Host) -> None:
    """After a boot there is no route of ours yet to a store inside the network."""
    host.store.problem = LOST
    assert host.look() == {}
    host.follow(4)
    host.store.problem = None
    assert STORE[4] not in host.look()


def test_obstacle_names_the_smaller_network_through_which_store_is_reached(host: Host) -> None:
    connected = ip_network("10.77.0.0/16")
    host.kernel.add_route(Route(connected, "eth0"), 2)
    assert host.look()[STORE[4]] == Obstacle(single(STORE[4]), "eth0", "store", connected)


def test_addresses_elsewhere_and_in_our_own_subnet_do_not_count(host: Host) -> None:
    host.store.addresses = frozenset({ip_address("192.0.2.9"), ip_address("10.5.1.9")})
    assert host.look() == {}
    assert list(host.subnet_file.parent.iterdir()) == []


@families
def test_lost_store_is_tried_without_route_and_is_outside_if_it_answers_then(
    host: Host, family: int, caplog: pytest.LogCaptureFixture
) -> None:
    host.store.addresses = frozenset({STORE[family]})
    route = host.follow(family)
    host.look()
    host.store.problem = LOST
    assert STORE[family] in host.look()
    assert host.watch.due == host.time.time + 5
    assert host.store.connections == 2
    host.kernel.delete_route(route)
    host.store.problem = None
    assert host.look()[STORE[family]] == Obstacle(single(STORE[family]), "eth0", "store")
    assert host.watch.due == math.inf
    host.restart()
    assert STORE[family] in host.look()
    trial, result = caplog.messages
    assert trial.startswith(f"Store unreachable: its address {STORE[family]} lies in the followed subnet ")
    assert result.startswith(f"Store answers without that route: its address {STORE[family]} is outside")


def test_trial_without_answer_ends_after_its_time_and_is_not_repeated_for_ten_minutes(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.follow(4)
    host.look()
    host.store.problem = LOST
    host.look()
    host.time.time += 4.9
    assert STORE[4] in host.look()
    host.time.time += 0.1
    assert STORE[4] not in host.look()
    assert caplog.messages[1].startswith(
        "Store unreachable without that route, too, at its address 10.77.0.9; "
    )
    host.restart()
    host.time.time += 590
    assert STORE[4] not in host.look()
    host.time.time += 5
    assert STORE[4] in host.look()


def test_refusal_of_store_begins_no_trial(host: Host) -> None:
    host.follow(4)
    host.store.problem = Retryable("etcd refuses the password")
    assert host.look() == {}


def test_route_that_no_lease_explains_is_not_tried_without(host: Host) -> None:
    """Nothing would restore it."""
    host.follow(4)
    host.desired.clear()
    host.store.problem = LOST
    assert host.look() == {}


def test_answer_of_another_endpoint_leaves_a_store_inside_the_network_there(host: Host) -> None:
    host.store.addresses |= {ip_address("192.0.2.9")}
    host.follow(4)
    host.look()
    host.store.problem = LOST
    host.look()
    host.store.problem = None
    assert STORE[4] in host.look()
    host.time.time += 5
    assert STORE[4] not in host.look()
    host.restart()
    assert STORE[4] not in host.look()


def test_of_several_endpoints_the_one_with_a_connection_has_answered() -> None:
    answering, other = ip_address("127.77.0.9"), ip_address("127.78.0.9")
    tried = frozenset({answering, other})
    with socket.create_server((str(answering), 0)) as server:
        with socket.create_connection(server.getsockname()):
            assert answered(tried, tried | {ip_address("192.0.2.9")}) == {answering}
        assert answered(tried, tried | {ip_address("192.0.2.9")}) == frozenset()
    assert answered(tried, tried) == tried


# ---- what is remembered ---------------------------------------------------------------------------

addresses = st.integers(0, 100).map(lambda number: IPv4Address("10.77.0.0") + number)
known_addresses = st.dictionaries(addresses, st.integers(900, 1000), max_size=80).map(
    lambda found: tuple(StoreAddress(address, hour, is_outside=True) for address, hour in found.items())
)


@given(known_addresses, st.frozensets(addresses, max_size=80), st.booleans())
def test_former_addresses_stay_for_a_day_behind_current_ones(
    known: tuple[StoreAddress, ...], current: frozenset[IPAddress], answers: bool
) -> None:
    found = {each.address: each for each in remembered(known, current, 1000, answers=answers)}
    assert len(found) <= 64
    assert current <= found.keys() or (found.keys() <= current and len(found) == 64)
    assert all(found[each].hour == 1000 for each in current & found.keys())
    stay = [each.address for each in known if not answers or each.hour >= 976]
    if len({*stay, *current}) <= 64:
        assert found.keys() == {*stay, *current}
    assert all(found[each.address].is_outside for each in known if each.address in found)


@pytest.mark.parametrize(("number", "kept"), [(64, 64), (65, 64)])
def test_addresses_are_remembered_up_to_a_limit(number: int, kept: int) -> None:
    current = [IPv4Address("10.77.0.0") + each for each in range(number)]
    found = remembered((), current, 1000, answers=True)
    assert [each.address for each in found] == current[:kept]
