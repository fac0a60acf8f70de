"""The daemon's tasks: one thread each, one stop for all, and the first failure ends everything."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from msgspec import Struct

from flanneld.errors import Fatal, FlannelError, lacking

log = logging.getLogger(__name__)

#: A signal that arrives just before the main thread falls asleep does not wake it: so it sleeps no longer.
_NAP = 0.5

QuietErrors = tuple[type[BaseException], ...]


def nothing() -> None:
    """For a task that ends by itself once ``stop`` is set, or a wait that has nothing else to do."""


class Task(Struct, frozen=True):
    thread: threading.Thread
    cancel: Callable[[], None]


class Supervisor:
    """Runs the tasks and knows why and when to stop.

    ``stop`` is set once, for good; ``failure`` says whether that was because a task failed.
    ``quiet`` are the exceptions with which a task may answer its cancellation.
    ``clock`` gives seconds, and should stand still while the host sleeps: nobody is late then.
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

    def request_stop(self, reason: str) -> None:
        """Stop without failure. The first reason is logged, later ones are not."""
        with self._lock:
            if not self.stop.is_set():
                log.info("stopping: %s", reason)
                self.stop.set()

    def heartbeat(self, name: str, within: float) -> None:
        """Promise to report again within so many seconds; ``math.inf`` takes the promise back."""
        self._promises[name] = (self._clock(), within)

    def overdue(self) -> list[str]:
        """One line for each task that has not kept its promise."""
        now = self._clock()
        return [
            f"{name} has not reported for {now - reported:.0f} s (promised {within:g} s)"
            for name, (reported, within) in sorted(self._promises.copy().items())
            if now > reported + within
        ]

    def wait(self, *ticks: tuple[Callable[[], None], float]) -> None:
        """Block until ``stop``, calling each of ``ticks`` about every so many seconds, rather too often."""
        pause = min(_NAP, *(every for _, every in ticks)) if ticks else _NAP
        naps = 0
        while not self.stop.wait(pause):
            naps += 1
            for tick, every in ticks:
                if naps % int(every / pause) == 0:
                    tick()

    def shutdown(self, within: float = 0.8) -> list[str]:
        """Cancel every task, wait for them so many seconds altogether, and name those that go on."""
        deadline = time.monotonic() + within
        with self._lock:
            self.stop.set()
            tasks = tuple(self._tasks)
        for task in tasks:
            # In a thread each: one that blocks or fails must not take the others' time.
            threading.Thread(target=_cancel, args=(task,), daemon=True).start()
        for task in tasks:
            task.thread.join(max(0.0, deadline - time.monotonic()))
        return [task.thread.name for task in tasks if task.thread.is_alive()]

    def handle_signals(self) -> None:
        """Let the first SIGINT or SIGTERM request a stop and the second one kill. Main thread only."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, signal.SIG_DFL)
        # The handler interrupts the main thread anywhere, also where it holds a lock that this needs:
        # that of ``stop`` while it waits, that of ``threading`` while it starts a task. Hence a bare thread.
        _thread.start_new_thread(self.request_stop, (f"got {signal.Signals(number).name}",))

    def _run(self, name: str, run: Callable[[], None], may_end: bool) -> None:
        try:
            run()
        except self._quiet as error:
            self._ended(name, error)
        except BaseException as error:  # a thread must not die in silence, whatever kills it
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
            # An error of ours says all there is to say; any other is a bug, and shows where.
            told = lacking(error) or error
            trace = None if isinstance(told, FlannelError) else error
            log.error("stopping: %s failed: %s", name, told, exc_info=trace)
            self.stop.set()


def _cancel(task: Task) -> None:
    try:
        task.cancel()
    except Exception:
        log.exception("cannot cancel %s", task.thread.name)
