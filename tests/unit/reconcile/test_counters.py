"""The counters behind /metrics and flannelctl."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import cast

import pytest

from flanneld.errors import Retryable
from flanneld.reconcile.counters import BOUNDS, FOUND, TOLD, Histogram, StoreCounters, Work, counted, wall
from flanneld.state.resources import Route
from flanneld.state.table import Failure
from flanneld.subnet.store import Store
from tests.clock import Clock

ROUTE = Route(IPv4Network("10.5.1.0/24"), "eth0", IPv4Address("192.0.2.1"))
OTHER = Route(IPv4Network("10.5.2.0/24"), "eth0", IPv4Address("192.0.2.2"))


@pytest.mark.parametrize(
    ("seconds", "place"), [(0, 0), (BOUNDS[0], 0), (BOUNDS[0] * 1.01, 1), (1e9, len(BOUNDS))]
)
def test_a_bound_belongs_to_its_own_bucket(seconds: float, place: int) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.counts.index(1) == place
    assert histogram.total == seconds


def test_each_bound_has_a_bucket_and_one_is_for_all_above() -> None:
    histogram = Histogram()
    for bound in BOUNDS:
        histogram.observe(bound)
    assert histogram.counts == [*[1] * len(BOUNDS), 0]


def test_a_block_is_measured(daemon_clock: Clock) -> None:
    histogram = Histogram()
    for seconds in (0.25, 1.5):
        with histogram:
            daemon_clock.time += seconds
    assert (sum(histogram.counts), histogram.total) == (2, 1.75)


def test_time_on_the_clock_of_the_boot_is_told_on_that_of_the_wall(
    daemon_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_clock, "wall", lambda: 1_700_000_000.0)
    assert wall(daemon_clock.time - 7.0) == 1_700_000_000.0 - 7.0


def test_times_of_the_last_event_and_relist_are_told(daemon_clock: Clock) -> None:
    work, store = Work(), StoreCounters()
    assert (work.last_sync, store.last_event) == (0.0, 0.0)
    work.synced()
    store.told(1, snapshots=1)
    assert (work.last_sync, store.last_event) == (daemon_clock.time, daemon_clock.time)


def test_request_is_measured_whether_it_fails_or_not(daemon_clock: Clock) -> None:
    class Slow:
        def endpoints(self) -> dict[str, str]:
            daemon_clock.time += 0.5
            return {"n1": "here"}

        def publish_endpoints(self, _name: str, _text: str) -> None:
            daemon_clock.time += 2.0
            raise Retryable("no answer")

    store = counted(cast("Store", Slow()))
    assert store.endpoints() == {"n1": "here"}
    with pytest.raises(Retryable, match="no answer"):
        store.publish_endpoints("n1", "here")
    assert (sum(store.counters.requests.counts), store.counters.requests.total) == (2, 2.5)
    assert [str(each) for each in store.counters.problems.values()] == ["no answer"]


def test_refusals_are_counted_by_kind_and_reason() -> None:
    work = Work()
    work.refused([Failure(ROUTE, "no"), Failure(OTHER, "no")])
    work.refused([Failure(OTHER, "no")])
    assert work.refusals == {("route", "no"): 3}


def test_cost_of_events_is_measured(daemon_clock: Clock) -> None:
    work = Work()
    work.applied(daemon_clock.time - 0.5)
    assert (sum(work.event_to_kernel.counts), work.event_to_kernel.total) == (1, 0.5)


def test_a_repair_is_counted_by_what_led_to_it() -> None:
    work = Work()
    work.healed([ROUTE, OTHER], was_told=True)
    work.healed([ROUTE], was_told=False)
    assert work.heals == {("route", TOLD): 2, ("route", FOUND): 1}


def test_the_first_list_of_leases_is_no_resync() -> None:
    store = StoreCounters()
    store.told(1, snapshots=1)
    store.told(2, snapshots=0)
    assert store.resyncs == {"store": 0, "asked": 0}
    store.told(1, snapshots=1)
    store.was_asked = True
    store.told(1, snapshots=1)
    assert store.resyncs == {"store": 1, "asked": 1}
    assert store.events == 5
