"""What happened lately: the last lines of the log, kept for whoever asks.

The log says once what has changed, so it is the history already; this only remembers the end of it.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

#: So many events, each of so many characters, are remembered.
LIMIT, LENGTH = 200, 400


#: Seconds since the epoch, the severity as glog abbreviates it, the source file's name, the text.
Event = tuple[float, str, str, str]


class Events(logging.Handler):
    """A ring of what is logged without ``-v``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._ring: deque[Event] = deque(maxlen=LIMIT)

    def emit(self, record: logging.LogRecord) -> None:
        # A wrong format string is reported by the handler that writes the log.
        with suppress(TypeError, ValueError, KeyError):
            text = record.getMessage()[:LENGTH]
            self._ring.append((record.created, record.levelname[0], record.module, text))

    def recent(self) -> list[Event]:
        """Oldest first. From any thread."""
        return list(self._ring.copy())


def remember() -> Events:
    """Begin to remember what is logged."""
    events = Events()
    logging.getLogger().addHandler(events)
    return events
