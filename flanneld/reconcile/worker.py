"""Workers: reconcilers of groups of tables, each stepped by a loop of its own or by another machine.

``NodeTables`` are those of one node: the kernel's, in the controller's thread, and those of a backend.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flanneld.backends.contract import Backend, ExitPolicy
from flanneld.reconcile.counters import Work
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.reconciler import Reconciler
from flanneld.reconcile.upkeep import ContestBackoff, TableState, demand_all
from flanneld.runtime.supervisor import MakeLoop
from flanneld.state.desired import Delta
from flanneld.state.permits import Knowledge, Permits
from flanneld.state.resources import LINKS, ROUTES, Blackhole, Key, Resource, State
from flanneld.state.table import (
    Bypass,
    Failure,
    FindsBypasses,
    HasSessions,
    Put,
    Report,
    Table,
    TunnelSession,
)

if TYPE_CHECKING:
    from flanneld.backends.wireguard.mesh import Mesh  # only for this backend


@runtime_checkable
class HasMesh(Protocol):
    """Optional part of a table: its peers follow a mesh, unless it is None."""

    mesh: Mesh | None


class Worker:
    """Worker that keeps its tables in the desired state.

    With ``make_loop`` it has a loop of its own, for tables that block: those of a switch, a cloud or a
    command. The other arguments are those of ``Reconciler``. Without ``permits`` what was sent last decides.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[Table] = (),
        *,
        stop: threading.Event,
        make_loop: MakeLoop | None = None,
        permits: Permits | None = None,
        contest: Callable[[], ContestBackoff] = ContestBackoff,
        after: Callable[[Report], None] = lambda _: None,
        converged: set[str] | None = None,
    ) -> None:
        self.name = name
        self._stop = stop
        self._permits = permits or Permits(lambda: self._known)
        self._contest = contest
        self._after = after
        self._converged = converged
        self._known = Knowledge()
        self._messages: deque[tuple[Delta, bool, Knowledge]] = deque()
        self._loop = make_loop(name, self.step, lambda: self.reconciler.sources()) if make_loop else None
        self.use(tables)

    def use(self, tables: Sequence[Table], desired: Mapping[str, State] | None = None) -> None:
        """Take these tables; ``desired`` are their maps if others keep them. In the thread of ``step``."""
        self.tables = frozenset(table.name for table in tables)
        self._desired: dict[str, dict[Key, Resource]] = {table.name: {} for table in tables}
        self.reconciler = Reconciler(
            tables,
            self._desired if desired is None else desired,
            self._stop.is_set,
            permits=self._permits,
            contest=self._contest,
            after=self._after,
            converged=self._converged,
        )

    def states(self) -> list[TableState]:
        """Return the status of each table. May be called from any thread."""
        return self.reconciler.states()

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until the daemon stops."""
        assert self._loop is not None
        self._loop.run()

    def cancel(self) -> None:
        """End the wait between two steps. From any thread."""
        if self._loop:
            self._loop.cancel()

    def is_alive(self) -> None:
        """Send a heartbeat. A step that does several things calls this after each."""
        if self._loop:
            self._loop.is_alive()

    def send(self, delta: Delta, known: Knowledge, *, whole: bool = False) -> None:
        """Hand over a change of the desired state; with ``whole`` it is the entire state."""
        self._messages.append((delta, whole, known))
        self.cancel()

    def prepare(self, now: float) -> None:
        """Do the first step, if readiness depends on a table, before the thread runs."""
        if any(state.vital for state in self.states()):
            self.step(now)

    def step(self, now: float) -> float:
        """Do the due work. Return the time of the next step."""
        while self._messages:
            delta, whole, self._known = self._messages.popleft()
            self._take(delta, whole=whole)
            if whole:
                self.reconciler.converge(now)
            else:
                self.reconciler.change(delta, now)
            if self._messages:
                self.is_alive()
        return self.reconciler.step(now)

    def _take(self, delta: Delta, *, whole: bool) -> None:
        for table in self._desired.values() if whole else ():
            table.clear()
        for put in delta.puts:
            self._desired[str(put.want.key[0])][put.want.key] = put.want
        for resource in delta.drops:
            self._desired[str(resource.key[0])].pop(resource.key, None)

    def close(self, *, remove: Collection[str] = ()) -> None:
        """Close every table. ``remove`` names those to empty."""
        self.reconciler.close(remove=remove)


#: Name of the worker whose tables run in the controller's thread.
_KERNEL = "kernel"
#: Packets are lost until a repair, so the pauses are short: they bound the CPU time of a fight with a program
#: that reacts at once.
KERNEL_CONTEST = partial(ContestBackoff, first=0.02, last=0.02, many=20, again=10.0)


class NodeTables:
    """Reconciler of all tables, for the desired state of ``peers``. ``after`` gets the report of each pass.

    ``recording`` wraps each table: a dry run only records the writes.
    """

    def __init__(
        self,
        peers: Peers,
        permits: Permits,
        *,
        stop: threading.Event,
        make_loop: MakeLoop,
        after: Callable[[Report], None],
        recording: Callable[[Table], Table],
    ) -> None:
        self._peers = peers
        self._permits = permits
        self._stop = stop
        self._make_loop = make_loop
        self._recording = recording
        self._removed_at_exit: frozenset[str] = frozenset()
        self._with_sessions: tuple[HasSessions, ...] = ()
        self._with_bypasses: tuple[FindsBypasses, ...] = ()
        self._converged: set[str] = set()
        self._routes: list[Table] = []
        self._kernel = Worker(
            _KERNEL,
            stop=stop,
            permits=permits,
            contest=KERNEL_CONTEST,
            after=after,
            converged=self._converged,
        )
        #: Workers with threads of their own, for tables that block.
        self.workers: tuple[Worker, ...] = ()

    def make(self, kernels: Sequence[Table], backend: Backend) -> None:
        """Give the workers the kernel's tables and the backend's, once a run.

        If both have a table of one name, the backend's replaces the kernel's.
        """
        others = tuple(backend.tables())
        names = {each.name for each in others}
        kernels = [each for each in kernels if each.name not in names]
        if backend.exit_policy is ExitPolicy.REMOVE:
            self._removed_at_exit = frozenset(each.name for each in others)
        self._routes = [self._recording(each) for each in kernels if each.name == ROUTES]
        self._with_sessions = tuple(each for each in others if isinstance(each, HasSessions))
        self._with_bypasses = tuple(each for each in others if isinstance(each, FindsBypasses))
        inside = _in_order(kernels, [each for each in others if each.worker == _KERNEL])
        desired = self._peers.desired
        self._kernel.use(
            [self._recording(each) for each in inside],
            {each.name: desired.table(each.name) for each in inside},
        )
        beside = [each for each in others if each.worker != _KERNEL]
        self.workers = tuple(
            Worker(
                name,
                [self._recording(each) for each in beside if each.worker == name],
                stop=self._stop,
                make_loop=self._make_loop,
                converged=self._converged,
            )
            for name in dict.fromkeys(each.worker for each in beside)
        )

    # ---- status --------------------------------------------------------------------------------

    @property
    def reconciler(self) -> Reconciler:
        """Reconciler of the kernel's tables."""
        return self._kernel.reconciler

    @property
    def work(self) -> Work:
        """Counters of the kernel's tables."""
        return self.reconciler.work

    @property
    def reconcilers(self) -> list[Reconciler]:
        return [self.reconciler, *(worker.reconciler for worker in self.workers)]

    def states(self) -> list[TableState]:
        """Return the status of each table. May be called from any thread."""
        return [state for each in self.reconcilers for state in each.states()]

    def refusals(self) -> Counter[tuple[str, str]]:
        """Count refusals by kind of object and reason. From any thread."""
        return sum((Counter(each.work.refusals) for each in self.reconcilers), Counter())

    def pending(self) -> dict[Key, Failure]:
        """Return the desired objects that are refused now. May be called from any thread."""
        return {failure.resource.key: failure for state in self.states() for failure in state.failed}

    def sessions(self) -> list[TunnelSession]:
        """Return the encrypted sessions with peers, as last read. From any thread."""
        return [session for table in self._with_sessions for session in table.sessions()]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the backend's table, None without one."""
        return next((table.mesh for table in self._with_sessions if isinstance(table, HasMesh)), None)

    def bypasses(self) -> list[Bypass]:
        """Return what lets packets pass unencrypted, as the backend's tables last read it."""
        return [bypass for table in self._with_bypasses for bypass in table.bypasses()]

    def is_contested(self) -> bool:
        """Return True if another program keeps changing our objects. May be called from any thread."""
        return any(state.contested for state in self.states())

    def is_complete(self) -> bool:
        """Return True if all of the kernel's tables are readable and none has refused an object."""
        return not any(state.failed or state.problem for state in self.reconciler.states())

    # ---- changes -------------------------------------------------------------------------------

    def shut(self, now: float) -> Report:
        """Make the guards, and remove routes by which packets leave unencrypted, without waiting for devices.

        A device may be refused, and then the routes of a former backend must not go on. Raises ``Fatal`` or
        ``Retryable`` if the kernel refuses.
        """
        desired = self._peers.desired.table(ROUTES)
        guards = {key: each for key, each in desired.items() if isinstance(each, Blackhole)}
        routes = Reconciler(
            self._routes, {ROUTES: guards}, self._stop.is_set, permits=self._permits, converged={LINKS}
        )
        routes.adopt = True
        report = routes.converge(now)
        demand_all(routes.states())
        return report

    def converge(self, now: float) -> Report:
        """Relist and repair the kernel's tables now; hand the whole desired state to other workers."""
        report = self.reconciler.converge(now)
        self._tell_workers()
        return report

    def change(self, delta: Delta, now: float) -> None:
        """Apply a change of the desired state without relisting the tables."""
        self.reconciler.change(delta, now)
        self._tell_workers(delta)

    def _tell_workers(self, delta: Delta | None = None) -> None:
        """Hand each worker its part of a change, or of the whole desired state without a change."""
        if not self.workers:
            return
        known = self._peers.known()
        for worker in self.workers:
            if delta is None:
                maps = map(self._peers.desired.table, sorted(worker.tables))
                worker.send(
                    Delta(tuple(Put(want) for each in maps for want in each.values())), known, whole=True
                )
                continue
            part = Delta(
                tuple(put for put in delta.puts if put.want.key[0] in worker.tables),
                tuple(resource for resource in delta.drops if resource.key[0] in worker.tables),
            )
            if part:
                worker.send(part, known)

    def close(self, *, except_for: Collection[str], own: str) -> None:
        """Close the tables, except those of running threads; ``own`` names the controller's thread."""
        for thread, worker in ((own, self._kernel), *((each.name, each) for each in self.workers)):
            if thread not in except_for:
                worker.close(remove=self._removed_at_exit)


def _in_order(kernels: Sequence[Table], others: Sequence[Table]) -> list[Table]:
    """Return the tables in the order of creation: what encrypts packets precedes the routes that lead there.

    A packet for a WireGuard peer that is not configured yet is lost, one for an XFRM policy may leave.
    """
    before, routes = (
        [each for each in kernels if (each.name == ROUTES) is is_last] for is_last in (False, True)
    )
    early, late = (
        [each for each in others if (ROUTES in each.needs) is is_last] for is_last in (False, True)
    )
    return [*before, *early, *routes, *late]
