"""All tables of this node: the kernel's, kept by the controller's thread, and those of other workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from flanneld.backends.contract import Backend, ExitPolicy, HasTables, exit_policy
from flanneld.reconcile.contest_backoff import ContestBackoff
from flanneld.reconcile.counters import Work
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.reconciler import Permits, Reconciler, TableState
from flanneld.reconcile.table_worker import Knowledge, Workers
from flanneld.state.diff import Delta
from flanneld.state.report import Failure, Report
from flanneld.state.resources import Key, State
from flanneld.state.sessions import HasSessions, Session
from flanneld.state.table import Table

#: Name of the worker whose tables the controller's thread keeps.
_WORKER = "kernel"
#: The longest pause in seconds before a repair that others keep undoing, and the repairs within a minute from
#: which on it looks like that.
_LAST_PAUSE, _CONTEST = 1.0, 20


class NodeTables:
    """Keeps the tables in the state that ``peers`` desire. ``after`` is told of each pass over the kernel's.

    ``recording`` replaces each table: a start that changes nothing only takes notes of what it would write.
    """

    def __init__(
        self,
        peers: Peers,
        permits: Permits,
        *,
        stop: threading.Event,
        heartbeat: Callable[[str, float], None],
        after: Callable[[Report], None],
        recording: Callable[[Table], Table],
    ) -> None:
        self._peers = peers
        self._permits = permits
        self._stop = stop
        self._heartbeat = heartbeat
        self._after = after
        self._recording = recording
        self._removed_at_exit: frozenset[str] = frozenset()
        self._with_sessions: tuple[HasSessions, ...] = ()
        self._converged: set[str] = set()
        self.reconciler = self._over(())
        #: Other threads, for tables that would keep the kernel waiting.
        self.workers = self._beside(())

    def make(self, kernels: Sequence[Table], backend: Backend) -> None:
        """Take over the kernel's tables and those of the backend, once a run.

        If both have a table of one name, the backend's is taken.
        """
        others = tuple(backend.tables()) if isinstance(backend, HasTables) else ()
        names = {each.name for each in others}
        kernels = [each for each in kernels if each.name not in names]
        if exit_policy(backend) is ExitPolicy.REMOVE:
            self._removed_at_exit = frozenset(each.name for each in others)
        self._with_sessions = tuple(each for each in others if isinstance(each, HasSessions))
        self.reconciler = self._over([*kernels, *(each for each in others if each.worker == _WORKER)])
        self.workers = self._beside([each for each in others if each.worker != _WORKER])

    def _over(self, tables: Sequence[Table]) -> Reconciler:
        wanted: Mapping[str, State] = {table.name: self._peers.wanted.table(table.name) for table in tables}
        return Reconciler(
            [self._recording(table) for table in tables],
            wanted,
            self._stop.is_set,
            permits=self._permits,
            # Packets wait for a repair: the pauses stay short.
            contest=partial(ContestBackoff, last=_LAST_PAUSE, many=_CONTEST),
            after=self._after,
            converged=self._converged,
        )

    def _beside(self, tables: Iterable[Table]) -> Workers:
        return Workers(
            [self._recording(each) for each in tables],
            stop=self._stop,
            heartbeat=self._heartbeat,
            converged=self._converged,
        )

    # ---- what is known of them -----------------------------------------------------------------

    @property
    def work(self) -> Work:
        """Counters of the kernel's tables."""
        return self.reconciler.work

    @property
    def _reconcilers(self) -> list[Reconciler]:
        return [self.reconciler, *(worker.reconciler for worker in self.workers)]

    def states(self) -> list[TableState]:
        """Return what is known of each table. From any thread."""
        return [state for each in self._reconcilers for state in each.states()]

    def heals(self) -> Counter[tuple[str, str]]:
        """Count repairs by kind of object and cause. From any thread."""
        return sum((Counter(each.work.heals) for each in self._reconcilers), Counter())

    def refusals(self) -> Counter[tuple[str, str]]:
        """Count refusals by kind of object and reason. From any thread."""
        return sum((Counter(each.work.refusals) for each in self._reconcilers), Counter())

    def pending(self) -> dict[Key, Failure]:
        """Return what is wanted and refused now. From any thread."""
        return {failure.resource.key: failure for state in self.states() for failure in state.failed}

    def sessions(self) -> list[Session]:
        """Return the encrypted sessions with peers, as last read. From any thread."""
        return [session for table in self._with_sessions for session in table.sessions()]

    def is_contested(self) -> bool:
        """Return True if another program keeps changing what is ours. From any thread."""
        return any(state.contested for state in self.states())

    def is_complete(self) -> bool:
        """Return True if nothing of the kernel's tables was refused, and all of them can be read."""
        return not any(state.failed or state.problem for state in self.reconciler.states())

    # ---- what is done to them ------------------------------------------------------------------

    def converge(self, now: float) -> Report:
        """Read and put right the kernel's tables now; other workers are told all that is desired."""
        report = self.reconciler.converge(now)
        self._tell_workers()
        return report

    def change(self, delta: Delta, now: float) -> None:
        """Make and remove what follows from news, without a look at what the tables hold."""
        self.reconciler.change(delta, now)
        self._tell_workers(delta)

    def _tell_workers(self, delta: Delta | None = None) -> None:
        if self.workers:
            peers = self._peers
            known = Knowledge(peers.synced, peers.cached, peers.unclear)
            self.workers.tell(delta, known, peers.wanted.table)

    def close(self, *, except_for: Collection[str], own: str) -> None:
        """Close the tables, save those of threads that go on; ``own`` names the controller's thread."""
        if own not in except_for:
            self.reconciler.close(remove=self._removed_at_exit)
        for worker in self.workers:
            if worker.name not in except_for:
                worker.reconciler.close(remove=self._removed_at_exit)
