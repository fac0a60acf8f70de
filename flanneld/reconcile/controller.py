"""Controller of this node: derives the desired state from leases and host facts, and reconciles it.

A change of one lease affects only the objects of this lease. The tables are relisted at the start, after a
change by another program, after a refusal, and periodically. Nothing is removed before the first snapshot of
the leases: until then objects of an earlier run may carry all traffic of the containers.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable

from flanneld.errors import Fatal, Retryable, cause_of
from flanneld.model import Cached, Event
from flanneld.network.rtnetlink.domain import Domain
from flanneld.reconcile import host_watch
from flanneld.reconcile.host_watch import (
    LOOK_SPACING,
    EncryptionWatch,
    HostWatch,
    KernelNews,
    demand_free_names,
    demand_free_networks,
    warn_of_networks_around,
)
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.sweep import LeftBehind, Sweep, tell_of_removals
from flanneld.reconcile.upkeep import demand_all
from flanneld.reconcile.worker import NodeTables, Worker
from flanneld.runtime import clock
from flanneld.runtime.process import trim_memory
from flanneld.runtime.supervisor import EventQueue, MakeLoop
from flanneld.state.permits import Permits, RemovalGuard
from flanneld.state.resources import ROUTES, Resource, Route
from flanneld.state.table import Report, Table
from flanneld.subnet.subnet_file import NetworkAndSubnet, paired

log = logging.getLogger(__name__)

#: Name of the controller's thread.
NAME = "reconciler"
#: Objects made in one pass from which on memory is returned to the kernel: some MiB are in question.
_BULK = 3000


class Controller:
    """Controller that keeps this node in the desired state. ``event_queue`` holds the store's events.

    ``recording`` wraps each table: a dry run only records the writes.
    """

    def __init__(
        self,
        node: LocalNode,
        removal_guard: RemovalGuard,
        *,
        stop: threading.Event,
        make_loop: MakeLoop,
        on_move: Callable[[], None],
        on_synced: Callable[[], None],
        on_leases: Callable[[], None] = lambda: None,
        on_mtu: Callable[[], None] = lambda: None,
        reread: Callable[[], None],
        recording: Callable[[Table], Table] = lambda table: table,
        event_queue: EventQueue[list[Event]] | None = None,
    ) -> None:
        self.event_queue = event_queue or EventQueue()
        self.removal_guard = removal_guard
        self.uplink_manager = node.uplink_manager
        self.peers = Peers(node.lease, node.ranges, removal_guard, node.beside)
        self._node = node
        node.kernel.domain = _first_domain(node)
        self._on_synced = on_synced
        self._on_leases = on_leases
        self._was_bulk = False
        #: True after a failed attempt to get the devices of the backend.
        self._has_failed = False
        self._reread = reread
        permits = Permits(
            self.peers.known,
            removal_guard,
            is_complete=lambda: self.tables.is_complete(),
            harms=self._harms,
            routes=lambda: len(self.peers.desired.table(ROUTES)),
        )
        self.tables = NodeTables(
            self.peers, permits, stop=stop, make_loop=make_loop, after=self._passed, recording=recording
        )
        self._left_behind = LeftBehind(
            node.kernel,
            node.last_run,
            nets=paired(self.uplink_manager.networks, node.lease.key),
        )
        self._sweep = Sweep(self.peers, self.tables, permits, self._left_behind, removal_guard)
        self._host = HostWatch(
            node, self.peers, self.tables, on_move=on_move, on_mtu=on_mtu, on_leases=on_leases
        )
        self._news = KernelNews(node, self.peers, self.tables, self._host, self._left_behind)
        self._loop = make_loop(NAME, self.step, self._sources)

    @property
    def workers(self) -> Iterable[Worker]:
        """Return the workers whose threads run beside ``run``."""
        return self.tables.workers

    @property
    def networks(self) -> tuple[NetworkAndSubnet, ...] | None:
        """Return the networks that the kernel may have objects of; None before the sweep. From any thread."""
        return self._left_behind.networks

    @property
    def domain(self) -> Domain:
        """Return the part of the kernel that belongs to this daemon."""
        return self._node.kernel.domain

    @property
    def encryption(self) -> EncryptionWatch:
        """Return the watch of other programs' routes and policies that bypass the encryption."""
        return self._host.encryption

    # ---- before the first peer ---------------------------------------------------------------

    def prepare(self) -> None:
        """Create the objects that this node needs without peers. Raises ``Fatal`` if the kernel refuses.

        With a backend that encrypts nothing leaves unencrypted then: the guards are made before its devices.
        """
        now = clock.now()
        backend = self.uplink_manager.backend
        self._host.set_local()
        if not self.tables.states():
            self.tables.make(self._node.kernel_tables(self._left_behind.stale_links), backend)
        if not backend.encrypts:
            self._prepare(now)
            return
        self._has_failed = False
        self._shut(now)
        try:
            self._prepare(now)
        except (Fatal, Retryable, OSError):
            # A former backend that should serve until all peers are known might serve for good.
            self._has_failed = True
            self._shut(now)
            raise

    def _shut(self, now: float) -> None:
        report = self.tables.shut(now)
        for resource in report.made:
            log.info("Made %s", resource)
        tell_of_removals(report.removed)

    def _prepare(self, now: float) -> None:
        backend = self.uplink_manager.backend
        try:
            links = self._host.links()
            demand_free_names(self._node.kernel, links)
            self._host.look_at_networks(now)
            demand_free_networks(self.peers.local_resources(), self.peers.claims.host)
            self._left_behind.announce_devices(links)
        except OSError as failure:
            raise Retryable(f"cannot read the kernel's tables: {cause_of(failure)}") from failure
        # Routes of an earlier run may bypass the encryption, so they go before any peer is known.
        self.tables.reconciler.adopt = backend.encrypts
        report = self.tables.converge(now)
        self._host.watch_encryption(now)
        for worker in self.workers:
            worker.prepare(now)
        demand_all(self.tables.states())
        for resource in report.made:
            log.info("Made %s", resource)
        warn_of_networks_around(self.peers.claims.host, self.domain)
        self._host.postpone(now)

    def _harms(self, resource: Resource) -> bool:
        """Return True for a route by which packets leave unencrypted, or that covers the store's address."""
        backend, own = self.uplink_manager.backend, self._node.lease
        obstacle = isinstance(resource, Route) and self.peers.claims.obstacle_in(resource.destination)
        if obstacle and obstacle.what == "store":
            return True
        synced = self.peers.synced or self._has_failed
        return host_watch.leaks(resource, backend, own, self.domain.links, synced=synced)

    def lower_mtu(self, mtu: int) -> None:
        """Lower the network's MTU for the rest of this run. From any thread."""
        self.uplink_manager.lowered = self.uplink_manager.backend.mtu, mtu
        self._host.mtu_is_lower = True
        self._loop.cancel()

    # ---- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Step until the daemon stops."""
        self._loop.run()

    def cancel(self) -> None:
        """End the wait between two steps. From any thread."""
        self._loop.cancel()

    def close(self, *, except_for: Collection[str] = ()) -> None:
        """Close the tables, except those of threads that still run."""
        if NAME not in except_for:
            self.peers.log_changes(math.inf)
        self.tables.close(except_for=except_for, own=NAME)

    def step(self, now: float) -> float:
        """Do the due work. Return the time of the next step."""
        news = [event for events in self.event_queue.drain() for event in events]
        self._take_events(news, now)
        if news and self.peers.synced:
            self._on_leases()
        self.peers.log_changes(now)
        self._news.take(now)
        self._host.use_mtu(now)
        if now >= self._host.next_look:
            self._host.look(now)
        if now >= self._sweep.due:
            self._run_sweep(now)
        wakeup = self.tables.reconciler.step(now)
        self.event_queue.settle()
        if self.removal_guard.is_due():
            self._reread()
        if self._node.monitor.missed:
            return now
        return min(
            wakeup,
            self._host.next_look,
            self._sweep.due,
            self.removal_guard.next_reading,
            self.peers.log_due,
        )

    def _sources(self) -> list[int]:
        kernel = self.tables.reconciler.sources()
        return [self.event_queue.fileno(), self._node.monitor.fileno(), *kernel]

    # ---- events of leases --------------------------------------------------------------------

    def _take_events(self, events: list[Event], now: float) -> None:
        was_synced = self.peers.synced
        delta = self.peers.take(events, self.uplink_manager.backend)
        if not was_synced:
            if self.peers.synced:
                self._host.set_local()
                self._run_sweep(now)
            elif any(isinstance(event, Cached) for event in events):
                self._use_cache(now)
            return
        if delta:
            self.tables.change(delta, now)
            self.tables.work.applied(self.event_queue.since)
        if events and self._sweep.is_unfinished():
            self._sweep.due = min(self._sweep.due, now + LOOK_SPACING)

    def _use_cache(self, now: float) -> None:
        """Create the objects for cached peers. Nothing is removed or replaced."""
        report = self.tables.converge(now)
        log.warning(
            "Using %s: %d peers, made %d objects; removing and replacing nothing until the store answers",
            self.peers.cached,
            len(self.peers),
            len(report.made),
        )
        self._on_synced()

    def _run_sweep(self, now: float) -> None:
        """Sweep the stale objects of an earlier run, since all peers are known now."""
        try:
            if self._sweep.run(now):
                self._on_synced()
        except OSError as failure:
            self._host.could_not_read(failure, now)

    def _passed(self, report: Report) -> None:
        """Record for the next run that the tables have converged. Free memory after a bulk's audit."""
        self._host.tell_of_bypasses()
        if report.made:
            self._was_bulk = len(report.made) > _BULK
        elif self._was_bulk:
            self._was_bulk = False
            trim_memory()
        try:
            self._news.passed(report)
        except OSError as failure:
            self._host.could_not_read(failure, clock.now())


def _first_domain(node: LocalNode) -> Domain:
    """Return our part of the kernel before any device is desired."""
    return Domain(
        node.uplink_manager.uplink.name,
        frozenset(),
        node.ranges,
        tuple(dict.fromkeys(network for network, _ in node.last_run.former)),
        unmarked=node.last_run.adopts,
        adopted=node.last_run.adopted,
        by_name=not node.uplink_manager.backend.makes_routes,
    )
