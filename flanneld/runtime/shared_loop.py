"""One thread for the stepped machines of several tasks, each of which fails and ends by itself."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from flanneld.runtime import clock

#: Seconds between two steps of a machine that wants nothing, so that its heartbeat goes on.
_IDLE = 30.0


class SharedLoop:
    """Thread that steps its members one after the other; a member's exception ends that member only."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._members: list[SharedSteps] = []
        self._is_closed = False

    def member(
        self,
        step: Callable[[float], float],
        sources: Callable[[], Iterable[int]] = tuple,
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
    ) -> SharedSteps:
        """Return what takes the place of a ``StepLoop`` with these arguments."""
        return SharedSteps(self, step, sources, stop, heartbeat)

    def run(self) -> None:
        """Step the members until ``close``."""
        while not self._is_closed:
            now = clock.now()
            for each in self._current():
                each.take_turn(now)
            self._sleep(self._current())
        for each in self._current():
            each.end()

    def close(self) -> None:
        """End ``run``. From any thread."""
        self._is_closed = True
        self.wake()

    def wake(self) -> None:
        """End the wait for news. From any thread."""
        os.eventfd_write(self._wake, 1)

    def join(self, member: SharedSteps) -> None:
        """Step a member from now on."""
        with self._lock:
            self._members.append(member)
        self.wake()

    def _current(self) -> list[SharedSteps]:
        with self._lock:
            self._members = [each for each in self._members if not each.has_ended]
            return list(self._members)

    def _sleep(self, members: list[SharedSteps]) -> None:
        """Wait for a member's time, or for one of its sources; who has news is due at once."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        owners = {source: each for each in members for source in each.sources() if source >= 0}
        for source in owners:
            poll.register(source, select.POLLIN)
        due = min((each.due for each in members), default=float("inf"))
        for source, _ in poll.poll(min(_IDLE, max(0.0, due - clock.now())) * 1000):
            if source in owners:
                owners[source].due = 0.0
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)


class SharedSteps:
    """A member. Its task waits in ``run`` while the shared thread steps it."""

    def __init__(
        self,
        loop: SharedLoop,
        step: Callable[[float], float],
        sources: Callable[[], Iterable[int]],
        stop: threading.Event,
        heartbeat: Callable[[float], None],
    ) -> None:
        self.sources = sources
        #: When it wants to be stepped next, on ``clock.now``.
        self.due = 0.0
        self._loop = loop
        self._step = step
        self._stop = stop
        self._heartbeat = heartbeat
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._is_cancelled = False

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def run(self) -> None:
        """Return once ``stop`` is set and the last step is over. Raises what a step raised."""
        self._loop.join(self)
        self._ended.wait()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """End the wait. From any thread."""
        self._is_cancelled = True
        self._loop.wake()

    def is_alive(self) -> None:
        """Send a heartbeat."""
        self._heartbeat(4 * _IDLE)

    def take_turn(self, now: float) -> None:
        """Step if that is due; for the shared thread."""
        if self._stop.is_set():
            self.end()
            return
        self.is_alive()
        is_cancelled, self._is_cancelled = self._is_cancelled, False
        if now < self.due and not is_cancelled:
            return
        try:
            self.due = self._step(now)
        except BaseException as failure:  # its own task tells of it
            self._failure = failure
            self.end()

    def end(self) -> None:
        """Let ``run`` return; for the shared thread."""
        self._ended.set()
