"""The queue through which other threads reach one that sleeps on file descriptors."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Seconds; some times what one event takes, and nothing against what many take.
_PATIENCE = 0.005


class Inbox(Generic[Item]):
    """Readable, as a file descriptor, while something is in it."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._settled = threading.Event()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: Item) -> None:
        """Hand something over, and give way until it is dealt with or some milliseconds have passed.

        Would both threads run on at once, they would hold each other up: one interpreter serves both.
        """
        self._settled.clear()
        self._items.append(item)
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
        return [self._items.popleft() for _ in range(len(self._items))]
