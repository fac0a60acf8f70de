"""What is missing before this node is ready, and what the start waits for at the moment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flanneld.backoff import Backoff
from flanneld.errors import Retryable
from flanneld.glog import Once
from flanneld.notify import Notifier
from flanneld.subnet.manager import Cancelled

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: How soon to try again what concerns this host alone, in seconds.
_RETRY = 1.0
#: The store has many nodes: the longer they wait for it, the more rarely they ask, 5 s apart at most.
_ASK_AGAIN = partial(Backoff, first=0.4, longest=2.5, factor=1.2)


class Readiness:
    """Written by the threads that know, read by any. ``tell`` hears why the start waits, each time anew."""

    def __init__(self, stop: threading.Event, notifier: Notifier) -> None:
        self._stop = stop
        self._notifier = notifier
        self._missing = ["no lease yet"]
        self._waiting: list[str] = []
        self._once = Once()
        self.tell: Callable[[str], None] = lambda _reason: None

    def is_ready(self) -> bool:
        return not self._missing

    def missing(self) -> list[str]:
        return list(self._missing)

    def unready(self) -> list[str]:
        """What is missing, and what is waited for."""
        return [*self._missing, *self._waiting]

    def await_peers(self) -> None:
        self._missing[:] = ["the peers are not known yet"]

    def complete(self) -> None:
        self._missing.clear()

    def ask(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Get something out of the store, as ``patiently`` does."""
        return self.patiently(what, attempt, _ASK_AGAIN().pause)

    def patiently(
        self, what: str, attempt: Callable[[], Result], pause: Callable[[], float] = lambda: _RETRY
    ) -> Result:
        """Try until it works, and say why not once. Raises ``Cancelled`` on a stop."""
        while not self._stop.is_set():
            try:
                result = attempt()
            except Retryable as reason:
                self._wait(what, reason, pause())
                continue
            self._waiting.clear()
            if self._once.clear(what):
                log.info("Got %s", what)
            return result
        raise Cancelled

    def _wait(self, what: str, reason: Retryable, pause: float) -> None:
        self._once.warn(log, what, f"Waiting for {what}: {reason}")
        self._waiting[:] = [f"waiting for {what}: {reason}"]
        self._notifier.status(self._waiting[0])
        self.tell(self._waiting[0])
        self._stop.wait(max(pause, reason.retry_after))
