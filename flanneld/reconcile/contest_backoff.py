"""Telling a repair now and then from a fight with another program."""

from __future__ import annotations

import math
from collections import deque

from flanneld.runtime import clock

#: Repairs to remember: the pause does not grow beyond so many.
_ENOUGH = 32


class ContestBackoff:
    """Tells repairs from a fight: beyond some within a minute, each doubles the pause before the next one.

    The first ``few`` have a short pause after each. A firewall that is reloaded may flush all tables twice,
    each family by itself, and an operator may reload it again. From ``many`` on it is a contest, which ends
    with ``memory`` seconds of peace.
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
        """Note a repair. True when it looks like a fight from now on."""
        self._forget()
        self._repairs.append(clock.now())
        begins = not self._is_contest and len(self._repairs) >= self._many
        self._is_contest |= begins
        return begins

    def is_tried(self) -> bool:
        """Whether it looks like a fight. From any thread."""
        return self._is_contest and not self._is_peace()

    def earliest(self) -> float:
        """When the next repair may be, on the clock of ``clock.now``."""
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
