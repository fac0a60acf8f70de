"""urllib3 on sockets that can be cut: connection pools, and the HTTP client of backends.

Loading urllib3 takes 20 ms and 5 MiB, so this module is imported when a request is made. The kubernetes
package brings its own credentials to the pools.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPResponse
from socket import socket
from typing import Any
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct, field
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.response import BaseHTTPResponse
from urllib3.util.ssl_ import create_urllib3_context, resolve_cert_reqs

from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.runtime.sockets.http_connection import Response, failure_text
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, Unreachable, no_heartbeat

#: Seconds between checks of the stop event.
_LOOK_AT_STOP = 0.1


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, interruptible_socket: InterruptibleSocket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interruptible_socket = interruptible_socket
        self.beneath: Response | None = None

    def response_class(  # type: ignore[override] # http.client only calls it
        self, sock: socket, *args: Any, **kwargs: Any
    ) -> HTTPResponse:
        self.beneath = Response.of(sock, None, *args, **kwargs)
        return self.beneath

    def _new_conn(self) -> socket:
        return self._interruptible_socket.connect(self._dns_host, self.port or 0, float(self.timeout or 0))


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class Pool(HTTPConnectionPool):
    """Connection pool on an ``InterruptibleSocket``, given as argument; so is ``TlsPool``."""

    ConnectionCls = _Connection


class TlsPool(HTTPSConnectionPool):
    """Pool that trusts each authority that Go trusts: since Python 3.13 the default refuses some of them."""

    ConnectionCls = _TlsConnection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        context = create_urllib3_context(cert_reqs=resolve_cert_reqs(self.cert_reqs))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not (self.ca_certs or self.ca_cert_dir):
            context.load_default_certs()
        self.conn_kw["ssl_context"] = context


def beneath(response: BaseHTTPResponse) -> Response:
    """Return the response beneath urllib3's. Reading that one would take twice as long for a short piece."""
    connection = response.connection
    assert isinstance(connection, _Connection)
    assert connection.beneath is not None
    return connection.beneath


def cause_beneath(error: HTTPError) -> Exception:
    """Return the exception of the connection that urllib3's wraps."""
    if isinstance(error, ReadTimeoutError):
        return TimeoutError()
    cause = error.args[-1] if error.args else error
    return cause if isinstance(cause, OSError | HTTPException) else Unreachable(str(error))


def body_of(
    response: BaseHTTPResponse, alive: Callable[[], None] = no_heartbeat, longest: int | None = None
) -> bytes:
    """Return the whole body as ``Response.whole`` does, and the connection to its pool."""
    body = beneath(response).whole(alive, longest)
    response.release_conn()
    return body


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
