"""Complaints about what is in the store: a few get a line each, many get one line with a count."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection
from itertools import islice

from flanneld.runtime import clock
from flanneld.runtime.outage import PACE

#: Lines about single keys within a minute. More would hide other lines.
FEW = 25
#: Keys that a line about many of them names.
_NAMED = 3


class Complaints:
    """Tells each complaint once, until its text changes or it is cleared. Threads may share it.

    ``one`` and ``several`` are formats: of a line with ``key`` and ``reason``, and of one with ``count``,
    which the first few complaints follow. ``item`` is how they are written there.
    """

    def __init__(
        self,
        log: logging.Logger,
        one: str,
        several: str,
        item: str = "{key}: {reason}",
        now: Callable[[], float] = clock.now,
    ) -> None:
        self._log = log
        self._one = one
        self._several = several
        self._item = item
        self._now = now
        self._lock = threading.Lock()
        #: A hash of each complaint's text. Thousands of texts would take some MB.
        self._known: dict[str, int] = {}
        self._pending: dict[str, str] = {}
        #: When the minute of the last lines began, and what is left of its lines.
        self._since = -math.inf
        self._left = FEW

    def note(self, key: str, reason: object) -> None:
        """Remember a complaint for ``tell`` unless it is known."""
        text = str(reason)
        with self._lock:
            if self._known.get(key) != hash(text):
                self._known[key] = hash(text)
                self._pending[key] = text

    def clear(self, key: str) -> None:
        """Forget a complaint because its cause has gone."""
        with self._lock:
            self._known.pop(key, None)
            self._pending.pop(key, None)

    def retain(self, keys: Collection[str]) -> None:
        """Forget all complaints but those about these keys."""
        with self._lock:
            for key in [key for key in self._known if key not in keys]:
                self._known.pop(key)
                self._pending.pop(key, None)

    def tell(self) -> None:
        """Log what is new. After a few lines the rest waits for a minute, and is one line then."""
        if not self._pending:
            return
        with self._lock:
            lines = self._due()
        for line in lines:
            self._log.warning("%s", line, stacklevel=2)

    def _due(self) -> list[str]:
        now = self._now()
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
