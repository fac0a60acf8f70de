"""Following a key of etcd through lost connections, lost history and lost clusters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flanneld.compat.glog import V
from flanneld.errors import Cancelled, Retryable
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


class Follower:
    """Watches a key, or all keys in a directory if ``recursive``.

    After each loss of etcd ``start`` reads everything again. Neither a revision nor the cluster's ID tells
    whether etcd was restored from a backup meanwhile: its history may have overtaken ours, and a cluster that
    is restored with the same member URLs and token has the same ID.

    ``pause_time`` is how long to wait after a failure, in seconds. Of an outage the log has its begin, a
    line a minute, and its end.
    """

    def __init__(self, client: Client, path: str, *, recursive: bool, pause_time: float) -> None:
        self._outage = Outage(log, f"Watching {path}", f"Watching {path}: etcd is back")
        self._rereads = Pace()
        self._watcher = client.watcher(path, recursive=recursive, contact=self._outage.answered)
        self._pause_time = pause_time
        self._path = path
        self._stop = threading.Event()

    def run(self, start: Start, news: News, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Deliver what ``start`` and then ``news`` say, until ``cut`` (raises ``Cancelled``)."""
        try:
            self._run(start, news, deliver, alive)
        finally:
            self._watcher.close()

    def reread(self) -> None:
        """Begin with ``start`` again. May be called from any thread."""
        self._watcher.reread()

    def reconnect(self) -> None:
        """Go on over a new connection. May be called from any thread."""
        self._watcher.reconnect()

    def cut(self) -> None:
        """End ``run`` at once. May be called from any thread, repeatedly."""
        self._stop.set()
        self._watcher.cut()

    def _run(self, start: Start, news: News, deliver: Deliver, alive: Callable[[], None]) -> None:
        at: Position | None = None
        started = -self._pause_time
        while True:
            alive()
            events: list[Event] = []
            try:
                if at is None:
                    self._pause_since(started)
                    started = clock.now()
                    events, at = start(self._watcher.client)
                else:
                    events, at = self._poll(at, news)
            except ListAgain as reason:
                if self._rereads.allows(str(reason)):
                    level = V(1) if isinstance(reason, Unsure) else logging.WARNING
                    log.log(level, "Watching %s: %s; reading everything again", self._path, reason)
                at = None
            except Retryable as problem:
                self._outage.failed(problem)
                at = None
                self._pause_since(clock.now())
            if events:
                deliver(events)

    def _poll(self, at: Position, news: News) -> tuple[list[Event], Position]:
        asked = clock.now()
        changes = self._watcher.wait(at)
        self._outage.over()
        if not changes.replies:
            self._pause_since(asked)
        return [event for reply in changes.replies for event in news(reply)], changes.at

    def _pause_since(self, begin: float) -> None:
        """Wait until the pause that began then is over. Nothing is done more often than that in vain."""
        if self._stop.wait(max(0.0, begin + self._pause_time - clock.now())):
            raise Cancelled

    @property
    def problem(self) -> Retryable | None:
        """Why it failed when etcd was asked last, None if it did not. From any thread."""
        return self._outage.problem
