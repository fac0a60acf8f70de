"""Watch of a key in etcd that survives lost connections, lost history and replaced clusters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from flanneld.compat.glog import V
from flanneld.errors import Retryable
from flanneld.model import Event
from flanneld.runtime import clock
from flanneld.runtime.complaints import PACE, Once, Outage
from flanneld.subnet.etcd.keys import KeyClient, KeyReply, Position, PossibleGap, RelistNeeded
from flanneld.subnet.store import Deliver

log = logging.getLogger(__name__)

#: Function that reads the current state; returns its events and the position to watch from.
Start = Callable[[KeyClient], tuple[list[Event], Position]]
#: Function that returns the events of a change. Raises ``RelistNeeded`` if everything must be read again.
EventsOf = Callable[[KeyReply], list[Event]]


class KeyWatchMachine:
    """State machine that watches a key, or all keys of a directory if ``recursive``.

    ``start`` reads the current state, ``news`` turns a change into events, ``deliver`` takes the events of
    both.

    After each loss of etcd the state is read again. Neither the revision nor the cluster ID reveals a
    restored backup. The restored history may have overtaken ours. A cluster restored with the same member
    URLs and token has the same ID.

    ``pause_time`` is the delay after a failure, in seconds. An outage is logged at its start, once a minute,
    and at its end.
    """

    def __init__(
        self,
        client: KeyClient,
        path: str,
        start: Start,
        news: EventsOf,
        deliver: Deliver,
        *,
        recursive: bool,
        pause_time: float,
    ) -> None:
        self._outage = Outage(log, f"Watching {path}", f"Watching {path}: etcd is back")
        self._rereads = Once(again=PACE)
        self._watcher = client.watcher(path, recursive=recursive, contact=self._outage.answered)
        self._start = start
        self._news = news
        self._deliver = deliver
        self._pause_time = pause_time
        self._path = path
        #: Position up to which the history is known; None to read the state again.
        self._at: Position | None = None
        self._list_not_before = -math.inf
        self._not_before = -math.inf

    def step(self, now: float) -> float:
        """Read the state or wait for the next change; return the time of the next step.

        Raises ``Cancelled`` after ``cancel``.
        """
        due = self._due()
        if now < due:
            return due
        events: list[Event] = []
        try:
            if self._at is None:
                self._list_not_before = now + self._pause_time
                events, self._at = self._start(self._watcher.client)
            else:
                events, self._at = self._read(self._at, now)
        except RelistNeeded as reason:
            level = V(1) if isinstance(reason, PossibleGap) else logging.WARNING
            self._rereads.warn(log, str(reason), f"Relisting {self._path}: {reason}", level)
            self._at = None
        except Retryable as problem:
            self._outage.failed(problem)
            self._at = None
            self._not_before = clock.now() + self._pause_time
        if events:
            self._deliver(events)
        return self._due()

    @property
    def listens(self) -> bool:
        """True if the next step waits for a change, False if it sends a request."""
        return self._at is not None

    @property
    def problem(self) -> Retryable | None:
        """The failure of the last request, or None. May be read from any thread."""
        return self._outage.problem

    def reread(self) -> None:
        """Read the state again with ``start``. May be called from any thread."""
        self._watcher.reread()

    def reconnect(self) -> None:
        """Continue over a new connection. May be called from any thread."""
        self._watcher.reconnect()

    def cancel(self) -> None:
        """Make ``step`` raise ``Cancelled`` at once. May be called repeatedly, from any thread."""
        self._watcher.cancel()

    def close(self) -> None:
        """Close the connection. Only for the thread that calls ``step``."""
        self._watcher.close()

    def _read(self, at: Position, now: float) -> tuple[list[Event], Position]:
        changes = self._watcher.read(at)
        self._outage.over()
        if not changes.replies:
            self._not_before = now + self._pause_time
        return [event for reply in changes.replies for event in self._news(reply)], changes.at

    def _due(self) -> float:
        """Return the time of the next step, so that failures and relists keep ``pause_time`` apart."""
        return max(self._not_before, self._list_not_before if self._at is None else -math.inf)
