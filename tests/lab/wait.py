"""Waiting for a condition with a deadline, in place of sleeping and hoping.

A deadline ends a test that fails; it never says how quick something is. What has to be told apart from
something slower, such as a repair from the next look at everything, is told apart by what it leaves behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol, TypeVar
from weakref import WeakSet

T = TypeVar("T")

#: How many times as long as on an idle machine things may take, for every deadline of the lab: the machine
#: may be slow, and busy with other tests besides.
PATIENCE = float(os.environ.get("FLANNELD_TEST_PATIENCE", "5"))


class Watched(Protocol):
    """A process without which it makes no sense to wait."""

    def status(self) -> int | None:
        """Its exit status, None while it runs."""

    def failure(self) -> str:
        """Return how it ended by itself with an error, and its last words; "" unless it did."""


#: Processes whose failure ends each wait that has begun before.
WATCHED: WeakSet[Watched] = WeakSet()
#: Seconds between two looks, but never less than a look's CPU time: what is waited for needs the CPU, too.
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1


def wait_for(condition: Callable[[], T], deadline: float = 20, what: str = "the condition") -> T:
    """Poll until ``condition()`` is true and return its value; ``deadline`` is in seconds.

    Raises ``AssertionError`` with ``what`` and the last value when it never was, and at once if a daemon
    fails that ran when the wait began.
    """
    deadline *= PATIENCE
    end = time.monotonic() + deadline
    pause = FIRST_PAUSE
    relied_on = [each for each in WATCHED if each.status() is None]
    while True:
        failures = [failure for each in relied_on if (failure := each.failure())]  # before its last effects
        cost = -_cpu()
        value = condition()
        cost += _cpu()
        if value:
            return value
        if failures:
            raise AssertionError("\n".join([f"{what} cannot come, last value: {value!r}", *failures]))
        if time.monotonic() >= end:
            raise AssertionError(f"waited {deadline:g} s in vain for {what}; last value: {value!r}")
        time.sleep(max(pause, cost))
        pause = min(pause * 1.5, LONGEST_PAUSE)


def _cpu() -> float:
    """Return the CPU time in seconds of this process and its children that have ended."""
    return sum(os.times()[:4])
