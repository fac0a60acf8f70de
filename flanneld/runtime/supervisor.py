"""Threads of the daemon: the loop around a state machine, the queue into it, and the supervisor of all.

The supervisor runs one thread for each task and has one stop for all; the first failure ends all.
"""

from __future__ import annotations

import _thread
import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from flanneld.errors import Cancelled, Fatal, FlannelError, lacking
from flanneld.runtime import clock

#: Seconds between two steps without work, for the heartbeat.
_IDLE = 30.0


class Wakeup:
    """File descriptor that is readable from ``set`` until ``clear``. Any thread may set it."""

    _event = -1

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # A default argument, because at interpreter exit the module's names are gone.
        if self._event >= 0:
            close(self._event)

    def fileno(self) -> int:
        return self._event

    def set(self) -> None:
        os.eventfd_write(self._event, 1)

    def clear(self) -> bool:
        """Return False if it was not set."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return False
        return True


class Loop(Protocol):
    """Thread's part of a stepped machine, whichever thread that is."""

    def run(self) -> None: ...

    def cancel(self) -> None: ...

    def is_alive(self) -> None: ...


class MakeLoop(Protocol):
    """Return the loop of a task with this name, as ``StepLoop`` has ``step`` and ``sources``."""

    def __call__(
        self, name: str, step: Callable[[float], float], sources: Callable[[], Iterable[int]] = tuple, /
    ) -> Loop: ...


class StepLoop:
    """Loop that calls a state machine's ``step`` and waits in between.

    ``step(now)`` returns the time of its next call, in seconds on ``clock.now``. ``sources`` returns file
    descriptors that end the wait, too; it is called before each wait.
    """

    def __init__(
        self,
        step: Callable[[float], float],
        sources: Callable[[], Iterable[int]] = tuple,
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
    ) -> None:
        self._step = step
        self._sources = sources
        self._stop = stop
        self._heartbeat = heartbeat
        self._wake = Wakeup()

    def run(self) -> None:
        """Step until ``stop`` is set."""
        while not self._stop.is_set():
            self.is_alive()
            due = self._step(clock.now())
            if due > clock.now():
                self._sleep_until(due)

    def is_alive(self) -> None:
        """Send a heartbeat. A step that does several things calls this after each."""
        self._heartbeat(4 * _IDLE)

    def cancel(self) -> None:
        """End the current wait. May be called from any thread."""
        self._wake.set()

    def _sleep_until(self, when: float) -> None:
        poll, wake = select.poll(), self._wake.fileno()
        for source in (wake, *self._sources()):
            poll.register(source, select.POLLIN)
        ready = poll.poll(min(_IDLE, max(0.0, when - clock.now())) * 1000)
        if (wake, select.POLLIN) in ready:
            self._wake.clear()


Item = TypeVar("Item")

#: Seconds: several times the cost of one event, and negligible against that of many.
_PATIENCE = 0.005


class EventQueue(Generic[Item]):
    """Queue whose file descriptor is readable while it has items."""

    def __init__(self) -> None:
        self._items: deque[tuple[float, Item]] = deque()
        #: Arrival time of the oldest item of the last ``drain``.
        self.since = 0.0
        #: Held from ``put`` until ``settle``. A ``threading.Event`` would take 15 us more for each item.
        self._unsettled = threading.Lock()
        self._readable = Wakeup()

    def fileno(self) -> int:
        return self._readable.fileno()

    def put(self, item: Item) -> None:
        """Add an item, then wait until it is processed, at most a few milliseconds.

        Otherwise both threads would compete for the interpreter lock and slow each other down.
        """
        self._unsettled.acquire(blocking=False)
        self._items.append((clock.now(), item))
        self._readable.set()
        self._unsettled.acquire(timeout=_PATIENCE)

    def settle(self) -> None:
        """Mark the drained items as processed. Called by the owner."""
        if self._unsettled.locked():
            self._unsettled.release()

    def wake(self) -> None:
        """Wake the owner without adding an item."""
        self._readable.set()

    def drain(self) -> list[Item]:
        """Return all items, oldest first."""
        if not self._readable.clear():
            return []
        items = [self._items.popleft() for _ in range(len(self._items))]
        self.since = items[0][0] if items else self.since
        return [item for _, item in items]


log = logging.getLogger(__name__)

#: Seconds. A signal just before the main thread sleeps does not wake it, so the sleep is short.
_NAP = 0.5

#: Seconds until a cancellation counts as blocked, and another thread goes on with the others. A thread for
#: each from the start would take 0.2 ms.
_CANCEL_WITHIN = 0.05

QuietErrors = tuple[type[BaseException], ...]


def nothing() -> None:
    """Do nothing: default for ``cancel`` and for waits without work."""


class Task(Struct, frozen=True):
    thread: threading.Thread
    cancel: Callable[[], None]


class Supervisor:
    """Supervisor of tasks. It decides when to stop, and why.

    - ``stop`` is set once, for good; ``failure`` is the error of the task that caused it, if any.
    - ``quiet`` are the exceptions that a cancelled task may raise.
    - ``clock`` returns seconds. It should not count suspend, so that no task is overdue after it.
    """

    def __init__(self, quiet: QuietErrors = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self._quiet = quiet
        self._clock = clock
        self._lock = threading.Lock()
        self._tasks: list[Task] = []
        self._promises: dict[str, tuple[float, float]] = {}

    def start(
        self,
        name: str,
        run: Callable[[], None],
        cancel: Callable[[], None] = nothing,
        *,
        may_end: bool = False,
    ) -> None:
        """Run a task in its own thread, unless the daemon is stopping already.

        An exception is a failure and stops the daemon, as is a return before ``stop`` unless it ``may_end``.
        ``cancel`` makes ``run`` return when ``stop`` alone does not wake it; it may be called from any
        thread, also when ``run`` has ended.
        """
        # A daemon thread, because a task that hangs must not keep the process from exiting.
        thread = threading.Thread(target=self._run, args=(name, run, may_end), name=name, daemon=True)
        with self._lock:
            if self.stop.is_set():
                return
            thread.start()
            self._tasks.append(Task(thread, cancel))

    def request_stop(self, reason: str, words: str = "") -> None:
        """Stop without failure. Only the first reason is logged, after upstream's ``words`` for it."""
        with self._lock:
            if not self.stop.is_set():
                log.info("%sstopping: %s", words, reason)
                self.stop.set()

    def heartbeat(self, name: str, within: float) -> None:
        """Promise the next heartbeat within ``within`` seconds; ``math.inf`` cancels the promise."""
        self._promises[name] = (self._clock(), within)

    def loop(
        self, name: str, step: Callable[[float], float], sources: Callable[[], Iterable[int]] = tuple
    ) -> StepLoop:
        """Return the loop of a task, until ``stop``."""
        return StepLoop(step, sources, stop=self.stop, heartbeat=partial(self.heartbeat, name))

    def overdue(self) -> list[str]:
        """Return one line for each task with an overdue heartbeat."""
        now = self._clock()
        return [
            f"{name} has not reported for {now - reported:.0f} s (promised {within:g} s)"
            for name, (reported, within) in sorted(self._promises.copy().items())
            if now > reported + within
        ]

    def wait(self, *ticks: tuple[Callable[[], None], float]) -> None:
        """Block until ``stop``. Each tick is a function and the seconds within which it is called again."""
        pause = min(_NAP, *(every for _, every in ticks)) if ticks else _NAP
        naps = 0
        while not self.stop.wait(pause):
            naps += 1
            for tick, every in ticks:
                if naps % int(every / pause) == 0:
                    tick()

    def shutdown(self, within: float = 0.8) -> list[str]:
        """Cancel all tasks and wait at most ``within`` seconds in total.

        Return the names of those still running.
        """
        deadline = time.monotonic() + within
        with self._lock:
            self.stop.set()
            tasks = tuple(self._tasks)
        _cancel_all(tasks)
        for task in tasks:
            task.thread.join(max(0.0, deadline - time.monotonic()))
        return [task.thread.name for task in tasks if task.thread.is_alive()]

    def handle_signals(self) -> None:
        """Make the first SIGINT or SIGTERM request a stop and the second one kill. Main thread only.

        SIGUSR1 and SIGUSR2 do nothing, as in a program of Go.
        """
        log.info("Installing signal handlers")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda _number, _frame: None)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, signal.SIG_DFL)
        # The handler may interrupt the main thread while it holds a lock needed here: that of ``stop`` during
        # its wait, or that of ``threading`` during a thread's start. Hence a raw thread.
        name = signal.Signals(number).name
        _thread.start_new_thread(self.request_stop, (f"got {name}", "shutdownHandler sent cancel signal... "))

    def _run(self, name: str, run: Callable[[], None], may_end: bool) -> None:
        try:
            run()
        except self._quiet as error:
            self._ended(name, error)
        except BaseException as error:  # log every end of a thread
            self._failed(name, error)
        else:
            if not may_end:
                self._ended(name)

    def _ended(self, name: str, cause: BaseException | None = None) -> None:
        if self.stop.is_set():
            return
        failure = Fatal(f"{name} ended without being asked to", "report this log as a bug of flanneld")
        failure.__cause__ = cause
        self._failed(name, failure)

    def _failed(self, name: str, error: BaseException) -> None:
        with self._lock:
            if self.stop.is_set():
                log.warning("%s failed while stopping: %s: %s", name, type(error).__name__, error)
                return
            self.failure = error
            # Our own errors are complete; any other is a bug and needs the traceback.
            told = lacking(error) or error
            trace = None if isinstance(told, FlannelError) else error
            log.error("stopping: %s failed: %s", name, told, exc_info=trace)
            self.stop.set()


def _cancel_all(tasks: Iterable[Task]) -> None:
    """Cancel the tasks that run. One that blocks in ``cancel`` is left behind in its thread."""
    waiting = deque(task for task in tasks if task.cancel is not nothing)
    while waiting:
        helper = threading.Thread(target=_cancel_each, args=(waiting,), daemon=True)
        helper.start()
        helper.join(_CANCEL_WITHIN)


def _cancel_each(waiting: deque[Task]) -> None:
    with suppress(IndexError):  # a helper that was held up may take the last one
        while waiting:
            task = waiting.popleft()
            if task.thread.is_alive():
                _cancel(task)


def _cancel(task: Task) -> None:
    try:
        task.cancel()
    except Exception:
        log.exception("cannot cancel %s", task.thread.name)


def run_together(runs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
    """Run all functions at once, the first in this thread.

    The first failure cancels the rest and is raised.
    """
    failures: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as failure:
            failures.append(failure)
            cancel()

    first, *others = runs
    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in others]
    for thread in threads:
        thread.start()
    run(first)
    for thread in threads:
        thread.join()
    raise next((each for each in failures if not isinstance(each, Cancelled)), Cancelled())
