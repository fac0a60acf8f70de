"""Thread loop around a state machine, and the queue through which other threads reach it."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

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
        poll = select.poll()
        for source in (self._wake.fileno(), *self._sources()):
            poll.register(source, select.POLLIN)
        ready = poll.poll(min(_IDLE, max(0.0, when - clock.now())) * 1000)
        if (self._wake.fileno(), select.POLLIN) in ready:
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
