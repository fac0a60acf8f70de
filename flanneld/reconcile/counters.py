"""Counters of the daemon's work, each written by one thread and read by any, and the store that counts.

They are always kept, so an update must cost next to nothing. The reader derives rates and sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import TypeVar

from flanneld.config import Config
from flanneld.errors import NoAnswer, Retryable, remembered
from flanneld.model import Event, IPAddress, Lease, LeaseAttrs, LeaseKey, Snapshot
from flanneld.runtime import clock
from flanneld.state.resources import Resource
from flanneld.state.table import Failure
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts, NodeStore, Store

Name = TypeVar("Name")

#: Upper bounds in seconds, from a single route to a whole cluster.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: Cause of a repair: a notification of the kernel, or the periodic relist.
TOLD, FOUND = "notification", "audit"


class Histogram:
    """Histogram of durations in seconds. As a context manager it measures its block, for one thread."""

    __slots__ = ("_began", "counts", "total")

    def __init__(self) -> None:
        #: One more than there are bounds: the last counts longer durations than all of them.
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0
        self._began = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def __enter__(self) -> None:
        self._began = clock.now()

    def __exit__(self, *_: object) -> None:
        self.observe(clock.now() - self._began)


class Work:
    """Counters of the reconciler. Times are seconds since the epoch, 0 for never."""

    def __init__(self) -> None:
        #: Time from the arrival of a store's event until the write to the kernel is done.
        self.event_to_kernel = Histogram()
        #: One write to the kernel.
        self.apply = Histogram()
        #: One relist of the kernel with its repairs.
        self.reconcile = Histogram()
        #: By kind of object and cause.
        self.heals: dict[tuple[str, str], int] = {}
        #: By kind of object and the kernel's reason.
        self.refusals: dict[tuple[str, str], int] = {}
        self.overruns = 0
        self.last_sync = 0.0

    def synced(self) -> None:
        """Record that tables were relisted and repaired, except for pending objects."""
        self.last_sync = clock.wall()

    def applied(self, since: float) -> None:
        """Record that events of leases were applied; ``since`` is their arrival on ``clock.now``."""
        self.event_to_kernel.observe(clock.now() - since)

    def healed(self, resources: Iterable[Resource], *, was_told: bool) -> None:
        """Count repairs of objects that another program had changed."""
        for resource in resources:
            _count(self.heals, (kind_of(resource), TOLD if was_told else FOUND))

    def refused(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            _count(self.refusals, (kind_of(failure.resource), failure.reason))


class StoreCounters:
    """Counters of the store: requests, failures, events and renewals."""

    def __init__(self) -> None:
        self.requests = Histogram()
        self.errors = 0
        #: Latest failure by request. Replaced, never changed in place.
        self.problems: dict[str, Retryable] = {}
        self.events = 0
        #: Relists by reason: ``asked`` if the daemon asked for one, else ``store``.
        self.resyncs: dict[str, int] = {"asked": 0, "store": 0}
        self.is_synced = False
        self.was_asked = False
        #: Seconds since the epoch, 0 for never.
        self.last_event = 0.0
        #: By result.
        self.renewals: dict[str, int] = {"ok": 0, "error": 0}

    def answered(self, request: str) -> None:
        """Count a successful request."""
        if request in self.problems:
            self.problems = {name: why for name, why in self.problems.items() if name != request}

    def failed(self, request: str, reason: Retryable) -> None:
        """Count a request that was refused or not answered."""
        self.errors += 1
        self.problems = {**self.problems, request: remembered(reason)}

    def told(self, number: int, snapshots: int) -> None:
        """Count events and relists; the first list is no relist."""
        self.events += number
        self.last_event = clock.wall()
        for _ in range(snapshots if self.is_synced else snapshots - 1):
            _count(self.resyncs, "asked" if self.was_asked else "store")
            self.was_asked = False
        self.is_synced |= snapshots > 0
        # A failed renewal is retried only after a minute; an event proves sooner that the store answers.
        if self.problems:
            self.problems = {
                name: why for name, why in self.problems.items() if not isinstance(why, NoAnswer)
            }

    def renewed(self, result: str) -> None:
        _count(self.renewals, result)


def kind_of(resource: Resource) -> str:
    """Return the kind of a resource as iproute2 names it: ``route``, ``fdb``."""
    return resource.kind.name.lower()


def wall(boot: float) -> float:
    """Convert a time on the boot-time clock to seconds since the epoch."""
    return clock.wall() + boot - clock.now()


def _count(table: dict[Name, int], name: Name) -> None:
    table[name] = table.get(name, 0) + 1


Result = TypeVar("Result")


class CountedStore:
    """``Store`` that forwards every call. ``counters`` may be read from any thread."""

    def __init__(self, store: Store) -> None:
        self.counters = StoreCounters()
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def problem(self) -> Retryable | None:
        return self._store.problem

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._store.addresses

    def network_config(self) -> Config:
        return self._count("network_config", self._store.network_config)

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        return self._count("stored", partial(self._store.stored, public_ip))

    def read_leases(self) -> Iterable[Lease]:
        return self._count("read_leases", self._store.read_leases)

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        return self._count("acquire", partial(self._store.acquire, config, attrs, previous, local))

    def renew(self, lease: Lease) -> Lease:
        result = "error"
        try:
            renewed = self._count("renew", partial(self._store.renew, lease))
            result = "ok"
        finally:
            self.counters.renewed(result)
        return renewed

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        def pass_on(events: list[Event]) -> None:
            self.counters.told(len(events), sum(isinstance(event, Snapshot) for event in events))
            deliver(events)

        self._store.watch(pass_on, alive)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        self._store.watch_own(lease, deliver, alive)

    def reread(self) -> None:
        self.counters.was_asked = True
        self._store.reread()

    def reconnect(self) -> None:
        self._store.reconnect()

    def close(self) -> None:
        self._store.close()

    def publish_endpoints(self, name: str, text: str) -> None:
        self._count("publish_endpoints", partial(self._store.publish_endpoints, name, text))

    def endpoints(self) -> Mapping[str, str]:
        return self._count("endpoints", self._store.endpoints)

    def _count(self, name: str, ask: Callable[[], Result]) -> Result:
        began = clock.now()
        try:
            answer = ask()
            self.counters.answered(name)
        except Retryable as reason:
            self.counters.failed(name, reason)
            raise
        finally:
            self.counters.requests.observe(clock.now() - began)
        return answer


class CountedNodeStore(CountedStore):
    """``CountedStore`` for a store that is also a ``NodeStore``. Both arguments are the same object."""

    def __init__(self, store: Store, node_store: NodeStore) -> None:
        super().__init__(store)
        self._node_store = node_store

    def public_ips(self) -> tuple[IPv4Address | None, IPv6Address | None]:
        return self._count("public_ips", self._node_store.public_ips)

    def watch_node(self, alive: Callable[[], None]) -> None:
        self._node_store.watch_node(alive)

    def mark_available(self) -> None:
        self._node_store.mark_available()

    def report(self, reason: str) -> None:
        self._node_store.report(reason)


def counted(store: Store) -> CountedStore:
    """Return a wrapper with the interfaces of ``store``."""
    return CountedNodeStore(store, store) if isinstance(store, NodeStore) else CountedStore(store)
