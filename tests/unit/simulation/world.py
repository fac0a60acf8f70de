"""Virtual time: a schedule of what happens next, one source of chance, and a log of what happened."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flanneld.runtime import clock
from flanneld.runtime.clock import replaced_chance

#: Seconds between two steps of a task that wants the next one at once.
_TURN = 0.001


class Crash(BaseException):
    """A process ends here, as by SIGKILL. Nothing that it would have done afterwards is done."""


class World(logging.Handler, clock.Clock):
    """Clock, schedule and log of one simulation. The same seed gives the same log."""

    def __init__(self, seed: int, level: int = logging.INFO) -> None:
        super().__init__(level)
        self.random = random.Random(seed)
        self.time = 1000.0
        self.lines: list[str] = []
        #: Whose step runs now, for the log.
        self.actor = ""
        self._schedule: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.time

    def cpu_time(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1_600_000_000.0 + self.time

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(f"{record.levelname[0]} {record.getMessage()}")

    def tell(self, line: str) -> None:
        self.lines.append(f"{self.time:.6f} {self.actor}: {line}")

    def at(self, when: float, do: Callable[[], object]) -> None:
        """Do something then. What is scheduled for one time is done in the order of scheduling."""
        if when < math.inf:
            heapq.heappush(self._schedule, (when, next(self._numbers), do))

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.time + seconds
        while self._schedule and self._schedule[0][0] <= end:
            when, _, do = heapq.heappop(self._schedule)
            self.time = max(self.time, when)
            do()
        self.time = max(self.time, end)

    def pause(self, stop: threading.Event, seconds: float) -> bool:
        """Let time pass within a step, as a thread does that waits; others go on meanwhile."""
        actor = self.actor
        self.run(seconds)
        self.actor = actor
        return stop.is_set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the product's code on this clock and this chance, and take its log."""
        logger = logging.getLogger("flanneld")
        level, logger.propagate = logger.level, False
        logger.addHandler(self)
        logger.setLevel(self.level)
        try:
            with clock.replaced(self), replaced_chance(self.random):
                yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = True


class Task:
    """A stepped machine of one process, as its thread would drive it."""

    def __init__(
        self,
        world: World,
        name: str,
        step: Callable[[float], float],
        ended: Callable[[BaseException], None],
    ) -> None:
        self._world = world
        self._name = name
        self._step = step
        self._ended = ended
        self._due = math.inf
        self._is_over = False
        #: A step may let time pass: what wakes the task meanwhile makes it step again afterwards.
        self._is_running = False

    def wake(self, when: float = 0.0) -> None:
        """Step at that time, or as soon as possible; a step that is due earlier comes first."""
        when = max(when, self._world.time)
        if when < self._due and not self._is_over:
            self._due = when
            self._world.at(when, self._fire)

    def end(self) -> None:
        self._is_over = True

    def _fire(self) -> None:
        if self._is_over or self._world.time < self._due:
            return
        self._due = math.inf
        if self._is_running:
            self.wake(self._world.time + _TURN)
            return
        self._world.actor, self._is_running = self._name, True
        try:
            wakeup = self._step(self._world.time)
        except (Exception, Crash) as reason:
            if not self._is_over:
                self.end()
                self._ended(reason)
        else:
            self.wake(max(wakeup, self._world.time + _TURN))
        finally:
            self._world.actor, self._is_running = "", False
