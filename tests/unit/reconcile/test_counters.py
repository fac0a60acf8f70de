"""The counters behind /metrics and flannelctl."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.reconcile.counters import BOUNDS, FOUND, TOLD, Histogram, StoreCounters, Work
from flanneld.runtime import clock
from flanneld.state.resources import Route
from flanneld.state.table import Failure

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


def test_refusals_are_counted_by_kind_and_reason() -> None:
    work = Work()
    work.refused([Failure(ROUTE, "no"), Failure(OTHER, "no")])
    work.refused([Failure(OTHER, "no")])
    assert work.refusals == {("route", "no"): 3}


def test_cost_of_events_is_measured() -> None:
    work = Work()
    work.applied(clock.now())
    assert sum(work.event_to_kernel.counts) == 1


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
