"""The counters behind /metrics and flannelctl."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.reconcile.counters import BOUNDS, FOUND, TOLD, Histogram, StoreCounters, Work
from flanneld.runtime import clock
from flanneld.state.report import Failure, Report
from flanneld.state.resources import Route

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


def test_a_block_is_measured() -> None:
    histogram = Histogram()
    with histogram:
        pass
    assert sum(histogram.counts) == 1


def test_a_reading_of_the_kernel_says_all_that_is_refused() -> None:
    work = Work()
    work.converged(Report(failed=[Failure(ROUTE, "no"), Failure(OTHER, "no")]))
    assert list(work.pending) == [ROUTE.key, OTHER.key]
    work.converged(Report(made=[ROUTE], failed=[Failure(OTHER, "no")]))
    assert list(work.pending) == [OTHER.key]
    assert work.refusals == {("route", "no"): 3}
    assert work.last_sync > 0


def test_news_adds_to_what_is_refused() -> None:
    work = Work()
    work.converged(Report(failed=[Failure(ROUTE, "no")]))
    work.applied(Report(failed=[Failure(OTHER, "no")]), clock.now())
    assert list(work.pending) == [ROUTE.key, OTHER.key]
    assert sum(work.event_to_kernel.counts) == 1


def test_a_repair_is_counted_by_what_led_to_it() -> None:
    work = Work()
    work.was_told = True
    work.healed(Report(made=[ROUTE], removed=[OTHER]))
    work.healed(Report(made=[ROUTE]))
    assert work.heals == {("route", TOLD): 2, ("route", FOUND): 1}


def test_the_first_list_of_leases_is_no_resync() -> None:
    store = StoreCounters()
    store.told(1, snapshots=1)
    store.told(2, snapshots=0)
    assert store.resyncs == {}
    store.told(1, snapshots=1)
    store.was_asked = True
    store.told(1, snapshots=1)
    assert store.resyncs == {"store": 1, "asked": 1}
    assert store.events == 5
