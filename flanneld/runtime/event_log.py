"""Recent log events, kept in memory for the status.

The log reports each change once, so its last lines are the history.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

#: Number of events, and characters of each.
LIMIT, LENGTH = 200, 400


#: Seconds since the epoch, glog's severity letter, name of the source file, text.
Event = tuple[float, str, str, str]


class Events(logging.Handler):
    """Ring buffer of the log at level INFO and above, without ``-v``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._ring: deque[Event] = deque(maxlen=LIMIT)

    def emit(self, record: logging.LogRecord) -> None:
        # The handler that writes the log reports a wrong format string.
        with suppress(TypeError, ValueError, KeyError):
            text = record.getMessage()[:LENGTH]
            self._ring.append((record.created, record.levelname[0], record.module, text))

    def recent(self) -> list[Event]:
        """Return the events, oldest first. May be called from any thread."""
        return list(self._ring.copy())


def remember() -> Events:
    """Install and return the ring buffer."""
    events = Events()
    logging.getLogger().addHandler(events)
    return events
