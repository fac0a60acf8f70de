"""Handles to the components of a running daemon, for status and metrics.

They are read from other threads without locks. So every value read here is a counter, is replaced as a whole,
or is copied at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flanneld.config import Config
from flanneld.diagnostics.host_upkeep import HostUpkeep
from flanneld.errors import NoAnswer, Retryable
from flanneld.options import Options
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counted_manager import CountedManager
from flanneld.reconcile.counters import StoreCounters
from flanneld.reconcile.member import Loops
from flanneld.reconcile.reconciler import Reconciler
from flanneld.runtime import clock
from flanneld.runtime.logs import Events
from flanneld.subnet.lease_keeper import LeaseKeeper

if TYPE_CHECKING:
    from flanneld.diagnostics.probes import Prober
    from flanneld.reconcile.firewall import Firewall  # both are only imported if the options need them


class Components:
    """Components of the daemon, including those that are created later.

    ``overdue`` returns a line for each task without a heartbeat, ``missing`` the missing conditions of
    readiness, ``waiting`` the reason why startup waits. ``more_metrics`` returns the counters of a lease
    server in this process, as Prometheus' text. All may be called from any thread.
    """

    def __init__(
        self,
        options: Options,
        manager: CountedManager,
        events: Events,
        overdue: Callable[[], list[str]],
        missing: Callable[[], list[str]],
        waiting: Callable[[], list[str]] = list,
        more_metrics: Callable[[], str] | None = None,
    ) -> None:
        self.options = options
        self.manager = manager
        self.events = events
        self.overdue = overdue
        self.missing = missing
        self.waiting = waiting
        self.more_metrics = more_metrics
        self.started = clock.wall()
        #: None until created. Set by one thread, read from any.
        self.config: Config | None = None
        self.loops: Loops | None = None
        self.host: HostUpkeep | None = None
        self.prober: Prober | None = None

    def join(self, config: Config, loops: Loops) -> None:
        """Add the components that exist once this node has a lease."""
        self.config, self.loops = config, loops

    @property
    def lease_keeper(self) -> LeaseKeeper | None:
        return self.loops.lease_keeper if self.loops else None

    @property
    def reconciler(self) -> Controller | None:
        return self.loops.reconciler if self.loops else None

    @property
    def firewall(self) -> Firewall | None:
        return self.loops.firewall if self.loops else None

    def reconcilers(self) -> Iterator[Reconciler]:
        """Yield the reconcilers of all tables: of the kernel, backends, firewall and host."""
        if self.reconciler:
            yield from self.reconciler.tables.reconcilers
        if self.firewall:
            yield self.firewall.reconciler
        if self.host:
            yield self.host.reconciler

    def heals(self) -> Counter[tuple[str, str]]:
        """Count repairs by kind of object and cause, in all tables."""
        return sum((Counter(each.work.heals) for each in self.reconcilers()), Counter())

    @property
    def store(self) -> StoreCounters:
        """Counters of requests to the store and of its events."""
        return self.manager.counters

    @property
    def store_problem(self) -> Retryable | None:
        """The current failure of the store, of a watch or of a request; None without one."""
        return self.manager.problem or next(iter(self.store.problems.values()), None)

    @property
    def store_is_up(self) -> bool:
        """True if the store answers, also with a refusal. False before the first request."""
        return any(self.store.requests.counts) and not isinstance(self.store_problem, NoAnswer)

    @property
    def cached(self) -> str:
        """Source of the leases while they do not come from the store; else empty."""
        return self.reconciler.peers.cached if self.reconciler else ""
