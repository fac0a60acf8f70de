"""Ever longer pauses between attempts, each a little different, so that nodes do not come all at once."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from flanneld.runtime import randomness


class Backoff(Struct):
    """Pauses in seconds, as client-go's reflector makes them: up to as much again by chance."""

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
    """A back-off for each kind of failure, given by its class: a new kind begins with the first pause.

    After a long outage the first answer may be an error of its own. It does not pay for the outage.
    """

    def __init__(self, make: Callable[[type], Backoff]) -> None:
        self._make = make
        self._known: dict[type, Backoff] = {}

    def pause(self, kind: type) -> float:
        """Return the next pause after a failure of this kind, in seconds."""
        if kind not in self._known:
            self._known[kind] = self._make(kind)
        return self._known[kind].pause()

    def reset(self) -> None:
        """Begin with the first pause again, for every kind."""
        self._known.clear()
