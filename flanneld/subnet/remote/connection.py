"""Client connection to the first server that answers. Another thread can cut it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse

from msgspec import Struct

from flanneld.errors import NoAnswer, Retryable, cause_of, printable
from flanneld.option_values import RemoteServer
from flanneld.runtime.sockets.host_addresses import HostAddresses
from flanneld.runtime.sockets.http_connection import HttpConnection
from flanneld.runtime.sockets.interruptible import TooSlow, Unreachable
from flanneld.subnet.remote.credentials import JoinToken, fingerprint_of
from flanneld.subnet.remote.wire import INDEX, SECRET

#: Seconds to connect, with the TLS handshake. Go flannel 0.6.2 waits 30; the next server may be up.
CONNECT_TIME = 5.0
#: Seconds for an answer's head: a server asks each of its etcd members in turn.
ANSWER_TIME = 30.0
_CHECK = "see whether flanneld -listen runs there, and whether both sides use TLS"


class RemoteServers:
    """Servers in the given order, with the last good one; shared by all connections of a client.

    ``token`` reads the required token, None without one; it may raise ``Retryable``. ``secret`` is this
    node's, sent with a token only.
    """

    def __init__(
        self,
        servers: tuple[RemoteServer, ...],
        tls: ssl.SSLContext | None,
        token: Callable[[], JoinToken | None] = lambda: None,
    ) -> None:
        self.servers = servers
        self.tls = tls
        self.token = token
        self.secret = ""
        self.good = 0
        self.name = ", ".join(map(str, servers))
        self.addresses = HostAddresses(lambda: [server.host for server in servers])

    def skip(self, server: RemoteServer) -> None:
        """Begin with the next server from now on, if ``server`` is still the first."""
        if self.servers[self.good] is server:
            self.good = (self.good + 1) % len(self.servers)


class RemoteAnswer(Struct, frozen=True, gc=False):
    """Answer. ``date_ns`` is the server's time in nanoseconds of Unix time; None without one."""

    status: int
    body: bytes
    date_ns: int | None
    server: RemoteServer


class WrongCertificate(OSError):
    """Error if the server's certificate is not the one in the token."""


class RemoteConnection:
    """Connection for one thread at a time; any thread may ``disconnect`` or ``cancel`` it."""

    def __init__(self, servers: RemoteServers) -> None:
        self._servers = servers
        self._connection = HttpConnection(servers.tls)
        self._turn = threading.Lock()
        self._server: RemoteServer | None = None
        self._token: JoinToken | None = None

    def ask(
        self, method: str, target: str, body: str | None = None, alive: Callable[[], None] | None = None
    ) -> RemoteAnswer:
        """Send a request to the servers in turn, the last good one first. Raises ``NoAnswer`` if all fail.

        A request may be sent twice, because all requests are idempotent for their node. With ``alive`` the
        first byte of the answer has no time limit: ``alive`` is called at least every minute, and the end of
        the connection ends the request. The kernel detects a lost server.
        """
        with self._turn:
            problems = []
            for _ in self._servers.servers:
                server = self._servers.servers[self._servers.good]
                self._connection.check()
                try:
                    return self._ask_again(server, method, target, body, alive)
                except (OSError, HTTPException, Unreachable) as error:
                    self.reset()
                    self._connection.check()
                    problems.append(f"{server}: {_reason(error)}")
                    if alive is None or isinstance(error, TimeoutError):
                        self._servers.skip(server)
                if alive is not None:
                    break
            raise NoAnswer(f"no flannel server answers ({'; '.join(problems)})", _CHECK)

    def disconnect(self) -> None:
        """End the connection; the next request makes another. From any thread."""
        self._connection.disconnect()

    def cancel(self) -> None:
        """End the connection and refuse another. From any thread, repeatedly."""
        self._connection.cancel()

    def reset(self) -> None:
        """End the connection; for the thread that uses it."""
        self._connection.reset()

    def _ask_again(
        self,
        server: RemoteServer,
        method: str,
        target: str,
        body: str | None,
        alive: Callable[[], None] | None,
    ) -> RemoteAnswer:
        """Send a request, again over a new connection if the server has closed an idle one."""
        if self._connection.is_open and self._server is server:
            try:
                return self._exchange(server, method, target, body, alive)
            except (OSError, HTTPException) as error:
                self._connection.check()
                if alive is not None or isinstance(error, TimeoutError):
                    raise
        self.reset()
        return self._exchange(server, method, target, body, alive)

    def _exchange(
        self,
        server: RemoteServer,
        method: str,
        target: str,
        body: str | None,
        alive: Callable[[], None] | None,
    ) -> RemoteAnswer:
        if not self._connection.is_open or self._server is not server:
            self._connect(server)
        headers = {INDEX: "yes"} | ({"Content-Type": "application/json"} if body is not None else {})
        if self._token is not None:
            headers["Authorization"] = self._token.bearer
            if self._servers.secret:
                headers[SECRET] = self._servers.secret
        response = self._connection.request(method, target, body, headers, ANSWER_TIME, alive)
        return RemoteAnswer(response.status, response.whole(), _date_ns(response), server)

    def _connect(self, server: RemoteServer) -> None:
        self._token, self._server = self._servers.token(), server
        sock = self._connection.connect(server.host, server.port, CONNECT_TIME)
        # The token is sent only to the server with this certificate.
        found = sock.getpeercert(True) if isinstance(sock, ssl.SSLSocket) else None
        if self._token is not None and fingerprint_of(found or b"") != self._token.fingerprint:
            raise WrongCertificate


def _date_ns(response: HTTPResponse) -> int | None:
    try:
        return int(parsedate_to_datetime(response.getheader("Date", "")).timestamp()) * 1_000_000_000
    except (ValueError, TypeError, OverflowError):
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, WrongCertificate):
        return "its certificate is not the one in the token"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or "TLS failed").lower().replace("_", " ")
    if isinstance(error, TooSlow):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, Unreachable):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        return cause_of(error).lower()
    return "it broke the connection" if isinstance(error, ConnectionError) else "it does not speak HTTP"


def refused(answer: RemoteAnswer) -> Retryable:
    """Return the error for an answer other than 200."""
    text = " ".join(answer.body[:300].decode(errors="replace").split())
    return Retryable(
        f"flannel server {answer.server} refuses: {printable(text)} (HTTP {answer.status})", "see its log"
    )
