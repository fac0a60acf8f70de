"""HTTP requests of backends: bounded in time and size, and cut when the daemon stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, field

from flanneld.errors import Cancelled, Fatal, Retryable, cause_of
from flanneld.runtime.interruptible_socket import InterruptibleSocket, Unreachable

#: Seconds between two looks at the stop event.
_LOOK_AT_STOP = 0.1


class HttpRequest(Struct, frozen=True, gc=False):
    """A request. ``timeout`` is in seconds, for all of it; ``longest`` in bytes, for the body of the answer.

    ``ca_file`` names the certificates that vouch for the server, empty for those of the system. ``at_exit``
    is for what has to be done while the daemon stops: only ``timeout`` ends it then.
    """

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    timeout: float = 10.0
    longest: int = 1 << 20
    ca_file: str = ""
    at_exit: bool = False
    #: Changes nothing, whatever its method: a dry run makes it, too.
    harmless: bool = False


class HttpAnswer(Struct, frozen=True, gc=False):
    """An answer of any status; redirects are not followed. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Makes requests for any thread, each over a connection of its own, until ``stop``."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def ask(self, request: HttpRequest) -> HttpAnswer:
        """Return the answer. Raises ``Retryable`` if there is none, ``Fatal`` if the URL names no server."""
        url = _parse(request.url)
        where = f"{url.scheme}://{url.hostname}:{_port(url)}"  # The rest of the URL may hold a secret.
        line, done = InterruptibleSocket(), threading.Event()
        deadline = time.monotonic() + request.timeout

        def guard() -> None:
            """Cut the connection at the deadline, even while data comes in, and when the daemon stops."""
            while not done.wait(max(0.0, min(_LOOK_AT_STOP, deadline - time.monotonic()))):
                if time.monotonic() >= deadline or (self._stop.is_set() and not request.at_exit):
                    line.cut()
                    return

        threading.Thread(target=guard, name="http deadline", daemon=True).start()
        try:
            return _exchange(request, url, line)
        except Cancelled:
            raise _no_answer(where, f"no whole answer within {request.timeout:g} s") from None
        except (HTTPException, OSError, Unreachable, UnicodeError) as error:
            raise _no_answer(where, _reason(error)) from None
        finally:
            done.set()
            line.drop()


def _exchange(request: HttpRequest, url: SplitResult, line: InterruptibleSocket) -> HttpAnswer:
    from urllib3.exceptions import HTTPError  # 30 ms, for those who ask

    from flanneld.runtime.connection_pools import Pool, TlsPool, body_of

    host = url.hostname or ""
    if url.scheme == "https":
        import ssl

        context = ssl.create_default_context(cafile=request.ca_file or None)
        pool: Pool | TlsPool = TlsPool(host, _port(url), line=line, ssl_context=context)
    else:
        pool = Pool(host, _port(url), line=line)
    try:
        with pool.urlopen(
            request.method,
            (url.path or "/") + (f"?{url.query}" if url.query else ""),
            body=request.body,
            headers=dict(request.headers),
            retries=False,
            redirect=False,
            preload_content=False,
            timeout=request.timeout + 1,  # The connection is cut before that.
        ) as response:
            body = body_of(response, longest=request.longest)
            line.check()  # A body without a length looks whole when it was cut.
            headers = {name.lower(): value for name, value in response.headers.items()}
            return HttpAnswer(response.status, headers, body)
    except HTTPError as error:
        line.check()
        cause = error.args[-1] if error.args else error
        raise (cause if isinstance(cause, OSError | HTTPException) else OSError(str(error))) from None
    finally:
        pool.close()


def _reason(error: Exception) -> str:
    """Return what went wrong, without a word of the server's."""
    from flanneld.runtime.connection_pools import Endless

    if isinstance(error, RemoteDisconnected | IncompleteRead):
        return "it broke the connection"
    if isinstance(error, HTTPException) and not isinstance(error, Endless):
        return "it does not speak HTTP"
    return cause_of(error)


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and _port(parts) > 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise Fatal("a request has no http or https URL", "correct Backend in the network config")
    return parts


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _no_answer(where: str, reason: str) -> Retryable:
    return Retryable(f"{where} does not answer: {reason}", "see whether it is up and reachable")
