"""Questions that are asked again: until the answer is good, or for as long as somebody watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from flanneld.runtime import waits

T = TypeVar("T")
#: Seconds between two questions of ``until_good``: a start takes a quarter of a second.
_EVERY = 0.2


def until_good(ask: Callable[[], T], is_good: Callable[[T], bool], within: float) -> T:
    """Ask once, then for at most ``within`` seconds until an answer is good; return the last answer."""
    answers = [ask()]

    def attempt() -> bool:
        answers[:] = [ask()]
        return is_good(answers[0])

    if within and not is_good(answers[0]):
        waits.until(attempt, within=within, every=_EVERY)
    return answers[0]


def changes(ask: Callable[[], T], seen: Callable[[T], object], every: float) -> Iterator[T]:
    """Ask each ``every`` seconds, without end; yield an answer if ``seen`` of it differs from the last."""
    stop, last = threading.Event(), None
    while True:
        answer = ask()
        if (now := seen(answer)) != last:
            last = now
            yield answer
        waits.pause(stop, every)
