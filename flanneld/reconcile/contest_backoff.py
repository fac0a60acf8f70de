"""Telling a repair now and then from a fight with another program."""

from __future__ import annotations

from collections import deque

from flanneld.runtime import clock


class ContestBackoff:
    """Tells repairs from a fight: beyond some within a minute, each doubles the pause before the next one.

    The first ``few`` have a short pause after each. A firewall that is reloaded may flush all tables twice,
    each family by itself, and an operator may reload it again.
    """

    def __init__(
        self, memory: float = 60.0, first: float = 0.2, last: float = 30.0, few: int = 4, many: int = 8
    ) -> None:
        self._memory = memory
        self._first = first
        self._last = last
        self._few = few
        self._many = many
        self._repairs: deque[float] = deque()

    def spend(self) -> bool:
        """Note a repair. True when there are so many now that it looks like a fight."""
        self._forget()
        self._repairs.append(clock.now())
        return len(self._repairs) == self._many

    def is_tried(self) -> bool:
        """Whether there were so many lately. From any thread."""
        since = clock.now() - self._memory
        return sum(repair >= since for repair in self._repairs.copy()) >= self._many

    def earliest(self) -> float:
        """When the next repair may be, on the clock of ``clock.now``."""
        self._forget()
        if not self._repairs:
            return 0.0
        doublings = max(0, len(self._repairs) - self._few)
        return self._repairs[-1] + min(self._first * 2.0**doublings, self._last)

    def _forget(self) -> None:
        while self._repairs and self._repairs[0] < clock.now() - self._memory:
            self._repairs.popleft()
