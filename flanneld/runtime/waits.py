"""Waits with a time limit: for a stop, a descriptor, or a successful attempt."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable

from flanneld.runtime import clock


def pause(stop: threading.Event, seconds: float | None = None) -> bool:
    """Wait for ``stop``, at most ``seconds``. Return True if it is set."""
    return stop.wait(seconds)


def until(
    attempt: Callable[[], bool], *, within: float, every: float, stop: threading.Event | None = None
) -> bool:
    """Call ``attempt`` every ``every`` seconds until it returns True.

    Return False after ``within`` seconds or if ``stop`` is set.
    """
    stop = stop or threading.Event()
    deadline = clock.now() + within
    while not attempt():
        if clock.now() > deadline or stop.wait(every):
            return False
    return True


class Signal:
    """Lock around a changing object, with a wait for its next change. For any number of threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def __enter__(self) -> None:
        self._condition.__enter__()

    def __exit__(self, *_: object) -> None:
        self._condition.release()

    def notify_all(self) -> None:
        """Wake all waiting threads. Requires the lock."""
        self._condition.notify_all()

    def heard(self, seconds: float) -> bool:
        """Wait for ``notify_all``, at most ``seconds``, with the lock released. Return True if it came."""
        return self._condition.wait(seconds)


def hung_up(fd: int) -> bool:
    """Return True if the peer has closed its half of the connection."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor is readable, at most ``seconds``. Return True if it is."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def some_readable(fds: Iterable[int], seconds: float) -> list[int]:
    """Wait until one of the descriptors is readable or has an error, at most ``seconds``. Return those."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(seconds * 1000)]
