"""Rate-limited log messages about problems that last: outages, and unusable objects in the store."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Hashable
from itertools import islice

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


#: Lines about single keys per minute. More would hide other lines.
FEW = 25
#: Keys named in a line with a count.
_NAMED = 3


class BatchedWarnings:
    """Warnings by key, logged once until their text changes or they are cleared. Threads may share it.

    ``one`` is the format of a line with ``key`` and ``reason``. ``several`` is that of a line with ``count``,
    to which the first few warnings are appended in the format ``item``.
    """

    def __init__(self, log: logging.Logger, one: str, several: str, item: str = "{key}: {reason}") -> None:
        self._log = log
        self._one = one
        self._several = several
        self._item = item
        self._lock = threading.Lock()
        #: Hash of each warning's text. Thousands of texts would take some MB.
        self._known: dict[str, int] = {}
        self._pending: dict[str, str] = {}
        #: Start of the current minute, and the lines left in it.
        self._since = -math.inf
        self._left = FEW

    def note(self, key: str, reason: object) -> None:
        """Queue a warning for ``flush`` unless it is known."""
        text = str(reason)
        with self._lock:
            if self._known.get(key) != hash(text):
                self._known[key] = hash(text)
                self._pending[key] = text

    def clear(self, key: str) -> None:
        """Forget the warning about a key, whose cause is gone."""
        with self._lock:
            self._known.pop(key, None)
            self._pending.pop(key, None)

    def retain(self, keys: Collection[str]) -> None:
        """Forget all warnings except those about these keys."""
        with self._lock:
            for key in [key for key in self._known if key not in keys]:
                self._known.pop(key)
                self._pending.pop(key, None)

    def flush(self) -> None:
        """Log new warnings. Beyond the limit they wait for the next minute and share one line."""
        if not self._pending:
            return
        with self._lock:
            lines = self._due()
        for line in lines:
            self._log.warning("%s", line, stacklevel=2)

    def _due(self) -> list[str]:
        now = clock.now()
        if now - self._since >= PACE:
            self._since, self._left = now, FEW
        pending, found = self._pending, len(self._pending)
        if found <= self._left:
            lines = [self._one.format(key=key, reason=reason) for key, reason in pending.items()]
        elif self._left == FEW:
            named = [
                self._item.format(key=key, reason=reason) for key, reason in islice(pending.items(), _NAMED)
            ]
            lines = [f"{self._several.format(count=found)}: {'; '.join(named)}; and {found - _NAMED} more"]
        else:
            return []
        self._left -= min(found, self._left)
        self._pending = {}
        return lines
