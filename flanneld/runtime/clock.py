"""Time that a correction of the wall clock cannot move."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds since boot, time in suspend included: what is left of a lease runs on while a host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def cpu_time() -> float:
    """Seconds that this thread has computed."""
    return time.thread_time()


def wall_ns() -> int:
    """Nanoseconds of Unix time, for what other hosts read; a correction moves it."""
    return time.time_ns()
