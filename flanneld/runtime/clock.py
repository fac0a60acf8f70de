"""The clocks: one that a correction of the wall clock cannot move, and the wall clock."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds since boot, time in suspend included: what is left of a lease runs on while a host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def cpu_time() -> float:
    """Seconds that this thread has computed."""
    return time.thread_time()


def wall() -> float:
    """Seconds since 1970, for comparison with times that the kernel tells. Anybody may set this clock."""
    return time.time()
