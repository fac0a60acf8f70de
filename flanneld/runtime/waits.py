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


class Signal:
    """A lock around something that changes, and the wait for its next change. For any number of threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def __enter__(self) -> None:
        self._condition.__enter__()

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    def tell(self) -> None:
        """Wake all that wait; with the lock held."""
        self._condition.notify_all()

    def heard(self, seconds: float) -> bool:
        """Wait for ``tell``, at most so long, without the lock meanwhile; return True if it came."""
        return self._condition.wait(seconds)


def hung_up(fd: int) -> bool:
    """Return True if the other end of a connection has closed its half."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor can be read, at most so many seconds; return True if it can."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
