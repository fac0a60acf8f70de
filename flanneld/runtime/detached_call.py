"""Calls into libraries that block and cannot be cut: each in a thread that may be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from flanneld.errors import Retryable
from flanneld.runtime import clock

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
