"""List and watch: one loop for every store, over a new source for each list."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from flanneld.compat.glog import V
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Event
from flanneld.runtime import clock
from flanneld.runtime.logs import PACE, Once, Outage
from flanneld.runtime.supervisor import StepLoop
from flanneld.subnet.store import Deliver

log = logging.getLogger(__name__)

At = TypeVar("At")
#: Seconds between two looks whether the cause of a failure is gone.
_LOOK = 0.5
#: Function to call when a watch has begun.
Contact = Callable[[], object]


class RelistNeeded(Retryable):
    """Error for a watch that cannot continue from its position: relist. The text gives the reason."""


class PossibleGap(RelistNeeded):
    """``RelistNeeded`` as a precaution: perhaps no event was lost."""


class Source(Protocol[At]):
    """One list of a store and the changes after it. It is over with its first error."""

    def start(self, resume: At | None) -> tuple[list[Event], At | None]:
        """Read the current state. Return its events, and the position to watch from; None to list again.

        All changes up to ``resume`` were delivered: a store that can prove so may go on from there.
        """
        ...

    def changes(self, after: At) -> tuple[list[Event], At]:
        """Wait for the next changes after a position. The same position without events is a silence.

        Raises ``RelistNeeded`` if changes since then are lost.
        """
        ...

    def cancel(self) -> None:
        """End the current call and refuse each later one. May be called repeatedly, from any thread."""
        ...

    def close(self) -> None:
        """Close the connections. Only for the thread that makes the calls."""
        ...


class ListWatch(Generic[At]):
    """State machine that lists a store and follows its changes. After each loss it lists again.

    ``open_source`` returns the next source. It is given the function to call when a watch has begun, which
    ends an outage. In the log ``name`` is what is watched, and ``back`` the end of an outage. The starts of
    lists, silences and failures keep ``pace`` seconds apart. With ``pause`` that is the time after a failure
    and after a loss. A failure with ``is_cured`` has a shorter one if that returns True.

    An outage is logged at its start, once a minute, and at its end.
    """

    def __init__(
        self,
        open_source: Callable[[Contact], Source[At]],
        name: str,
        *,
        back: str,
        pace: float,
        pause: Callable[[Retryable], float] | None = None,
    ) -> None:
        self.name = name
        self._open = open_source
        self._pace = pace
        self._pause = pause
        self._outage = Outage(log, f"Watching {name}", f"Watching {name}: {back}")
        self._relists = Once(again=PACE)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._source: Source[At] | None = None
        #: Reason why another thread wants a new source. It ends a pause.
        self._cut: RelistNeeded | None = None
        #: Position up to which the changes are known; None to list.
        self.at: At | None = None
        #: The last one, unless another thread wants a list.
        self._resume: At | None = None
        self._list_not_before = -math.inf
        self._not_before = -math.inf
        #: ``Retryable.is_cured`` of the failure that the pause follows.
        self._is_cured: Callable[[], bool] | None = None

    def run(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Step until ``close``. Raises ``Cancelled`` then."""
        loop = StepLoop(lambda now: self.step(now, deliver), stop=self._closed, heartbeat=lambda _: alive())
        self._wake = loop.cancel
        try:
            loop.run()
        finally:
            self._end()
        raise Cancelled

    def step(self, now: float, deliver: Deliver) -> float:
        """List, or wait for the next changes. Return the time of the next step.

        Raises ``Cancelled`` after ``close``.
        """
        due = self._due(now)
        if now < due:
            return due
        self._is_cured = None
        events: list[Event] = []
        try:
            events = self._next(now)
        except RelistNeeded as reason:
            self._end()
            level = V(1) if isinstance(reason, PossibleGap) else logging.WARNING
            # Kubernetes names versions in its reasons, which would be new keys without end.
            kind = "".join(each for each in str(reason) if not each.isdigit())
            self._relists.warn(log, kind, f"Relisting {self.name}: {reason}", level)
            if self._pause is not None and self._cut is None:
                self._not_before = clock.now() + self._pause(reason)
        except Retryable as problem:
            self._end()
            self._outage.failed(problem)
            self._not_before = clock.now() + (self._pause(problem) if self._pause else self._pace)
            self._is_cured = problem.is_cured
        if events:
            deliver(events)
        return self._due(now)

    @property
    def problem(self) -> Retryable | None:
        """The failure of the last request, or None. May be read from any thread."""
        return self._outage.problem

    def reread(self) -> None:
        """List again. May be called from any thread."""
        self._renew(RelistNeeded("requested by the removal guard"))

    def reconnect(self) -> None:
        """List again over a new connection. May be called from any thread."""
        self._renew(PossibleGap("the connection was given up"))

    def close(self) -> None:
        """Make ``step`` raise ``Cancelled`` at once. May be called repeatedly, from any thread."""
        self._closed.set()
        self._renew(None)

    def _next(self, now: float) -> list[Event]:
        source = self._source or self._open_next()
        try:
            if self.at is None:
                self._list_not_before = now + self._pace
                events, at = source.start(self._resume)
                # What was read before another thread asked for a list does not count.
                if self._wants_list():
                    self._check()
            else:
                events, at = source.changes(self.at)
                if events or at != self.at:
                    self._outage.over()
                else:
                    self._not_before = now + self._pace
        except (Cancelled, Retryable):
            self._check()
            raise
        self.at = self._resume = at
        return events

    def _open_next(self) -> Source[At]:
        with self._lock:
            if self._closed.is_set():
                raise Cancelled
            if self._wants_list():
                self._resume = None
            self._cut = None
            self._source = self._open(self._outage.answered)
            return self._source

    def _check(self) -> None:
        """Raise ``Cancelled`` after ``close``, and the reason if another thread wants a new source."""
        if self._closed.is_set():
            raise Cancelled
        if self._cut is not None:
            raise self._cut

    def _wants_list(self) -> bool:
        """Return True if another thread wants a list, and not only a new connection."""
        return self._cut is not None and not isinstance(self._cut, PossibleGap)

    def _renew(self, reason: RelistNeeded | None) -> None:
        with self._lock:
            if not self._wants_list():
                self._cut = reason or self._cut
            if self._source is not None:
                self._source.cancel()
        self._wake()

    def _end(self) -> None:
        with self._lock:
            source, self._source, self.at = self._source, None, None
        if source is not None:
            source.close()

    def _due(self, now: float) -> float:
        """Return the time of the next step."""
        if self._is_cured is not None and self._is_cured():
            self._not_before, self._is_cured = -math.inf, None
        due = max(
            self._not_before if self._cut is None else -math.inf,
            self._list_not_before if self.at is None else -math.inf,
        )
        return due if self._is_cured is None else min(due, now + _LOOK)


class Watches:
    """The running watches of a store. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[ListWatch[Any]] = []
        self._is_closed = False

    @property
    def problem(self) -> Retryable | None:
        """The current failure of a watch, or None."""
        with self._lock:
            return next((each.problem for each in self._running if each.problem), None)

    def run(self, watch: ListWatch[Any], deliver: Deliver, alive: Callable[[], None]) -> None:
        """Run a watch until ``close``. Raises ``Cancelled`` then."""
        with self._lock:
            if self._is_closed:
                raise Cancelled
            self._running.append(watch)
        try:
            watch.run(deliver, alive)
        finally:
            with self._lock:
                self._running.remove(watch)

    def reread(self) -> None:
        with self._lock:
            for watch in self._running:
                watch.reread()

    def reconnect(self) -> None:
        with self._lock:
            for watch in self._running:
                watch.reconnect()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for watch in self._running:
                watch.close()
