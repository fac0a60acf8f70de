"""Waits that have an end: for a stop, for a descriptor, for an attempt that succeeds."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

from flanneld.runtime import clock


def pause(stop: threading.Event, seconds: float | None = None) -> bool:
    """Wait for ``stop``, at most so many seconds; return True if it is set."""
    return stop.wait(seconds)


def until(
    attempt: Callable[[], bool], *, within: float, every: float, stop: threading.Event | None = None
) -> bool:
    """Try every so many seconds; return False once the time is over or ``stop`` is set."""
    stop = stop or threading.Event()
    deadline = clock.now() + within
    while not attempt():
        if clock.now() > deadline or stop.wait(every):
            return False
    return True


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor can be read, at most so many seconds; return True if it can."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
