"""Log messages about what lasts or repeats, at a limited rate: one by one, in batches, and about outages."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Hashable
from itertools import islice
from typing import Generic, TypeVar

from flanneld.errors import Retryable, remembered, shown
from flanneld.runtime import clock

Item = TypeVar("Item")

#: Seconds between repetitions of a message.
PACE = 60.0
#: Lines about single keys per minute. More would hide other lines.
FEW = 25
#: Keys named in a line with a count.
_NAMED = 3


class Once:
    """Warnings by key, logged once until their text changes or they are cleared. Threads may share it.

    After ``again`` seconds a warning is repeated. It remembers ``limit`` keys. Further warnings are dropped,
    after one line that says so.
    """

    def __init__(self, limit: int = 10_000, again: float = math.inf) -> None:
        self._limit = limit
        self._again = again
        self._lock = threading.Lock()
        #: The last text, and the time of its next repetition.
        self._said: dict[Hashable, tuple[str, float]] = {}
        self._full = False

    def warn(self, log: logging.Logger, key: Hashable, text: str, level: int = logging.WARNING) -> None:
        """Log a warning with the caller's source line, unless it is the last one for this key."""
        with self._lock:
            news = self._news(key, text)
        if news:
            log.log(level, "%s", news, stacklevel=2)

    def __bool__(self) -> bool:
        """Return True if a warning is remembered."""
        return bool(self._said)

    def clear(self, key: Hashable) -> bool:
        """Forget a warning, because its cause is gone. Return True if there was one."""
        with self._lock:
            known = self._said.pop(key, None) is not None
            self._full = self._full and not known
        return known

    def _news(self, key: Hashable, text: str) -> str:
        now = clock.now()
        said, until = self._said.get(key, ("", now))
        if said == text and now < until:
            return ""
        if key in self._said or len(self._said) < self._limit:
            self._said[key] = text, now + self._again
            return text
        if self._full:
            return ""
        self._full = True
        return f"more than {self._limit} complaints are open; others are left out until one is settled"


class LogBatch(Generic[Item]):
    """Log lines, at most ``few`` in each ``period`` seconds. For one thread.

    What exceeds them waits for the next period, and shares one line if it is still too much. ``one`` makes
    the line of an item, ``several`` that of many.
    """

    def __init__(
        self,
        log: logging.Logger,
        level: int,
        several: Callable[[Collection[Item]], str],
        one: Callable[[Item], str] = str,
        few: int = FEW,
        period: float = PACE,
    ) -> None:
        self._log = log
        self._level = level
        self._several = several
        self._one = one
        self._few = self._left = few
        self._period = period
        self._period_end = -math.inf
        self._waiting: dict[Hashable, Item] = {}

    @property
    def due(self) -> float:
        """Time of the next ``write`` that is needed; infinity if nothing waits."""
        return self._period_end if self._waiting else math.inf

    def add(self, item: Item, key: Hashable = None) -> None:
        """Queue an item for ``write``, in the place of the one with its key."""
        self._waiting[object() if key is None else key] = item

    def write(self, now: float) -> None:
        """Log what may be logged by now."""
        for line in self._lines(now):
            self._log.log(self._level, "%s", line, stacklevel=2)

    def _lines(self, now: float) -> list[str]:
        items = self._waiting.values()
        if items and now >= self._period_end:
            self._left, self._period_end = self._few, now + self._period
        if len(items) <= self._left:
            lines = [self._one(item) for item in items]
        elif self._left == self._few:
            lines = [self._several(items)]
        else:
            return []
        self._left -= min(len(items), self._left)
        self._waiting = {}
        return lines


class BatchedWarnings(LogBatch[tuple[str, str]]):
    """Warnings by key, logged once until their text changes or they are cleared. Threads may share it.

    ``one`` is the format of a line with ``key`` and ``reason``. ``several`` is that of a line with ``count``,
    to which the first few warnings are appended in the format ``item``.
    """

    def __init__(self, log: logging.Logger, one: str, several: str, item: str = "{key}: {reason}") -> None:
        def line_of_many(found: Collection[tuple[str, str]]) -> str:
            named = [item.format(key=key, reason=reason) for key, reason in islice(found, _NAMED)]
            return f"{several.format(count=len(found))}: {'; '.join(named)}; and {len(found) - _NAMED} more"

        def line(found: tuple[str, str]) -> str:
            return one.format(key=found[0], reason=found[1])

        super().__init__(log, logging.WARNING, line_of_many, line)
        self._lock = threading.Lock()
        #: Hash of each warning's text. Thousands of texts would take some MB.
        self._known: dict[str, int] = {}

    def note(self, key: str, reason: object) -> None:
        """Queue a warning for ``flush`` unless it is known."""
        text = str(reason)
        with self._lock:
            if self._known.get(key) != hash(text):
                self._known[key] = hash(text)
                self.add((shown(key), text), key)

    def clear(self, key: str) -> None:
        """Forget the warning about a key, whose cause is gone."""
        with self._lock:
            self._known.pop(key, None)
            self._waiting.pop(key, None)

    def retain(self, keys: Collection[str]) -> None:
        """Forget all warnings except those about these keys."""
        for key in [key for key in self._known.copy() if key not in keys]:
            self.clear(key)

    def flush(self) -> None:
        """Log new warnings. Beyond the limit they wait for the next minute and share one line."""
        if self._waiting:
            with self._lock:
                lines = self._lines(clock.now())
            for line in lines:
                self._log.warning("%s", line, stacklevel=2)


class Outage:
    """Log of one outage: its start, one line a minute while it lasts, and its end.

    A failure of another kind, such as a refusal after silence, has a line at once. The reason follows
    ``failing`` in the log. For one thread; ``problem`` may be read from any.
    """

    def __init__(self, log: logging.Logger, failing: str, working: str) -> None:
        self._log = log
        self._failing = failing
        self._working = working
        self._said = -math.inf
        #: Kinds of failures that were logged since then.
        self._kinds: set[type[Retryable]] = set()
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
        if now - self._said >= PACE:
            self._said, self._kinds = now, set()
        if type(reason) not in self._kinds:
            self._kinds.add(type(reason))
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
        self._said = -math.inf
        return self._works()

    def _works(self) -> bool:
        since, self._since = self._since, None
        self._problem = None
        told, self._is_told = self._is_told, False
        if told and since is not None:
            lasted = clock.now() - since
            self._log.info("%s after %.0f s", self._working, lasted, stacklevel=3)
        return told
