"""Cloud whose API is asked over the cloud's own blocking SDK."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from flanneld.backends.cloud.contract import ApiCall, Cloud, CloudError, CloudTerms, ErrorKind
from flanneld.backends.contract import HostServices
from flanneld.errors import FlannelError, Retryable


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
