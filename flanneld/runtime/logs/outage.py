"""Log messages about failures that last."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable

from flanneld.errors import Retryable, remembered
from flanneld.runtime import clock

#: Seconds between repetitions of a message.
PACE = 60.0


class LogRateLimit:
    """Rate limit of one message a minute per key. For one thread and few keys."""

    def __init__(self) -> None:
        self._said: dict[Hashable, float] = {}

    def allows(self, what: Hashable) -> bool:
        """Return True if the message may be logged now, and record that it was."""
        now = clock.now()
        if now - self._said.get(what, -math.inf) < PACE:
            return False
        self._said[what] = now
        return True

    def forget(self, what: Hashable) -> None:
        """Allow the next message at once."""
        self._said.pop(what, None)


class Outage:
    """Log of one outage: its start, one line a minute while it lasts, and its end.

    The reason follows ``failing`` in the log. For one thread; ``problem`` may be read from any.
    """

    def __init__(self, log: logging.Logger, failing: str, working: str) -> None:
        self._log = log
        self._failing = failing
        self._working = working
        self._pace = LogRateLimit()
        self._since: float | None = None
        self._problem: Retryable | None = None
        self._is_told = False

    @property
    def problem(self) -> Retryable | None:
        """The last failure, None since the last success."""
        return self._problem

    def failed(self, reason: Retryable) -> None:
        """Record a failure."""
        now = clock.now()
        self._problem = remembered(reason)
        if self._since is None:
            self._since = now
        if self._pace.allows(self._failing):
            lasted = now - self._since
            since = f" (for {lasted:.0f} s now)" if lasted >= 1 else ""
            self._log.warning("%s: %s%s", self._failing, reason, since, stacklevel=2)
            self._is_told = True

    def answered(self) -> bool:
        """Record an apparent success; log the end if the start was logged. Return True if so.

        A failure soon after counts as the same outage, so that an intermittent one does not fill the log.
        """
        return self._works()

    def over(self) -> bool:
        """Record a definite success: the next failure is a new outage. Returns as ``answered``."""
        self._pace.forget(self._failing)
        return self._works()

    def _works(self) -> bool:
        since, self._since = self._since, None
        self._problem = None
        told, self._is_told = self._is_told, False
        if told and since is not None:
            lasted = clock.now() - since
            self._log.info("%s after %.0f s", self._working, lasted, stacklevel=3)
        return told
