"""Repeated queries: until an answer is good (``--wait``), or on each change (``--watch``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from flanneld.runtime import waits

T = TypeVar("T")
#: Seconds between two queries of ``until_good``: a start takes a quarter of a second.
_EVERY = 0.2


def until_good(ask: Callable[[], T], is_good: Callable[[T], bool], within: float) -> T:
    """Repeat ``ask`` for at most ``within`` seconds until an answer is good. Return the last answer."""
    answers = [ask()]

    def attempt() -> bool:
        answers[:] = [ask()]
        return is_good(answers[0])

    if within and not is_good(answers[0]):
        waits.until(attempt, within=within, every=_EVERY)
    return answers[0]


def changes(ask: Callable[[], T], seen: Callable[[T], object], every: float) -> Iterator[T]:
    """Call ``ask`` every ``every`` seconds. Yield each answer for which ``seen`` returns a new value."""
    stop, last = threading.Event(), None
    while True:
        answer = ask()
        if (now := seen(answer)) != last:
            last = now
            yield answer
        waits.pause(stop, every)
