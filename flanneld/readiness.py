"""What is missing before this node is ready, and what the start waits for at the moment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from flanneld.errors import Retryable
from flanneld.glog import Once
from flanneld.notify import Notifier
from flanneld.subnet.manager import Cancelled

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_RETRY = 1.0


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

    def patiently(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Try each second until it works, and say why not once. Raises ``Cancelled`` on a stop."""
        while not self._stop.is_set():
            try:
                result = attempt()
            except Retryable as reason:
                self._wait(what, reason)
                continue
            self._waiting.clear()
            if self._once.clear(what):
                log.info("Got %s", what)
            return result
        raise Cancelled

    def _wait(self, what: str, reason: Retryable) -> None:
        self._once.warn(log, what, f"Waiting for {what}: {reason}")
        self._waiting[:] = [f"waiting for {what}: {reason}"]
        self._notifier.status(self._waiting[0])
        self.tell(self._waiting[0])
        self._stop.wait(max(_RETRY, reason.retry_after))
