"""A clock that a test moves."""

from __future__ import annotations

from flanneld.runtime import clock


class Clock(clock.Clock):
    """Called, it says the time, in seconds; it stands still unless ``time`` is set."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time

    def cpu_time(self) -> float:
        return 0.0

    def wall(self) -> float:
        return self.time
