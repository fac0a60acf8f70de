"""Thread around a stepped machine: it waits, and calls ``step``."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from flanneld.runtime import clock

#: Seconds between two steps of a machine that wants nothing, so that its heartbeat goes on.
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
    """Thread's part of a stepped machine: it waits between two steps.

    ``step(now)`` returns when it wants to be called again, in seconds on ``clock.now``.

    ``sources`` are file descriptors that end the wait as well; they are asked for before each wait.
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
            self._sleep_until(self._step(clock.now()))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # An argument, for at the end of the process the module has lost its names.
        if self._wake >= 0:
            close(self._wake)

    def is_alive(self) -> None:
        """Promise to report again; for a step that does several things, after each of them."""
        self._heartbeat(4 * _IDLE)

    def cancel(self) -> None:
        """End the wait. From any thread."""
        os.eventfd_write(self._wake, 1)

    def _sleep_until(self, when: float) -> None:
        poll = select.poll()
        for source in (self._wake, *self._sources()):
            poll.register(source, select.POLLIN)
        poll.poll(min(_IDLE, max(0.0, when - clock.now())) * 1000)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
