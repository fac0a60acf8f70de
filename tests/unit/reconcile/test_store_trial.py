"""A start that does not reach the store: it is tried without the routes of an earlier run that lead there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, ip_address
from pathlib import Path
from typing import cast

import pytest

from flanneld.errors import NoAnswer, Retryable
from flanneld.model import IPAddress
from flanneld.reconcile import store_watch
from flanneld.reconcile.last_run import LastRun, StoreAddress
from flanneld.reconcile.store_watch import StoreTrial
from flanneld.runtime import clock, waits
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Route, Vxlan
from flanneld.subnet.store import Store
from flanneld.subnet.subnet_file import Previous
from tests.clock import Clock
from tests.unit.reconcile.test_store_watch import FakeStore
from tests.unit.simulation.kernel import Kernel

PREVIOUS = Previous((IPv4Network("10.5.0.0/16"),), (IPv4Network("10.5.1.0/24"), None))
STORE = ip_address("10.5.77.9")
PEER = IPv4Address("192.0.2.7")
ROUTE, OTHER = (Route(IPv4Network(f"10.5.{number}.0/24"), "eth0", PEER) for number in (77, 78))
LOST = NoAnswer("etcd does not answer")
#: Seconds since the epoch at the start.
NOW = 1_000_000 * 3600.0


class Host(Kernel):
    """A host with routes of an earlier run, and a store that answers as ``answers`` says."""

    def __init__(self, time: Clock, subnet_file: Path) -> None:
        super().__init__("eth0", (ip_address("192.0.2.1"), 24))
        for route in (ROUTE, OTHER):
            self.add_route(route, PROTO_FLANNEL)
        self.time = time
        self.store = FakeStore()
        self.store.addresses = frozenset({STORE})
        self.subnet_file = subnet_file
        self.last_run = LastRun(subnet_file)
        #: The routes there at each attempt.
        self.attempts: list[list[Route]] = []
        self.outcome: Exception | None = None
        #: Attempts until the outcome, before which nothing answers.
        self.silent = 0

    def write(self, routes: Iterable[Route], *, drop: bool = False) -> None:
        for route in routes:
            if drop:
                self.delete_route(route)
            else:
                self.add_route(route, PROTO_FLANNEL)

    def peers(self) -> list[Route]:
        return [route for route in (ROUTE, OTHER) if self.at(route.destination)]

    def attempt(self) -> str:
        self.attempts.append(self.peers())
        if len(self.attempts) <= self.silent:
            raise NoAnswer(f"no answer to request {len(self.attempts)}")
        if self.outcome:
            raise self.outcome
        return "the leases"

    def ask(self) -> str:
        store = cast("Store", self.store)
        return StoreTrial(store, PREVIOUS, self.last_run).ask(self.attempt, LOST)

    def recorded(self) -> tuple[StoreAddress, ...]:
        return LastRun(self.subnet_file).store_addresses


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    time = Clock()
    time.time = NOW

    def pause(_stop: threading.Event, seconds: float) -> bool:
        time.time += seconds
        return False

    with clock.replaced(time):
        host = Host(time, tmp_path / "subnet.env")
        monkeypatch.setattr(waits, "pause", pause)
        monkeypatch.setattr(store_watch, "Kernel", lambda: host)
        yield host


@pytest.mark.parametrize("silent", [0, 20])
def test_store_that_answers_without_the_route_is_outside_the_network(
    host: Host, silent: int, caplog: pytest.LogCaptureFixture
) -> None:
    host.silent = silent
    assert host.ask() == "the leases"
    assert host.attempts == [[OTHER]] * (silent + 1)
    assert host.peers() == [OTHER]
    assert host.recorded() == (StoreAddress(STORE, 1_000_000, is_outside=True),)
    assert host.last_run.store_addresses == host.recorded()
    trial, result = caplog.messages
    assert trial.startswith(
        "Store unreachable: its address 10.5.77.9 lies in the followed subnet 10.5.77.0/24; "
    )
    assert result == "Store answers without that route: its address 10.5.77.9 is outside the network"


def test_route_is_restored_if_the_store_does_not_answer_within_the_trial(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.silent = 1000
    with pytest.raises(NoAnswer, match=r"^no answer to request 2[67]"):
        host.ask()
    assert host.attempts[-1] == [OTHER]
    assert host.peers() == [ROUTE, OTHER]
    assert host.recorded() == ()
    assert caplog.messages[1:] == [
        "Store unreachable without that route, too, at its address 10.5.77.9; restoring the route"
    ]


def test_refusal_is_an_answer(host: Host) -> None:
    host.outcome = Retryable("etcd refuses the password")
    with pytest.raises(Retryable, match="refuses the password"):
        host.ask()
    assert len(host.attempts) == 1
    assert host.peers() == [OTHER]
    assert [each.address for each in host.recorded()] == [STORE]


@pytest.mark.parametrize(("seconds", "tries"), [(599.0, False), (600.0, True)])
def test_next_trial_comes_after_ten_minutes_of_all_runs(host: Host, seconds: float, tries: bool) -> None:
    host.silent = 1000
    with pytest.raises(NoAnswer, match="no answer to request"):
        host.ask()
    host.attempts.clear()
    host.time.time = NOW + seconds
    host.last_run = LastRun(host.subnet_file)
    with pytest.raises(NoAnswer, match="no answer to request" if tries else str(LOST)):
        host.ask()
    assert bool(host.attempts) is tries


@pytest.mark.parametrize(
    ("address", "remembered", "is_tried"),
    [
        pytest.param("10.5.77.9", (), True, id="inside"),
        pytest.param("10.5.1.255", (), False, id="where no route leads"),
        pytest.param("192.0.2.9", (), False, id="outside"),
        pytest.param("192.0.2.9", ("10.5.77.9",), True, id="inside as it was last known"),
    ],
)
def test_only_routes_around_an_address_of_the_store_are_tried_without(
    host: Host, address: str, remembered: tuple[str, ...], is_tried: bool
) -> None:
    host.store.addresses = frozenset({ip_address(address)})
    host.last_run.store_addresses = tuple(StoreAddress(ip_address(each), 7) for each in remembered)
    if is_tried:
        assert host.ask() == "the leases"
        return
    with pytest.raises(NoAnswer, match=str(LOST)):
        host.ask()
    assert host.attempts == []
    assert host.last_run.store_tried == 0


def test_route_of_another_program_stays(host: Host) -> None:
    host.delete_route(ROUTE)
    host.add_route(ROUTE, PROTO_BOOT)
    with pytest.raises(NoAnswer, match=str(LOST)):
        host.ask()
    assert host.attempts == []


def test_route_into_a_device_of_an_earlier_run_is_tried_without(host: Host) -> None:
    host.delete_route(ROUTE)
    host.add_link(Vxlan("flannel.1", 1, 2, IPv4Address("192.0.2.1"), 8472, "02:00:00:00:00:01", 1450))
    host.add_route(Route(ROUTE.destination, "flannel.1"), PROTO_BOOT)
    assert host.ask() == "the leases"
    assert host.peers() == [OTHER]


def test_of_two_addresses_that_were_tried_only_the_one_that_answers_is_outside(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: IPAddress = ip_address("10.5.78.9")
    host.store.addresses = frozenset({STORE, other, ip_address("192.0.2.9")})
    monkeypatch.setattr(store_watch, "connected", lambda: {other})
    assert host.ask() == "the leases"
    assert host.attempts == [[]]
    assert host.peers() == [ROUTE]
    assert [each.address for each in host.recorded()] == [other]
