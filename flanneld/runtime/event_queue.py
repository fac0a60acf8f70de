"""The queue through which other threads reach one that sleeps on file descriptors."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Generic, TypeVar

from flanneld.runtime import clock

Item = TypeVar("Item")

#: Seconds; some times what one event takes, and nothing against what many take.
_PATIENCE = 0.005


class EventQueue(Generic[Item]):
    """Readable, as a file descriptor, while something is in it."""

    def __init__(self) -> None:
        self._items: deque[tuple[float, Item]] = deque()
        #: When the oldest of what was drained last had come.
        self.since = 0.0
        self._settled = threading.Event()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: Item) -> None:
        """Hand something over, and give way until it is dealt with or some milliseconds have passed.

        Would both threads run on at once, they would hold each other up: one interpreter serves both.
        """
        self._settled.clear()
        self._items.append((clock.now(), item))
        os.eventfd_write(self._event, 1)
        self._settled.wait(_PATIENCE)

    def settle(self) -> None:
        """The owner says that what it drained is dealt with."""
        self._settled.set()

    def wake(self) -> None:
        """Make the owner look, though there is nothing new."""
        os.eventfd_write(self._event, 1)

    def drain(self) -> list[Item]:
        """All that has come so far, oldest first."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        items = [self._items.popleft() for _ in range(len(self._items))]
        self.since = items[0][0] if items else self.since
        return [item for _, item in items]
