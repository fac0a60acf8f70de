"""Readiness of this node: its missing conditions, and what startup waits for."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flanneld.errors import Cancelled, Retryable, cause_of, lacking
from flanneld.runtime import clock
from flanneld.runtime.clock import Backoff
from flanneld.runtime.logs import Once
from flanneld.runtime.process import Notifier

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Upstream's words for a wait, where it logs one.
_UPSTREAM = {"the network config": "Couldn't fetch network config"}
#: Seconds between retries of actions on this host.
_RETRY = 1.0
#: Seconds between checks that the peers are known.
_PEERS_LOOK = 0.02
#: Pauses between requests to the store. They grow to at most 5 s, because many nodes may be waiting for it.
_ASK_AGAIN = partial(Backoff, first=0.4, longest=2.5, factor=1.2)


class Readiness:
    """Readiness, written by the threads involved and read by any. ``tell`` gets the reason of each wait."""

    def __init__(
        self,
        stop: threading.Event,
        notifier: Notifier,
        tell: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._stop = stop
        self._notifier = notifier
        #: By condition. Replaced, never changed, because other threads read it.
        self._missing = {"lease": "no lease yet"}
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._once = Once()
        self._tell = tell

    def is_ready(self) -> bool:
        return not self._missing

    def wait_for_peers(self, within: float) -> bool:
        """Block until the routes to peers exist, for at most ``within`` seconds. Return False on a stop."""
        deadline = clock.now() + within
        while {"lease", "peers"} & self._missing.keys() and clock.now() < deadline:
            if clock.pause(self._stop, _PEERS_LOOK):
                return False
        return not self._stop.is_set()

    def missing(self) -> list[str]:
        return list(self._missing.values())

    def waiting(self) -> list[str]:
        """Return what startup waits for, at most one line."""
        return list(self._waiting)

    def unready(self) -> list[str]:
        """Return the missing conditions, and what startup waits for."""
        return [*self.missing(), *self._waiting]

    def await_peers(self) -> None:
        self._set("peers", "the peers are not known yet")
        self._set("lease", "")

    def complete(self) -> None:
        self._set("peers", "")

    def hold(self, condition: str, problem: str) -> None:
        """Hold readiness back while a condition has a problem; an empty text is none."""
        if self._missing.get(condition, "") != problem:
            self._set(condition, problem)

    def ask(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Call ``attempt`` on the store until it succeeds, as ``patiently`` does."""
        return self.patiently(what, attempt, _ASK_AGAIN().pause)

    def patiently(
        self, what: str, attempt: Callable[[], Result], pause: Callable[[], float] = lambda: _RETRY
    ) -> Result:
        """Retry ``attempt`` until it succeeds, and log the reason once. Raises ``Cancelled`` on a stop.

        An ``OSError`` is retried, too: a dump of the kernel may be interrupted. Raises ``Fatal`` if this
        process lacks a necessary permission.
        """
        while not self._stop.is_set():
            try:
                result = attempt()
            except Retryable as reason:
                self._wait(what, reason, pause())
                continue
            except OSError as failure:
                self._wait(what, _of_this_host(failure), pause())
                continue
            self._waiting.clear()
            if self._once.clear(what):
                log.info("Got %s", what)
            return result
        raise Cancelled

    def _set(self, condition: str, text: str) -> None:
        with self._lock:
            others = {name: line for name, line in self._missing.items() if name != condition}
            self._missing = {**others, condition: text} if text else others

    def _wait(self, what: str, reason: Retryable, pause: float) -> None:
        self._once.warn(log, what, f"{_UPSTREAM.get(what, f'Waiting for {what}')}: {reason}")
        self._waiting[:] = [f"waiting for {what}: {reason}"]
        self._notifier.status(self._waiting[0])
        self._tell(self._waiting[0])
        clock.pause(self._stop, max(pause, reason.retry_after))


def _of_this_host(failure: OSError) -> Retryable:
    lack = lacking(failure)
    if lack and failure.errno != errno.ENOMEM:  # memory may be short only temporarily
        raise lack from failure
    return Retryable(f"this host refuses: {cause_of(failure)}")
