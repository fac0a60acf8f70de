"""Client connection to the first server that answers. Another thread can cut it."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import TypeVar

from msgspec import Struct

from flanneld.errors import Retryable, printable
from flanneld.option_values import RemoteServer
from flanneld.runtime.sockets.http_connection import BROKEN, HttpConnection, failure_text
from flanneld.runtime.sockets.interruptible import Unreachable
from flanneld.subnet.failover import Failover, ServerFailed, ServerRing
from flanneld.subnet.remote.credentials import JoinToken, fingerprint_of
from flanneld.subnet.remote.wire import INDEX, SECRET

#: Seconds to connect, with the TLS handshake. Go flannel 0.6.2 waits 30; the next server may be up.
CONNECT_TIME = 5.0
#: Seconds for an answer's head: a server asks each of its etcd members in turn.
ANSWER_TIME = 30.0
#: Seconds after which an unused connection is replaced: a firewall may have forgotten it.
IDLE = 30.0
_CHECK = "see whether flanneld -listen runs there, and whether both sides use TLS"

T = TypeVar("T")


class RemoteServers(ServerRing[RemoteServer]):
    """Servers in the given order, shared by all connections of a client.

    ``token`` reads the required token, None without one; it may raise ``Retryable``. ``secret`` is this
    node's, sent with a token only.
    """

    def __init__(
        self,
        servers: tuple[RemoteServer, ...],
        tls: ssl.SSLContext | None,
        token: Callable[[], JoinToken | None] = lambda: None,
    ) -> None:
        super().__init__(servers, "no flannel server answers", "no flannel server is of use", _CHECK)
        self.tls = tls
        self.token = token
        self.secret = ""


class RemoteRequest(Struct, frozen=True, gc=False):
    """Request. With ``alive`` the first byte of the answer has no time limit.

    ``alive`` is called at least every minute then, and the end of the connection ends the request. The kernel
    detects a lost server.
    """

    method: str
    target: str
    body: str | None = None
    alive: Callable[[], None] | None = None


class RemoteAnswer(Struct, frozen=True, gc=False):
    """Answer. ``date_ns`` is the server's time in nanoseconds of Unix time; None without one."""

    status: int
    body: bytes
    date_ns: int | None
    server: RemoteServer


class RemoteClient:
    """Client for one thread at a time; any thread may ``reconnect`` or ``cancel`` it."""

    def __init__(self, servers: RemoteServers) -> None:
        self._requests = Failover(servers, _Connection(servers), IDLE)
        self.reconnect = self._requests.reconnect
        self.cancel = self._requests.cancel
        self.close = self._requests.close

    def ask(
        self,
        method: str,
        target: str,
        body: str | None = None,
        alive: Callable[[], None] | None = None,
        *,
        understand: Callable[[RemoteAnswer], T],
    ) -> T:
        """Send a request to the servers in turn until ``understand`` can read an answer; return the result.

        ``understand`` raises ``ServerFailed`` if the next server is to be asked. A request may be sent twice,
        because all requests are idempotent for their node. One with ``alive``, for which see
        ``RemoteRequest``, is sent once. Raises ``Retryable`` if all servers fail.
        """
        request = RemoteRequest(method, target, body, alive)
        return self._requests.ask(lambda _, send: understand(send(request)), repeatable=alive is None)


class _Connection:
    """``ServerConnection`` to a flannel server."""

    def __init__(self, servers: RemoteServers) -> None:
        self._servers = servers
        self._connection = HttpConnection(servers.tls)
        self._token: JoinToken | None = None
        self.disconnect = self._connection.disconnect
        self.cancel = self._connection.cancel
        self.check = self._connection.check
        self.reset = self._connection.reset

    def exchange(self, server: RemoteServer, request: RemoteRequest) -> RemoteAnswer:
        limit, is_sent = CONNECT_TIME, False
        try:
            if not self._connection.is_open:
                self._connect(server)
            limit, is_sent = ANSWER_TIME, True
            response = self._connection.request(
                request.method, request.target, request.body, self._headers(request), limit, request.alive
            )
            return RemoteAnswer(response.status, response.whole(), _date_ns(response), server)
        except (OSError, HTTPException, Unreachable) as error:
            problem = failure_text(error, limit)
            raise ServerFailed(problem, sent=is_sent, lost=problem == BROKEN) from None

    def _headers(self, request: RemoteRequest) -> dict[str, str]:
        headers = {INDEX: "yes"}
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        if self._token is not None:
            headers["Authorization"] = self._token.bearer
            if self._servers.secret:
                headers[SECRET] = self._servers.secret
        return headers

    def _connect(self, server: RemoteServer) -> None:
        self._token = self._servers.token()
        sock = self._connection.connect(server.host, server.port, CONNECT_TIME)
        # The token is sent only to the server with this certificate.
        found = sock.getpeercert(True) if isinstance(sock, ssl.SSLSocket) else None
        if self._token is not None and fingerprint_of(found or b"") != self._token.fingerprint:
            raise ServerFailed("its certificate is not the one in the token", sent=False)


def _date_ns(response: HTTPResponse) -> int | None:
    try:
        return int(parsedate_to_datetime(response.getheader("Date", "")).timestamp()) * 1_000_000_000
    except (ValueError, TypeError, OverflowError):
        return None


def accepted(answer: RemoteAnswer) -> RemoteAnswer:
    """Return an answer with status 200. Raises ``ServerFailed`` or ``Retryable`` for any other."""
    if answer.status == 200:
        return answer
    text = printable(" ".join(answer.body[:300].decode(errors="replace").split()))
    if 400 <= answer.status < 500:
        problem = f"flannel server {answer.server.name} refuses: {text} (HTTP {answer.status})"
        raise Retryable(problem, "see its log")
    # Another server may have a better view of etcd, and one that redirects is none.
    raise ServerFailed(f"HTTP {answer.status}, {text}", "see its log", kind=Retryable)


def nonsense(problem: str) -> ServerFailed:
    """Return the error for an answer that is not a flannel server's."""
    return ServerFailed(f"invalid answer: {problem}", "is that a server of flannel?")
