"""Exponential back-off with jitter, so that nodes do not retry at the same time."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from flanneld.runtime import randomness


class Backoff(Struct):
    """Pauses in seconds, like those of client-go's reflector: jitter adds up to 100 %."""

    first: float = 0.8
    longest: float = 20.0
    factor: float = 2.0
    chance: Callable[[], float] = randomness.fraction
    _next: float = 0.0

    def pause(self) -> float:
        now = self._next or self.first
        self._next = min(now * self.factor, self.longest)
        return now * (1.0 + self.chance())

    def reset(self) -> None:
        self._next = 0.0


class Backoffs:
    """One back-off for each class of failure. A new class starts with the first pause.

    After a long outage the first answer may be a different error, which should be retried soon.
    """

    def __init__(self, make: Callable[[type], Backoff]) -> None:
        self._make = make
        self._known: dict[type, Backoff] = {}

    def pause(self, kind: type) -> float:
        """Return the next pause after a failure of this class, in seconds."""
        if kind not in self._known:
            self._known[kind] = self._make(kind)
        return self._known[kind].pause()

    def reset(self) -> None:
        """Restart every back-off with the first pause."""
        self._known.clear()
