"""Waits with a time limit: for a stop, a descriptor, or a call that cannot be cut; and pauses that grow."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from msgspec import Struct

from flanneld.errors import Retryable
from flanneld.runtime import clock
from flanneld.runtime.clock import random_fraction


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


class Backoff(Struct):
    """Pauses in seconds, like those of client-go's reflector: jitter adds up to 100 %."""

    first: float = 0.8
    longest: float = 20.0
    factor: float = 2.0
    chance: Callable[[], float] = random_fraction
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


Result = TypeVar("Result")

#: Seconds between two looks at the stop event.
_LOOK_AT_STOP = 0.1


class DetachedCalls:
    """Makes calls for any thread, until ``stop``."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def run(self, what: str, act: Callable[[], Result], timeout: float) -> Result:
        """Return what ``act`` returns, or raise what it raises.

        Raises ``Retryable`` after ``timeout`` seconds, or when the daemon stops; ``what`` is for its message.
        The call then goes on in its thread, and what comes of it counts for nothing.
        """
        results: list[Result] = []
        failures: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                results.append(act())
            except BaseException as failure:  # it belongs to the caller, whatever it is
                failures.append(failure)
            finally:
                done.set()

        threading.Thread(target=run, name=what, daemon=True).start()
        deadline = clock.now() + timeout
        while not done.wait(_LOOK_AT_STOP):
            if self._stop.is_set():
                raise Retryable(f"{what} was left: the daemon stops")
            if clock.now() > deadline:
                raise Retryable(f"{what} has not ended within {timeout:g} s", "see whether it is reachable")
        if failures:
            raise failures[0]
        return results[0]


T = TypeVar("T")


class _Failed(Struct, frozen=True):
    error: BaseException


class StreamReader(Generic[T]):
    """Thread that reads ``items`` until that raises. Closing the underlying connection ends it."""

    def __init__(self, name: str, items: Iterable[T]) -> None:
        self._heard: SimpleQueue[T | _Failed] = SimpleQueue()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, args=(items,), name=name, daemon=True).start()

    def read(self, timeout: float, most: int) -> list[T]:
        """Return the items that have come or come next, at most ``most``; none after ``timeout`` seconds.

        Raises what reading raised, after the items before it.
        """
        items: list[T] = []
        with suppress(Empty):
            while len(items) < most and self._failure is None:
                item = self._heard.get(timeout=0.0 if items else timeout)
                if isinstance(item, _Failed):
                    self._failure = item.error
                else:
                    items.append(item)
        if self._failure is not None and not items:
            raise self._failure
        return items

    def _run(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                self._heard.put(item)
        except BaseException as error:
            self._heard.put(_Failed(error))
        else:
            self._heard.put(_Failed(EOFError()))
