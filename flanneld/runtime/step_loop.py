"""Thread loop around a state machine: it waits, and calls ``step``."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from flanneld.runtime import clock

#: Seconds between two steps without work, for the heartbeat.
_IDLE = 30.0


class Loop(Protocol):
    """Thread's part of a stepped machine, whichever thread that is."""

    def run(self) -> None: ...

    def cancel(self) -> None: ...


class MakeLoop(Protocol):
    """``StepLoop``, or what steps the machine in a thread that it shares."""

    def __call__(
        self,
        step: Callable[[float], float],
        sources: Callable[[], Iterable[int]] = tuple,
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
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
        self._wake = -1
        self._step = step
        self._sources = sources
        self._stop = stop
        self._heartbeat = heartbeat
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def run(self) -> None:
        """Step until ``stop`` is set."""
        while not self._stop.is_set():
            self.is_alive()
            due = self._step(clock.now())
            if due > clock.now():
                self._sleep_until(due)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # A default argument, because at interpreter exit the module's names are gone.
        if self._wake >= 0:
            close(self._wake)

    def is_alive(self) -> None:
        """Send a heartbeat. A step that does several things calls this after each."""
        self._heartbeat(4 * _IDLE)

    def cancel(self) -> None:
        """End the current wait. May be called from any thread."""
        os.eventfd_write(self._wake, 1)

    def _sleep_until(self, when: float) -> None:
        poll = select.poll()
        for source in (self._wake, *self._sources()):
            poll.register(source, select.POLLIN)
        ready = poll.poll(min(_IDLE, max(0.0, when - clock.now())) * 1000)
        if (self._wake, select.POLLIN) in ready:
            os.eventfd_read(self._wake)
