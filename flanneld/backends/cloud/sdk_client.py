"""Client of a cloud's API over the cloud's own blocking SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flanneld.backends.cloud.contract import ApiCall, CloudError, CloudTerms, ErrorKind
from flanneld.backends.contract import HostServices
from flanneld.errors import FlannelError, Retryable


class SdkClient:
    """Client with a limit of ``limit`` seconds for each call.

    ``connect`` makes the SDK's client at the first call. It does so again after rejected credentials, so that
    files, environment and role are read again. ``make`` makes a call with it, and raises ``CloudError``.
    """

    def __init__(
        self,
        services: HostServices,
        words: CloudTerms,
        limit: float,
        connect: Callable[[], Any],
        make: Callable[[Any, ApiCall], Any],
    ) -> None:
        self._services = services
        self._words = words
        self._limit = limit
        self._connect = connect
        self._make = make
        self._sdk: Any = None

    def ask(self, call: ApiCall) -> Mapping[str, Any]:
        """Return the answer. Raises ``CloudError``, and ``Fatal`` if the SDK is not installed."""
        what = f"{self._words.cloud} {call.action}"
        try:
            answer = self._services.call(what, lambda: self._made(call), self._limit)
        except CloudError as failure:
            if failure.trouble is ErrorKind.CREDENTIALS:
                self._sdk = None
            raise
        except Retryable as failure:
            raise self._words.no_answer(call, failure.problem) from None
        except FlannelError:
            raise
        except Exception as failure:  # an SDK may raise any exception for an answer that it cannot parse
            raise self._words.no_answer(call, type(failure).__name__) from failure
        if not isinstance(answer, Mapping):
            raise self._words.no_answer(call, "its answer is no JSON object")
        return answer

    def _made(self, call: ApiCall) -> Any:
        if self._sdk is None:
            self._sdk = self._connect()
        return self._make(self._sdk, call)
