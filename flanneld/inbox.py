"""The queue through which other threads reach one that sleeps on file descriptors."""

from __future__ import annotations

import os
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Readable, as a file descriptor, while something is in it."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def put(self, item: Item) -> None:
        self._items.append(item)
        os.eventfd_write(self._event, 1)

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
