"""Turns leases and facts of this host into the desired state, and has the reconciler keep it.

News of one lease changes only what belongs to this lease. The tables are read back at the start, when others
changed what is ours, after a refusal, and from time to time. Nothing is removed before the first snapshot of
the leases: until then what an earlier run left may be all that keeps the containers talking.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from flanneld.backends.contract import ExitPolicy, HasTables, encrypts, exit_policy
from flanneld.compat.glog import Once, V, counted
from flanneld.errors import Retryable, cause_of
from flanneld.model import Cached, Event
from flanneld.network.change_origin import ChangeOrigins
from flanneld.network.obstacles import Obstacles
from flanneld.network.rtnetlink import tables as kernel_tables
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.monitor import (
    Gone,
    InterfaceChanged,
    News,
    Overrun,
    Seen,
    Unheard,
)
from flanneld.network.uplink_facts import read_host_networks
from flanneld.reconcile.contest_backoff import ContestBackoff
from flanneld.reconcile.counters import Work
from flanneld.reconcile.host_news import may_be_obstacle
from flanneld.reconcile.node import Node
from flanneld.reconcile.past.left_behind import LeftBehind
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.permits import LeasePermits
from flanneld.reconcile.preconditions import (
    demand_all,
    spare_connected_networks,
    spare_links_of_others,
    warn_of_networks_around,
)
from flanneld.reconcile.reconciler import REST, SETTLE, Reconciler, TableState
from flanneld.reconcile.table_worker import Knowledge, TableWorker, Workers
from flanneld.runtime import clock
from flanneld.runtime.event_queue import EventQueue
from flanneld.runtime.step_loop import MakeLoop, StepLoop
from flanneld.state.diff import Delta
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Failure, Report
from flanneld.state.resources import (
    LINKS,
    Key,
    Kind,
    Link,
    Resource,
    Route,
    State,
    Vxlan,
)
from flanneld.state.table import Table

log = logging.getLogger(__name__)

#: Name of the controller's thread, and of the worker whose tables it keeps itself.
NAME, _WORKER = "reconciler", "kernel"
#: Seconds between two looks at the uplink and the host's networks without news.
_LOOK_PERIOD = 30.0
#: Seconds between two looks at them that news ask for, at least.
_LOOK_SPACING = 0.2
#: Seconds until a reading of the kernel that failed is tried again.
_RETRY = 1.0
#: The longest pause in seconds before a repair that others keep undoing, and the repairs within a minute from
#: which on it looks like that.
_LAST_PAUSE, _CONTEST = 1.0, 20
#: Lines about single objects that are worth reading at a time.
_FEW = 10


class Controller:
    """Keeps this node in the desired state. ``event_queue`` takes the events of one reading of the store.

    ``recording`` replaces each table: a start that changes nothing only takes notes of what it would write.
    """

    def __init__(
        self,
        node: Node,
        removal_guard: RemovalGuard,
        *,
        stop: threading.Event,
        heartbeat: Callable[[str, float], None],
        on_move: Callable[[], None],
        on_synced: Callable[[], None],
        reread: Callable[[], None],
        recording: Callable[[Table], Table] = lambda table: table,
        make_loop: MakeLoop = StepLoop,
    ) -> None:
        self.event_queue: EventQueue[list[Event]] = EventQueue()
        self.removal_guard = removal_guard
        self.uplink_manager = node.uplink_manager
        self.peers = Peers(node.lease, [network for network, _ in node.uplink_manager.ranges], removal_guard)
        self._node = node
        self._kernel = node.kernel
        self._kernel.domain = Domain(
            node.uplink_manager.uplink.name,
            frozenset(),
            node.ranges,
            node.former,
            unmarked=node.adopts,
            adopted=node.adopted,
        )
        self._stop = stop
        self._removed_at_exit: frozenset[str] = frozenset()
        self._on_move = on_move
        self._on_synced = on_synced
        self._reread = reread
        self._recording = recording
        self._permits = LeasePermits(self.peers, removal_guard, self._is_complete, self._leaks)
        self._heartbeat = heartbeat
        self._converged: set[str] = set()
        self._reconciler = self._over([])
        #: Other threads, for tables that would keep the kernel waiting.
        self._workers = Workers((), stop=stop, heartbeat=heartbeat, converged=self._converged)
        self._loop = make_loop(self.step, self._sources, stop=stop, heartbeat=partial(heartbeat, NAME))
        self._once = Once()
        self._origins = ChangeOrigins()
        #: The devices of ours and the uplink, by index, as last read.
        self._names: dict[int, str] = {}
        self._left_behind = LeftBehind(
            node.kernel, node.devices, node.record, adopts=bool(node.adopts or node.adopted)
        )
        self._is_in_sync = False
        #: When to look at the uplink and the host's networks, and not before when.
        self._next_look = clock.now()
        self._earliest_look = 0.0
        #: When to sweep again what an earlier run left, since the last time not all could be read.
        self._next_sweep = math.inf
        self._uplink_may_have_moved = False

    @property
    def workers(self) -> Iterable[TableWorker]:
        """Threads to run beside ``run``."""
        return self._workers

    @property
    def domain(self) -> Domain:
        return self._kernel.domain

    @property
    def work(self) -> Work:
        return self._reconciler.work

    @property
    def _reconcilers(self) -> list[Reconciler]:
        return [self._reconciler, *(worker.reconciler for worker in self._workers)]

    def states(self) -> list[TableState]:
        """What is known of each table. From any thread."""
        return [state for each in self._reconcilers for state in each.states()]

    def heals(self) -> Counter[tuple[str, str]]:
        """Repairs by kind of object and cause. From any thread."""
        return sum((Counter(each.work.heals) for each in self._reconcilers), Counter())

    def refusals(self) -> Counter[tuple[str, str]]:
        """Refusals by kind of object and reason. From any thread."""
        return sum((Counter(each.work.refusals) for each in self._reconcilers), Counter())

    def pending(self) -> dict[Key, Failure]:
        """What is wanted and refused now. From any thread."""
        return {failure.resource.key: failure for state in self.states() for failure in state.failed}

    def is_contested(self) -> bool:
        """Whether another program keeps changing what is ours. From any thread."""
        return any(state.contested for state in self.states())

    def _over(self, tables: Sequence[Table]) -> Reconciler:
        wanted: Mapping[str, State] = {table.name: self.peers.wanted.table(table.name) for table in tables}
        return Reconciler(
            [self._recording(table) for table in tables],
            wanted,
            self._stop.is_set,
            permits=self._permits,
            # Packets wait for a repair: the pauses stay short.
            contest=partial(ContestBackoff, last=_LAST_PAUSE, many=_CONTEST),
            after=self._passed,
            converged=self._converged,
        )

    def _make_tables(self) -> None:
        """Make the kernel's tables and those of the backend, once a run."""
        backend = self.uplink_manager.backend
        others = tuple(backend.tables()) if isinstance(backend, HasTables) else ()
        if exit_policy(backend) is ExitPolicy.REMOVE:
            self._removed_at_exit = frozenset(each.name for each in others)
        kernels = kernel_tables.tables(self._kernel, self._left_behind.stale_links)
        self._reconciler = self._over([*kernels, *(each for each in others if each.worker == _WORKER)])
        self._workers = Workers(
            [self._recording(each) for each in others if each.worker != _WORKER],
            stop=self._stop,
            heartbeat=self._heartbeat,
            converged=self._converged,
        )

    def _tell_workers(self, delta: Delta | None = None) -> None:
        """Hand over what is desired of other threads, all of it without a ``delta``."""
        if self._workers:
            known = Knowledge(self.peers.synced, self.peers.cached, self.peers.unclear)
            self._workers.tell(delta, known, self.peers.wanted.table)

    # ---- before the first peer ---------------------------------------------------------------

    def prepare(self) -> None:
        """Make what this node needs for itself. Raises ``Fatal`` when the kernel refuses."""
        now = clock.now()
        self._wish_for_ourselves()
        if not self._reconciler.states():
            self._make_tables()
        try:
            spare_links_of_others(self._kernel, self._links())
            self._look_at_host(now)
            spare_connected_networks(self.peers.local_wishes(), self.peers.safety.obstacles)
        except OSError as failure:
            raise Retryable(f"cannot read the kernel's tables: {cause_of(failure)}") from failure
        # What an earlier run left may lead past the encryption, and goes before any peer is known.
        self._reconciler.adopt = encrypts(self.uplink_manager.backend)
        report = self._reconciler.converge(now)
        self._tell_workers()
        self._workers.prepare(now)
        demand_all(self.states())
        for resource in report.made:
            log.info("Made %s", resource)
        warn_of_networks_around(self.peers.safety.obstacles, self.domain)
        self._next_look = now + _LOOK_PERIOD

    def _leaks(self, resource: Resource) -> bool:
        """Return True for a route by which packets leave in the clear though the backend encrypts."""
        is_outside = isinstance(resource, Route) and resource.device not in self.domain.links
        return is_outside and encrypts(self.uplink_manager.backend)

    def _wish_for_ourselves(self) -> None:
        backend, uplink = self.uplink_manager.backend, self.uplink_manager.uplink
        self.peers.wish_locally((*backend.local(self._node.lease), *self._node.extras))
        ours = self._links()
        self._kernel.domain = replace(
            self.domain,
            uplink=uplink.name,
            links=frozenset(link.name for link in ours),
            bridging=frozenset(link.name for link in ours if isinstance(link, Vxlan)),
        )

    def _links(self) -> list[Link]:
        return [item for item in self.peers.local_wishes() if isinstance(item, Link)]

    # ---- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        self._loop.run()

    def cancel(self) -> None:
        self._loop.cancel()

    def close(self, *, except_for: Collection[str] = ()) -> None:
        """Close the tables, save those of threads that go on."""
        if NAME not in except_for:
            self._reconciler.close(remove=self._removed_at_exit)
        for worker in self._workers:
            if worker.name not in except_for:
                worker.reconciler.close(remove=self._removed_at_exit)

    def step(self, now: float) -> float:
        """Do all that is due; return when to step again."""
        self._take_events([event for events in self.event_queue.drain() for event in events], now)
        self.event_queue.settle()
        self._take_news(self._node.monitor.read(self._names.get), now)
        if now >= self._next_look:
            self._look(now)
        if now >= self._next_sweep:
            self._sweep(now)
        wakeup = self._reconciler.step(now)
        if self.removal_guard.is_due():
            self._reread()
        if self._node.monitor.missed:
            return now
        return min(wakeup, self._next_look, self._next_sweep, self.removal_guard.next_reading)

    def _sources(self) -> list[int]:
        return [self.event_queue.fileno(), self._node.monitor.fileno(), *self._reconciler.sources()]

    # ---- news of leases ----------------------------------------------------------------------

    def _take_events(self, events: list[Event], now: float) -> None:
        was_synced = self.peers.synced
        delta = self.peers.take(events, self.uplink_manager.backend)
        if not was_synced:
            if self.peers.synced:
                self._sweep(now)
            elif any(isinstance(event, Cached) for event in events):
                self._use_cache(now)
            return
        if delta:
            self._reconciler.change(delta, now)
            self._tell_workers(delta)
            self.work.applied(self.event_queue.since)
        if events and self._permits.sweeps:
            self._next_sweep = min(self._next_sweep, now + _LOOK_SPACING)
        self.peers.tell()

    def _use_cache(self, now: float) -> None:
        """Make what leads to the peers of a cache; nothing is removed, and nothing replaced."""
        report = self._reconciler.converge(now)
        self._tell_workers()
        log.warning(
            "Using %s: %d peers, made %d objects; removing and replacing nothing until the store answers",
            self.peers.cached,
            len(self.peers),
            len(report.made),
        )
        self._on_synced()

    def _sweep(self, now: float) -> None:
        """All peers are known: what an earlier run left and nobody wants goes, unless it is too much."""
        self._reconciler.adopt = self._permits.sweeps = True
        self._next_sweep = math.inf
        report = self._reconciler.converge(now)
        self._tell_workers()
        if not self._is_in_sync:
            self._is_in_sync = True
            log.info(
                "In sync with %s: made %s, removed %d left by an earlier run",
                counted(len(self.peers), "peer"),
                counted(len(report.made), "object"),
                len(report.removed),
            )
            with suppress(OSError):
                self._left_behind.report_unclaimed()
        for resource in report.removed[:_FEW]:
            log.info("Removed, left by an earlier run: %s", resource)
        if len(report.removed) > _FEW:
            log.info("Removed, left by an earlier run: %d more objects", len(report.removed) - _FEW)
        if any(state.problem for state in self._reconciler.states()):
            self._next_sweep = now + _RETRY
            return
        if not self.removal_guard.sweep_is_held:
            try:
                self._end_sweep()
            except OSError as failure:
                self._could_not_read(failure, now)
                self._next_sweep = now + _RETRY
                return
        self._on_synced()

    def _end_sweep(self) -> None:
        """What an earlier run left has been dealt with, but for its devices. Raises ``OSError``."""
        self._left_behind.record_sweep()
        self._reconciler.adopt = self._permits.sweeps = False

    # ---- news of the kernel ------------------------------------------------------------------

    def _take_news(self, news: Iterable[News], now: float) -> None:
        for item in news:
            if may_be_obstacle(item, self.peers.safety, self.domain.links):
                self._look_soon(now)
            match item:
                case Overrun():
                    self.work.overruns += 1
                    log.log(V(1), "Kernel notifications were lost: reading everything back")
                    self._read_all_back(now)
                case Unheard():
                    self._read_all_back(now)
                case InterfaceChanged(index, name, port) if self._concerns_us(index, name):
                    self._read_all_back(now, (LINKS, name or ""), port)
                case Gone(key, port):
                    self._heard_of(key, port, now, is_drift=self.peers.wanted.get(key) is not None)
                case Seen(resource, port):
                    self._heard_of(resource.key, port, now, is_drift=self._is_drift(resource))

    def _read_all_back(self, now: float, key: Key | None = None, port: int = 0) -> None:
        self._uplink_may_have_moved = True
        self._reconciler.hear(now, None, key, self._origins.of(port))
        self._look_soon(now)

    def _heard_of(self, key: Key, port: int, now: float, *, is_drift: bool) -> None:
        if is_drift:
            self._reconciler.hear(now, key[0], key, self._origins.of(port))
        if self.uplink_manager.asks_routes:  # Any route may be one on which the backend's decisions rest.
            self._look_soon(now)

    def _concerns_us(self, index: int, name: str | None) -> bool:
        ours = name == self.uplink_manager.uplink.name or name in self.domain.links
        return (
            ours or index in self._names or self.uplink_manager.asks_routes or self.uplink_manager.is_adrift
        )

    def _is_drift(self, resource: Resource) -> bool:
        wanted = self.peers.wanted.get(resource.key)
        if wanted is None:
            return getattr(resource, "device", None) in self.domain.links
        return wanted != resource

    # ---- the uplink and the host's networks ---------------------------------------------------

    def _look_soon(self, now: float) -> None:
        self._next_look = min(self._next_look, max(now + SETTLE, self._earliest_look))

    def _look(self, now: float) -> None:
        """Follow the uplink, and what the host's other networks allow."""
        began = clock.cpu_time()
        self._next_look = now + _LOOK_PERIOD
        try:
            self._follow_uplink(now)
            self._look_at_host(now)
        except OSError as failure:
            self._could_not_read(failure, now)
            return
        self._once.clear("read")
        self._earliest_look = now + max(_LOOK_SPACING, REST * (clock.cpu_time() - began))

    def _follow_uplink(self, now: float) -> None:
        manager = self.uplink_manager
        if not (self._uplink_may_have_moved or manager.asks_routes or manager.is_adrift):
            return
        moved = manager.follow()
        self._uplink_may_have_moved = False
        if moved:
            self._wish_for_ourselves()
        if moved or manager.asks_routes:
            self._change(self.peers.reconsider(manager.backend), now, all_anew=moved)
        if moved:
            self._on_move()

    def _look_at_host(self, now: float) -> None:
        """Withdraw what leads to leases that have become unsafe, and lead to those that are safe again."""
        networks = [network for network, _ in self.uplink_manager.ranges]
        own = [net for net in self._node.lease.key if net is not None]
        host = read_host_networks(self._kernel, networks, own, self.domain.links)
        if host != self.peers.safety.obstacles.host:
            self._change(self.peers.look(Obstacles(host), self.uplink_manager.backend), now)
        self.peers.tell()

    def _change(self, delta: Delta, now: float, *, all_anew: bool = False) -> None:
        """Follow another decision; what it says of leases of a cache may not even be looked at."""
        if all_anew:
            report = self._reconciler.converge(now)
            log.info("Made %s for the new uplink", counted(len(report.made), "object"))
            self._tell_workers()
        elif delta and self.peers.synced:
            self._reconciler.change(delta, now)
            self._tell_workers(delta)

    # ---- afterwards --------------------------------------------------------------------------

    def _is_complete(self) -> bool:
        return not any(state.failed or state.problem for state in self._reconciler.states())

    def _passed(self, report: Report) -> None:
        """The tables were put right: note what that means for the next run."""
        self._origins.forget()
        swept = [each for each in report.removed if each.kind is Kind.LINK]
        try:
            names = self._interfaces()
            if names != self._names or swept:
                self._left_behind.record_devices()
                self._names = names
        except OSError as failure:
            self._could_not_read(failure, clock.now())

    def _interfaces(self) -> dict[int, str]:
        present = {name: index for index, name in socket.if_nameindex()}
        ours = (self.domain.uplink, *self.domain.links)
        return {present[name]: name for name in ours if name in present}

    def _could_not_read(self, failure: OSError, now: float) -> None:
        self._once.warn(
            log,
            "read",
            f"Cannot read the kernel's tables: {cause_of(failure)}; changing nothing until we can",
        )
        self._next_look = min(self._next_look, now + _RETRY)
