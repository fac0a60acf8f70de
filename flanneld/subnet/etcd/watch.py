"""Following a key of etcd through lost connections, lost history and lost clusters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from flanneld.compat.glog import V
from flanneld.errors import Retryable
from flanneld.model import Event
from flanneld.runtime import clock
from flanneld.runtime.outage import Outage, Pace
from flanneld.subnet.etcd.keys import Client, ListAgain, Position, Reply, Unsure
from flanneld.subnet.manager import Deliver

log = logging.getLogger(__name__)

#: Reads what is there: the events that say so, and where to watch from.
Start = Callable[[Client], tuple[list[Event], Position]]
#: The events that a change means. Raises ``ListAgain`` when only a reading of everything can tell.
News = Callable[[Reply], list[Event]]


class KeyWatchMachine:
    """Watches a key, or all keys in a directory if ``recursive``, step by step.

    ``start`` reads everything, ``news`` understands a change, ``deliver`` takes the events of both.
    After each loss of etcd ``start`` reads everything again. Neither a revision nor the cluster's ID tells
    whether etcd was restored from a backup meanwhile: its history may have overtaken ours, and a cluster that
    is restored with the same member URLs and token has the same ID.

    ``pause_time`` is how long to wait after a failure, in seconds. Of an outage the log has its begin, a
    line a minute, and its end.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        start: Start,
        news: News,
        deliver: Deliver,
        *,
        recursive: bool,
        pause_time: float,
    ) -> None:
        self._outage = Outage(log, f"Watching {path}", f"Watching {path}: etcd is back")
        self._rereads = Pace()
        self._watcher = client.watcher(path, recursive=recursive, contact=self._outage.answered)
        self._start = start
        self._news = news
        self._deliver = deliver
        self._pause_time = pause_time
        self._path = path
        #: How far the history is known; None when everything has to be read.
        self._at: Position | None = None
        self._list_not_before = -math.inf
        self._not_before = -math.inf

    def step(self, now: float) -> float:
        """Read everything, or wait for the next change; return when to step again.

        Raises ``Cancelled`` after ``cut``.
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
        except ListAgain as reason:
            if self._rereads.allows(str(reason)):
                level = V(1) if isinstance(reason, Unsure) else logging.WARNING
                log.log(level, "Watching %s: %s; reading everything again", self._path, reason)
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
        """Return True if the next step waits for a change, False if it asks for something."""
        return self._at is not None

    @property
    def problem(self) -> Retryable | None:
        """Why it failed when etcd was asked last, None if it did not. From any thread."""
        return self._outage.problem

    def reread(self) -> None:
        """Begin with ``start`` again. May be called from any thread."""
        self._watcher.reread()

    def reconnect(self) -> None:
        """Go on over a new connection. May be called from any thread."""
        self._watcher.reconnect()

    def cut(self) -> None:
        """Let ``step`` raise ``Cancelled``, at once. May be called from any thread, repeatedly."""
        self._watcher.cut()

    def close(self) -> None:
        """Give up the connection; for the thread that steps."""
        self._watcher.close()

    def _read(self, at: Position, now: float) -> tuple[list[Event], Position]:
        changes = self._watcher.read(at)
        self._outage.over()
        if not changes.replies:
            self._not_before = now + self._pause_time
        return [event for reply in changes.replies for event in self._news(reply)], changes.at

    def _due(self) -> float:
        """Nothing is done in vain more often than ``pause_time`` allows."""
        return max(self._not_before, self._list_not_before if self._at is None else -math.inf)
