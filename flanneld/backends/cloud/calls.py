"""Calls of a cloud's API by its own blocking SDK, pages and malformed answers; and its metadata service."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from flanneld.backends.cloud.contract import ApiCall, Cloud, CloudError, CloudTerms, ErrorKind
from flanneld.backends.contract import HostServices
from flanneld.errors import FlannelError, Retryable, remembered
from flanneld.runtime import clock
from flanneld.runtime.clock import random_fraction
from flanneld.runtime.waits import Backoff

if TYPE_CHECKING:
    from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

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


# ---- the metadata service, which describes the instance -----------------------------------------


#: Seconds for one answer, as in upstream.
_TIME_LIMIT = 5.0


class MetadataSession(Struct, frozen=True):
    """Session parameters of the service: the path of the token, and the headers to get and to use it."""

    path: str
    lifetime_header: str
    header: str
    seconds: int = 21600


class Metadata:
    """Client that reads values below ``url``, with a session ``token`` if the service supports it."""

    def __init__(
        self,
        http: Callable[[HttpRequest], HttpAnswer],
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        token: MetadataSession | None = None,
    ) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._token = token

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> str:
        """Return one value without surrounding white space. Raises ``CloudError``."""
        headers = self._session() if headers is None else headers
        answer = self._ask("GET", path, headers)
        if answer.status != 200:
            raise _wrong(f"{self._url}/{path}", f"answers with {answer.status}")
        return answer.body.decode(errors="replace").strip()

    def read(self, *paths: str) -> list[str]:
        """Return several values, none of them empty. Raises ``CloudError``."""
        headers = self._session()
        values = [self.get(path, headers) for path in paths]
        for path, value in zip(paths, values, strict=True):
            if not value:
                raise _wrong(f"{self._url}/{path}", "answers with nothing")
        return values

    def _session(self) -> Mapping[str, str]:
        """Return the headers for a request; none for a service without sessions, as in its first version."""
        if self._token is None:
            return self._headers
        lifetime = {self._token.lifetime_header: str(self._token.seconds)}
        answer = self._ask("PUT", self._token.path, lifetime)
        if answer.status != 200:
            return self._headers
        return {**self._headers, self._token.header: answer.body.decode(errors="replace").strip()}

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> HttpAnswer:
        from flanneld.runtime.sockets.http_client import HttpRequest

        url = f"{self._url}/{quote(path, safe='/:')}"
        request = HttpRequest(method, url, headers, timeout=_TIME_LIMIT, longest=1 << 16, harmless=True)
        try:
            return self._http(request)
        except Retryable as failure:
            raise CloudError(
                ErrorKind.OTHER,
                f"the metadata service does not answer: {failure.problem}",
                "run flanneld on an instance of this cloud, and let it reach the service",
            ) from None


def _wrong(url: str, what: str) -> CloudError:
    return CloudError(
        ErrorKind.OTHER,
        f"the metadata service {what} at {url}",
        "see whether it is enabled for this instance",
    )


# ---- pages of lists in answers, and batches of lists in calls -----------------------------------

Item = TypeVar("Item")
Ask = Callable[[ApiCall], Mapping[str, Any]]

#: Objects in one call that every cloud accepts and returns.
BATCH = 100
#: Pages of one list, at most: a cloud that repeats a page for ever must not block the daemon.
_MOST_PAGES = 1000


def by_token(ask: Ask, call: ApiCall, given: str, taken: str) -> Iterator[Mapping[str, Any]]:
    """Yield each page. Field ``given`` of an answer is the token for parameter ``taken`` of the next call."""
    token = ""
    for _ in range(_MOST_PAGES):
        more = {taken: token} if token else {}
        page = ask(replace(call, parameters={**call.parameters, **more}))
        yield page
        following = page.get(given) or ""
        if not following or following == token:
            return
        token = str(following)


def by_offset(ask: Ask, call: ApiCall, listed: str) -> Iterator[Mapping[str, Any]]:
    """Yield each item of the list ``listed``, paged by Offset and Limit."""
    for number in range(_MOST_PAGES):
        part = {"Offset": str(number * BATCH), "Limit": str(BATCH)}
        items = ask(replace(call, parameters={**call.parameters, **part})).get(listed) or ()
        yield from items
        if len(items) < BATCH:
            return


def batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield parts of a list that fit into one call."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
