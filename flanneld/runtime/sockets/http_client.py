"""HTTP client of backends, with limits on time and size, interrupted when the daemon stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from http.client import HTTPException
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, field

from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.runtime.sockets.http_connection import failure_text
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, Unreachable

#: Seconds between checks of the stop event.
_LOOK_AT_STOP = 0.1


class HttpRequest(Struct, frozen=True, gc=False):
    """A request.

    - ``timeout`` is in seconds, for the whole exchange.
    - ``longest`` is the limit of the response's body in bytes.
    - ``ca_file`` names the trusted certificates; empty for the system's.
    - ``at_exit`` is for requests during the daemon's stop: only ``timeout`` ends them.
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
    """A response of any status. Redirects are not followed. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """HTTP client for any thread, with one connection per request, until ``stop``."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def ask(self, request: HttpRequest) -> HttpAnswer:
        """Return the response. Raises ``Retryable`` if there is none, ``Fatal`` for an invalid URL."""
        url = _parse(request.url)
        where = f"{url.scheme}://{url.hostname}:{_port(url)}"  # The rest of the URL may contain a secret.
        interruptible_socket, done = InterruptibleSocket(), threading.Event()
        deadline = time.monotonic() + request.timeout

        def guard() -> None:
            """Shut the connection down at the deadline, even while data arrives, and at the daemon's stop."""
            while not done.wait(max(0.0, min(_LOOK_AT_STOP, deadline - time.monotonic()))):
                if time.monotonic() >= deadline or (self._stop.is_set() and not request.at_exit):
                    interruptible_socket.cancel()
                    return

        threading.Thread(target=guard, name="http deadline", daemon=True).start()
        try:
            return _exchange(request, url, interruptible_socket)
        except Cancelled:
            raise _no_answer(where, f"no whole answer within {request.timeout:g} s") from None
        except (HTTPException, OSError, Unreachable) as error:
            raise _no_answer(where, failure_text(error, request.timeout)) from None
        finally:
            done.set()
            interruptible_socket.disconnect()


def _exchange(
    request: HttpRequest, url: SplitResult, interruptible_socket: InterruptibleSocket
) -> HttpAnswer:
    from urllib3.exceptions import HTTPError  # takes 30 ms, so imported on demand

    from flanneld.runtime.sockets.connection_pools import Pool, TlsPool, body_of, cause_beneath

    host = url.hostname or ""
    pool: Pool | TlsPool
    if url.scheme == "https":
        authorities = request.ca_file or None
        pool = TlsPool(host, _port(url), interruptible_socket=interruptible_socket, ca_certs=authorities)
    else:
        pool = Pool(host, _port(url), interruptible_socket=interruptible_socket)
    try:
        with pool.urlopen(
            request.method,
            (url.path or "/") + (f"?{url.query}" if url.query else ""),
            body=request.body,
            headers=dict(request.headers),
            retries=False,
            redirect=False,
            preload_content=False,
            timeout=request.timeout + 1,  # beyond the deadline of guard()
        ) as response:
            body = body_of(response, longest=request.longest)
            interruptible_socket.check()  # without a length, a truncated body looks complete
            headers = {name.lower(): value for name, value in response.headers.items()}
            return HttpAnswer(response.status, headers, body)
    except HTTPError as error:
        interruptible_socket.check()
        raise cause_beneath(error) from None
    finally:
        pool.close()


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        is_fine = parts.scheme in ("http", "https") and bool(host) and host.isascii() and _port(parts) > 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise Fatal("a request has no http or https URL", "correct Backend in the network config")
    return parts


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _no_answer(where: str, reason: str) -> Retryable:
    return Retryable(f"{where} does not answer: {reason}", "see whether it is up and reachable")
