"""Rate-limited warnings about objects in the store: one line each, or a count if there are many."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection
from itertools import islice

from flanneld.runtime import clock
from flanneld.runtime.logs.outage import PACE

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
