"""Readiness of this node: what is missing for it, and what the start waits for at the moment."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flanneld.compat.glog import Once
from flanneld.errors import Cancelled, Retryable, cause_of, lacking
from flanneld.runtime import clock, waits
from flanneld.runtime.backoff import Backoff
from flanneld.runtime.sd_notify import Notifier

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: How soon to try again what concerns this host alone, in seconds.
_RETRY = 1.0
#: How often to look whether the peers are known, in seconds.
_PEERS_LOOK = 0.02
#: The store has many nodes: the longer they wait for it, the more rarely they ask, 5 s apart at most.
_ASK_AGAIN = partial(Backoff, first=0.4, longest=2.5, factor=1.2)


class Readiness:
    """Written by the threads that know, read by any. ``tell`` is called with the reason at each wait."""

    def __init__(
        self,
        stop: threading.Event,
        notifier: Notifier,
        tell: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._stop = stop
        self._notifier = notifier
        #: By the condition. Replaced, never changed: others read it.
        self._missing = {"lease": "no lease yet"}
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._once = Once()
        self._tell = tell

    def is_ready(self) -> bool:
        return not self._missing

    def wait_for_peers(self, within: float) -> bool:
        """Block until the routes to the peers are there, for at most ``within`` seconds; False on a stop."""
        deadline = clock.now() + within
        while {"lease", "peers"} & self._missing.keys() and clock.now() < deadline:
            if waits.pause(self._stop, _PEERS_LOOK):
                return False
        return not self._stop.is_set()

    def missing(self) -> list[str]:
        return list(self._missing.values())

    def waiting(self) -> list[str]:
        """Return why the start waits, at most one line."""
        return list(self._waiting)

    def unready(self) -> list[str]:
        """What is missing, and what is waited for."""
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
        """Get something out of the store, as ``patiently`` does."""
        return self.patiently(what, attempt, _ASK_AGAIN().pause)

    def patiently(
        self, what: str, attempt: Callable[[], Result], pause: Callable[[], float] = lambda: _RETRY
    ) -> Result:
        """Try until it works, and say why not once. Raises ``Cancelled`` on a stop.

        An ``OSError``, as for a dump of the kernel that was interrupted, is tried again too. Raises ``Fatal``
        if this process may not have what it needs.
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
        self._once.warn(log, what, f"Waiting for {what}: {reason}")
        self._waiting[:] = [f"waiting for {what}: {reason}"]
        self._notifier.status(self._waiting[0])
        self._tell(self._waiting[0])
        waits.pause(self._stop, max(pause, reason.retry_after))


def _of_this_host(failure: OSError) -> Retryable:
    lack = lacking(failure)
    if lack and failure.errno != errno.ENOMEM:  # that the kernel may say for a moment
        raise lack from failure
    return Retryable(f"this host refuses: {cause_of(failure)}")
