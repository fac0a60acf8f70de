"""Worker thread for tables that block: those of a switch, a cloud or a command."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flanneld.reconcile.permits import Knowledge, Permits
from flanneld.reconcile.reconciler import Reconciler
from flanneld.runtime.loop import StepLoop
from flanneld.state.desired import Delta
from flanneld.state.resources import Key, Resource, State
from flanneld.state.table import Put, Table


class Worker:
    """Worker that reconciles its tables. One other thread sends the desired state in messages."""

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
        converged: set[str],
    ) -> None:
        self.name = name
        self.tables = frozenset(table.name for table in tables)
        self._desired: dict[str, dict[Key, Resource]] = {table.name: {} for table in tables}
        self._known = Knowledge()
        self._messages: deque[tuple[Delta, bool, Knowledge]] = deque()
        self.reconciler = Reconciler(
            tables, self._desired, stop.is_set, permits=Permits(lambda: self._known), converged=converged
        )
        self._loop = StepLoop(self.step, self.reconciler.sources, stop=stop, heartbeat=heartbeat)

    def run(self) -> None:
        self._loop.run()

    def cancel(self) -> None:
        self._loop.cancel()

    def send(self, delta: Delta, known: Knowledge, *, whole: bool = False) -> None:
        """Hand over a change of the desired state; with ``whole`` it is the entire state."""
        self._messages.append((delta, whole, known))
        self._loop.cancel()

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
                self._loop.is_alive()
        return self.reconciler.step(now)

    def _take(self, delta: Delta, *, whole: bool) -> None:
        for table in self._desired.values() if whole else ():
            table.clear()
        for put in delta.puts:
            self._desired[str(put.want.key[0])][put.want.key] = put.want
        for resource in delta.drops:
            self._desired[str(resource.key[0])].pop(resource.key, None)


class Workers:
    """All workers of a node, each with the tables that name it."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        stop: threading.Event,
        heartbeat: Callable[[str, float], None],
        converged: set[str],
    ) -> None:
        self._all = tuple(
            Worker(
                name,
                [table for table in tables if table.worker == name],
                stop=stop,
                heartbeat=partial(heartbeat, name),
                converged=converged,
            )
            for name in dict.fromkeys(table.worker for table in tables)
        )

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    def __bool__(self) -> bool:
        return bool(self._all)

    def prepare(self, now: float) -> None:
        """Step the workers that readiness depends on, before their threads run."""
        for worker in self._all:
            if any(state.vital for state in worker.reconciler.states()):
                worker.step(now)

    def send(self, delta: Delta | None, known: Knowledge, desired: Callable[[str], State]) -> None:
        """Hand each worker its part of a change, or of the whole ``desired`` state without a change."""
        for worker in self._all:
            if delta is None:
                puts = (Put(want) for name in sorted(worker.tables) for want in desired(name).values())
                worker.send(Delta(tuple(puts)), known, whole=True)
                continue
            part = Delta(
                tuple(put for put in delta.puts if put.want.key[0] in worker.tables),
                tuple(resource for resource in delta.drops if resource.key[0] in worker.tables),
            )
            if part:
                worker.send(part, known)
