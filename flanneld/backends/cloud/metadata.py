"""Client of a cloud's metadata service, which describes the instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import quote

from msgspec import Struct

from flanneld.backends.cloud.contract import CloudError, ErrorKind
from flanneld.errors import Retryable
from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

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
