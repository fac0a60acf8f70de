"""The path MTU's follower: which measurements lower the network's MTU, and how far."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flanneld.backends.contract import Backend
from flanneld.model import IPAddress, Lease, LeaseAttrs
from flanneld.network.host import HostKernel
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.local_node import UplinkManager
from flanneld.reconcile.probes import PathMtuFollower, agreed
from flanneld.state.resources import Address, Resource, WireGuard
from tests.clock import Clock
from tests.unit.reconcile.test_local_node import CONFIG, UPLINK

OWN = Lease(LeaseAttrs(), IPv4Network("10.5.1.0/24"))
BOTH = Lease(LeaseAttrs(), IPv4Network("10.5.1.0/24"), IPv6Network("fd00:1::/64"))
PEERS = [Lease(LeaseAttrs(), IPv4Network(f"10.5.{number}.0/24")) for number in (2, 3)]
TWO, THREE = (each.subnet.network_address for each in PEERS if each.subnet)


class Fixture:
    """A node with two peers or one, and paths that carry what ``sizes`` says, by peer."""

    def __init__(self, own: Lease = OWN, number: int = len(PEERS)) -> None:
        self.uplinks = SimpleNamespace(mtu=1450)
        self.sizes: dict[IPAddress, int | None] = {}
        self.lowered: list[int] = []
        self.asked: list[IPAddress] = []
        self.failure: OSError | None = None
        peers = SimpleNamespace(
            local_resources=lambda: (Address("flannel.1", IPv4Address("10.5.1.0")),),
            view=lambda: SimpleNamespace(leases=PEERS[:number], reasons=()),
        )
        controller: Any = SimpleNamespace(uplink_manager=self.uplinks, peers=peers, lower_mtu=self.lower)
        self.follower = PathMtuFollower(own, cast("Controller", controller), self.measure, self.measure)

    def lower(self, mtu: int) -> None:
        self.lowered.append(mtu)
        self.uplinks.mtu = mtu

    def measure(self, questions: Sequence[tuple[IPAddress, int]]) -> list[int | None]:
        self.asked += [target for target, _ in questions]
        if self.failure:
            raise self.failure
        found = ((wanted, self.sizes.get(target, wanted)) for target, wanted in questions)
        return [None if size is None else min(size, wanted) for wanted, size in found]

    def run(self, *rounds: dict[IPAddress, int | None], now: float = 0.0) -> list[int]:
        for self.sizes in rounds:
            self.follower.step(now)
        return self.lowered


@pytest.mark.parametrize(
    ("rounds", "lowered"),
    [
        ([{}, {}, {}], []),
        ([{TWO: None}, {TWO: None}], []),
        ([{TWO: 1400}], []),
        ([{TWO: 1400}, {}, {TWO: 1400}], []),
        ([{TWO: 1400}, {TWO: None}, {TWO: 1400}], []),
        ([{TWO: 1400}, {TWO: 1300}, {TWO: 1400}], []),
        ([{TWO: 1400}, {TWO: 1400}], [1400]),
        ([{TWO: 1400, THREE: 1300}, {TWO: 1400, THREE: 1300}], [1300]),
        ([{TWO: 1400, THREE: 1300}, {TWO: 1400, THREE: 1000}], [1400]),
        ([{TWO: 1400}] * 4 + [{}] * 2, [1400]),
        ([{TWO: 1400}] * 2 + [{THREE: 1300}] * 2, [1400, 1300]),
    ],
)
def test_two_equal_measurements_of_one_path_lower_the_mtu_and_nothing_raises_it(
    rounds: list[dict[IPAddress, int | None]], lowered: list[int]
) -> None:
    assert Fixture().run(*rounds) == lowered


@pytest.mark.parametrize(("own", "lowest"), [(OWN, 576), (BOTH, 1280)])
def test_mtu_is_never_lowered_below_what_every_path_carries(own: Lease, lowest: int) -> None:
    rounds: list[dict[IPAddress, int | None]] = [{TWO: 300, THREE: 300}] * 5
    assert Fixture(own).run(*rounds) == [lowest]


@pytest.mark.parametrize(
    ("number", "sizes", "lowered"),
    [
        (2, {TWO: 600}, [1280]),
        (2, {TWO: 600, THREE: 1400}, [1280]),
        (2, {TWO: 600, THREE: 900}, [900]),
        (1, {TWO: 600}, [600]),
    ],
)
def test_one_of_several_peers_lowers_the_mtu_no_further_than_paths_of_the_internet_need(
    number: int, sizes: dict[IPAddress, int | None], lowered: list[int]
) -> None:
    assert Fixture(number=number).run(*[sizes] * 5) == lowered


def test_peer_is_the_only_one_once_the_others_have_long_been_silent() -> None:
    node = Fixture()
    silent: dict[IPAddress, int | None] = {TWO: 600, THREE: None}
    assert node.run({TWO: 600}, {TWO: 600}) == [1280]
    assert node.run(silent, silent, now=599.0) == [1280]
    assert node.run({TWO: 600}, now=602.0) == [1280]
    assert node.run(silent, silent, now=1201.0) == [1280]
    assert node.run(silent, silent, now=1203.0) == [1280, 600]


def test_path_that_carries_less_than_every_path_must_leaves_the_others_their_turn() -> None:
    node = Fixture(BOTH)
    node.run({TWO: 300}, {TWO: 300}, {TWO: 300}, {TWO: 300})
    node.asked.clear()
    node.run({TWO: 300})
    assert set(node.asked) == {TWO, THREE}


def test_path_that_seems_to_carry_less_is_measured_again_soon(daemon_clock: Clock) -> None:
    node = Fixture()
    usual = node.follower.step(0.0) - daemon_clock.time
    node.sizes = {TWO: 1400}
    soon = node.follower.step(0.0) - daemon_clock.time
    assert 0 < soon < usual
    assert node.follower.step(0.0) - daemon_clock.time == usual
    assert node.lowered == [1400]


def test_paths_that_cannot_be_measured_are_told_of_once(
    daemon_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Fixture()
    usual = node.follower.step(0.0)
    node.failure = OSError(errno.EPERM, "Operation not permitted")
    assert [node.follower.step(0.0) for _ in range(2)] == [usual, usual]
    assert usual > daemon_clock.time
    assert caplog.messages == ["Cannot measure paths to peers: Operation not permitted"]


def test_path_that_carries_the_mtu_at_a_glance_is_not_measured() -> None:
    """A peer that limits ICMP answers two packets, and only some of many."""
    node = Fixture()
    node.run({TWO: 1400})
    node.follower._glance = lambda questions: [wanted for _, wanted in questions]
    assert node.run({TWO: 1400}) == []


def test_size_that_only_a_burst_lost_is_no_result() -> None:
    """A queue on the way loses the same packets of each burst, and carries each of them alone."""
    node = Fixture()
    node.sizes = {TWO: 1400}
    node.follower._measure = lambda questions: [1369 for _ in questions]
    node.follower.step(0.0)
    node.follower.step(0.0)
    assert node.lowered == []


def test_measurement_during_which_the_uplink_moved_lowers_nothing() -> None:
    node = Fixture()
    node.run({TWO: 1400})

    def measure(questions: Sequence[tuple[IPAddress, int]]) -> list[int | None]:
        node.uplinks.mtu = 8950
        return node.measure(questions)

    node.follower._measure = measure
    assert node.run({TWO: 1400}) == []


def test_of_several_paths_the_narrowest_with_two_equal_sizes_counts() -> None:
    one, other = ip_address("10.5.2.0"), ip_address("fd00:2::")
    assert agreed({one: 1300, other: 1400}, {one: 1290, other: 1400}, alone=False) == (other, 1400)
    assert agreed({one: 1300, other: 1400}, {one: 1300, other: 1400}, alone=False) == (one, 1300)
    assert agreed({one: 1300}, {}, alone=False) is None


class TwoDevices:
    """A backend whose devices differ."""

    mtu = 1430

    def local(self, own: Lease, /) -> Iterator[Resource]:
        yield Address("flannel.1", cast("IPv4Network", own.subnet).network_address)
        yield WireGuard("narrow", 1430)
        yield WireGuard("wide", 1450)


def test_a_lower_mtu_bounds_every_device_until_the_backend_has_another_mtu() -> None:
    backend = TwoDevices()
    kernel = cast("HostKernel", object())  # the backend asks nothing of the host
    uplinks = UplinkManager(
        kernel, CONFIG, InterfaceChoice(), lambda *_: cast("Backend", backend), UPLINK, None
    )

    def mtus() -> list[int]:
        return [each.mtu for each in uplinks.local(OWN) if isinstance(each, WireGuard)]

    assert (uplinks.mtu, uplinks.bytes_lowered, mtus()) == (1430, 0, [1430, 1450])
    uplinks.lowered = (1430, 1400)
    assert (uplinks.mtu, uplinks.bytes_lowered, mtus()) == (1400, 30, [1400, 1400])
    backend.mtu = 8950
    assert (uplinks.mtu, uplinks.bytes_lowered) == (8950, 0)
