"""Worker: the reconciler of a group of tables, stepped by a loop of its own or by another machine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from flanneld.reconcile.permits import Knowledge, Permits
from flanneld.reconcile.reconciler import Reconciler
from flanneld.reconcile.upkeep import ContestBackoff, TableState
from flanneld.runtime.loop import MakeLoop
from flanneld.state.desired import Delta
from flanneld.state.resources import Key, Resource, State
from flanneld.state.table import Report, Table


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
        """Take these tables, with the maps of who keeps their desired state. In the thread of ``step``."""
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
