"""Queue from other threads to one that polls file descriptors."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Generic, TypeVar

from flanneld.runtime import clock

Item = TypeVar("Item")

#: Seconds: several times the cost of one event, and negligible against that of many.
_PATIENCE = 0.005


class EventQueue(Generic[Item]):
    """Queue whose file descriptor is readable while it has items."""

    def __init__(self) -> None:
        self._items: deque[tuple[float, Item]] = deque()
        #: Arrival time of the oldest item of the last ``drain``.
        self.since = 0.0
        #: Held from ``put`` until ``settle``. A ``threading.Event`` would take 15 us more for each item.
        self._unsettled = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: Item) -> None:
        """Add an item, then wait until it is processed, at most a few milliseconds.

        Otherwise both threads would compete for the interpreter lock and slow each other down.
        """
        self._unsettled.acquire(blocking=False)
        self._items.append((clock.now(), item))
        os.eventfd_write(self._event, 1)
        self._unsettled.acquire(timeout=_PATIENCE)

    def settle(self) -> None:
        """Mark the drained items as processed. Called by the owner."""
        if self._unsettled.locked():
            self._unsettled.release()

    def wake(self) -> None:
        """Wake the owner without adding an item."""
        os.eventfd_write(self._event, 1)

    def drain(self) -> list[Item]:
        """Return all items, oldest first."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        items = [self._items.popleft() for _ in range(len(self._items))]
        self.since = items[0][0] if items else self.since
        return [item for _, item in items]
