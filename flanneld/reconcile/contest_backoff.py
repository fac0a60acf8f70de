"""Backoff for repairs that another program keeps undoing."""

from __future__ import annotations

import math
from collections import deque

from flanneld.runtime import clock

#: Repairs to remember, at most. The pause does not grow beyond this number.
_ENOUGH = 32


class ContestBackoff:
    """Backoff of a contested table: frequent repairs within a minute double the pause before the next.

    A short pause follows each of the first ``few`` repairs. A firewall reload may flush all tables twice,
    once for each family, and an operator may reload it again. From ``many`` repairs on the table is
    contested, until ``memory`` seconds pass without a repair.
    """

    def __init__(
        self, memory: float = 60.0, first: float = 0.2, last: float = 30.0, few: int = 4, many: int = 8
    ) -> None:
        self._memory = memory
        self._first = first
        self._last = last
        self._few = few
        self._many = many
        self._repairs: deque[float] = deque(maxlen=max(_ENOUGH, many))
        self._is_contest = False

    def spend(self) -> bool:
        """Record a repair. Return True if the table has become contested with it."""
        self._forget()
        self._repairs.append(clock.now())
        begins = not self._is_contest and len(self._repairs) >= self._many
        self._is_contest |= begins
        return begins

    def is_tried(self) -> bool:
        """Return True if the table is contested. May be called from any thread."""
        return self._is_contest and not self._is_peace()

    def earliest(self) -> float:
        """Return the earliest time of the next repair, on the clock of ``clock.now``."""
        self._forget()
        if not self._repairs:
            return 0.0
        doublings = max(0, len(self._repairs) - self._few)
        return self._repairs[-1] + min(self._first * 2.0**doublings, self._last)

    def _is_peace(self) -> bool:
        last = next(reversed(self._repairs.copy()), -math.inf)
        return clock.now() - last > self._memory

    def _forget(self) -> None:
        if self._is_peace():
            self._repairs.clear()
            self._is_contest = False
        while not self._is_contest and self._repairs and self._repairs[0] < clock.now() - self._memory:
            self._repairs.popleft()
