"""Pace of calls to a cloud, and handling of malformed answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from flanneld.backends.cloud.contract import CloudError, ErrorKind
from flanneld.errors import Retryable, remembered
from flanneld.runtime import clock, randomness
from flanneld.runtime.waits import Backoff

#: Name of the worker thread for calls.
WORKER = "cloud"
#: Minimum seconds between two audits. Up to a quarter more at random keeps nodes from asking at once.
_AUDIT_PERIOD = 240.0
#: Seconds between attempts of a refused or throttled call: the first pause, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 150.0


def audit_period() -> float:
    """Return the seconds until the next audit."""
    return _AUDIT_PERIOD * (1 + randomness.fraction() / 4)


class CallBackoff:
    """Backoff for one kind of refused call: during a pause the last refusal is raised again."""

    def __init__(self) -> None:
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._until = -math.inf
        self._problem: Retryable | None = None

    def check(self) -> None:
        """Raise the last refusal again during its pause."""
        if self._problem is not None and clock.now() < self._until:
            raise self._problem

    def refused(self, problem: Retryable) -> None:
        self._problem, self._until = remembered(problem), clock.now() + self._backoff.pause()

    def succeeded(self) -> None:
        self._problem = None
        self._backoff.reset()


@contextmanager
def understood() -> Iterator[None]:
    """Run the block, which parses an answer. Raises ``CloudError`` for a malformed one."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CloudError(
            ErrorKind.OTHER,
            f"the cloud's answer has no known shape ({type(error).__name__})",
            "see whether a proxy answers in its place, and look for a newer flanneld",
        ) from error


@contextmanager
def absence_is_fine() -> Iterator[None]:
    """Run the block, which removes an object. A missing object is no error."""
    try:
        yield
    except CloudError as failure:
        if failure.trouble is not ErrorKind.ABSENT:
            raise
