"""Calls of a cloud's API: by its own blocking SDK, at a bearable pace, with answers that may be malformed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from flanneld.backends.cloud.contract import ApiCall, Cloud, CloudError, CloudTerms, ErrorKind
from flanneld.backends.contract import HostServices
from flanneld.errors import FlannelError, Retryable, remembered
from flanneld.runtime import clock
from flanneld.runtime.clock import random_fraction
from flanneld.runtime.waits import Backoff

#: Name of the worker thread for calls.
WORKER = "cloud"
#: Minimum seconds between two audits. Up to a quarter more at random keeps nodes from asking at once.
_AUDIT_PERIOD = 240.0
#: Seconds between attempts of a refused or throttled call: the first pause, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 150.0


def audit_period() -> float:
    """Return the seconds until the next audit."""
    return _AUDIT_PERIOD * (1 + random_fraction() / 4)


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


class SdkCloud(Cloud):
    """Client that makes the SDK's client at the first call.

    It does so again after rejected credentials, so that files, environment and role are read again.
    """

    words: ClassVar[CloudTerms]
    #: Seconds for one call.
    limit: ClassVar[float]

    def __init__(self, services: HostServices) -> None:
        self._services = services
        self._sdk: Any = None

    @abstractmethod
    def _connect(self) -> Any:
        """Return the SDK's client. Raises ``CloudError``, and ``Fatal`` if the SDK is not installed."""

    @abstractmethod
    def _call(self, sdk: Any, call: ApiCall) -> Any:
        """Make a call, in a thread of its own. Raises ``CloudError``."""

    def ask(self, call: ApiCall) -> Mapping[str, Any]:
        """Return the answer. Raises ``CloudError``, and ``Fatal`` if the SDK is not installed."""
        what = f"{self.words.cloud} {call.action}"
        try:
            answer = self._services.call(what, lambda: self._made(call), self.limit)
        except CloudError as failure:
            if failure.trouble is ErrorKind.CREDENTIALS:
                self._sdk = None
            raise
        except Retryable as failure:
            raise self.words.no_answer(call, failure.problem) from None
        except FlannelError:
            raise
        except Exception as failure:  # an SDK may raise any exception for an answer that it cannot parse
            raise self.words.no_answer(call, type(failure).__name__) from failure
        if not isinstance(answer, Mapping):
            raise self.words.no_answer(call, "its answer is no JSON object")
        return answer

    def _made(self, call: ApiCall) -> Any:
        if self._sdk is None:
            self._sdk = self._connect()
        return self._call(self._sdk, call)
