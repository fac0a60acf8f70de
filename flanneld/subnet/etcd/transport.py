"""Servers of an etcd cluster, and requests to them with failover, timeouts and cancellation."""

from __future__ import annotations

import json
import logging
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct
from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.errors import Fatal, Retryable
from flanneld.option_values import url_parts
from flanneld.runtime.clock import shuffle
from flanneld.runtime.sockets.http_connection import (
    BROKEN,
    HttpConnection,
    LineStream,
    LiveBody,
    Response,
    ResponseTooLarge,
    TlsFiles,
    client_context,
    failure_text,
)
from flanneld.runtime.sockets.interruptible import TooSlow, UnknownName, Unreachable
from flanneld.subnet.etcd.keys import Position
from flanneld.subnet.failover import Failover, ServerFailed, ServerRing

log = logging.getLogger(__name__)


# ---- endpoints, TLS files and credentials, checked once at startup -------------------------------

#: Function that reorders a list in place, as ``random.shuffle`` does.
Shuffle = Callable[[list[Any]], None]

_DEFAULT_PORTS = {"http": 80, "https": 443}


class EtcdOptions(Struct, frozen=True, gc=False):
    """Command line options ``-etcd-*``, as given. Its repr shows no password.

    ``transport`` is the protocol for v3: "json", "grpc", or "auto" for JSON with gRPC as fallback.
    """

    endpoints: tuple[str, ...]
    prefix: str = "/coreos.com/network"
    username: str = ""
    password: str = ""
    keyfile: str = ""
    certfile: str = ""
    cafile: str = ""
    transport: str = "auto"

    def __repr__(self) -> str:
        return f"EtcdOptions({self.prefix})"


class Server(Struct, frozen=True, gc=False):
    """One endpoint. ``name`` is its URL without credentials."""

    name: str
    scheme: str
    host: str
    port: int
    path: str
    username: str = ""
    password: str = ""

    def basic_login(self) -> dict[str, str]:
        """Return the header for HTTP basic authentication in v2; none without a user."""
        if not self.username:
            return {}
        token = b64encode(f"{self.username}:{self.password}".encode()).decode()
        return {"Authorization": f"Basic {token}"}

    def __repr__(self) -> str:
        return f"Server({self.name})"


class Servers(ServerRing[Server]):
    """The configured endpoints, shuffled once.

    Endpoints that etcd advertises may be unreachable and are not used.

    Connects to nothing. Raises ``Fatal`` for unusable endpoints or TLS files.
    """

    def __init__(self, options: EtcdOptions, shuffle: Shuffle = shuffle) -> None:
        servers = [_server(url, number, options) for number, url in enumerate(options.endpoints, 1)]
        schemes = {server.scheme for server in servers}
        if len(schemes) != 1:
            problem = "mixes http and https" if schemes else "is empty"
            raise Fatal(
                f"-etcd-endpoints {problem}", "give client URLs of one kind, like https://10.0.0.1:2379"
            )
        files = TlsFiles(options.certfile, options.keyfile, options.cafile, "-etcd")
        context = client_context(files) if files or "https" in schemes else None
        self.tls = context if "https" in schemes else None
        self.options = options
        shuffle(servers)
        remedy = "is that etcd? check -etcd-endpoints"
        super().__init__(servers, "etcd does not answer", "etcd answers, but is unusable", remedy)


def _default_scheme(options: EtcdOptions) -> str:
    """Return the scheme of an endpoint without one.

    In etcd's v3 client the first endpoint decides for all. If it has no scheme either, Go flanneld speaks TLS
    if it has a certificate and its key (clientv3 ``dialWithBalancer``, ``translateEndpoint``).
    """
    scheme, separator, _ = options.endpoints[0].partition("://")
    if separator:
        return scheme.lower()
    return "https" if options.certfile and options.keyfile else "http"


def _server(url: str, number: int, options: EtcdOptions) -> Server:
    parts = url_parts(url)
    host = parts.hostname if parts else None
    if parts is None or not host or not host.isascii():
        # The URL itself is not shown: it may contain a password.
        raise Fatal(
            f"element {number} of -etcd-endpoints is no URL", "give client URLs like http://10.0.0.1:2379"
        )
    scheme, path = parts.scheme or _default_scheme(options), parts.path.rstrip("/")
    port = parts.port or _DEFAULT_PORTS[scheme]
    name = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}"
    user, password = options.username, options.password
    if not user and parts.username:
        user, password = unquote(parts.username), unquote(parts.password or "")
    return Server(name, scheme, host, port, path, user, password)


# ---- requests ------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """An HTTP response; ``body`` is None for a watch that ended without a change.

    ``at`` is taken from the headers, which only v2 sends.
    """

    server: str
    status: int
    at: Position
    content_type: str = ""
    location: str = ""
    body: bytes | None = None

    def __repr__(self) -> str:
        return f"Answer({self.server}, {self.status})"


class Request(Struct, frozen=True):
    """An HTTP request.

    ``poll_timeout`` is the limit of a watch in seconds, counted from its response headers; None for other
    requests. ``on_head`` is called with the response once its headers are there; an exception ends the
    request. With ``is_stream`` the response has no end: its body are the lines that have come. As long as it
    goes on, the next request with ``is_stream`` is not sent, but answered with the next lines.
    """

    method: str
    target: str
    body: str | None = None
    headers: Mapping[str, str] = {}
    poll_timeout: float | None = None
    is_stream: bool = False
    on_head: Callable[[Answer], object] = lambda _: None

    def __repr__(self) -> str:
        return f"Request({self.method} {self.target})"


#: Function that makes one request to one server. Raises ``ServerFailed``.
Send = Callable[[Request], Answer]

NO_SERVER = "check that etcd runs there and that -etcd-endpoints is right"
NO_NAME = "check the name in -etcd-endpoints, and this host's resolver: getent hosts NAME"
NO_TLS = "check https in -etcd-endpoints, and -etcd-cafile"
OUTDATED = "see whether this host's clock is right (date -u); if it is, have etcd's certificate renewed"
#: OpenSSL's codes of certificates that are not valid yet, or no longer (X509_V_ERR_CERT_*).
_OUTDATED = frozenset({9, 10})
_NO_CERTIFICATE = (
    "check https in -etcd-endpoints, and that etcd there accepts -etcd-certfile; its end is told by"
    " openssl x509 -enddate -noout -in FILE"
)


class EtcdTimeouts(Struct, frozen=True, gc=False):
    """Timeouts in seconds.

    - ``poll``: length of a long poll of v2 without a change, before it is repeated.
    - ``silence``: silence of a v3 watch before the server is asked whether it is alive.
    - ``idle``: age of an unused connection before it is replaced; a firewall may have forgotten it.
    - ``pause``: delay before a failed watch is retried.
    """

    connect: float = 2.0
    read: float = 5.0
    poll: float = 60.0
    silence: float = 15.0
    idle: float = 30.0
    pause: float = 1.0


class Transport(Failover[Server, Request, Answer]):
    """Failover between servers over HTTP."""

    servers: Servers

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts) -> None:
        super().__init__(servers, EtcdConnection(servers, timeouts), timeouts.idle)
        self.timeouts = timeouts


class EtcdConnection:
    """``ServerConnection`` over HTTP."""

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts) -> None:
        self._timeouts = timeouts
        self._connection = HttpConnection(servers.tls)
        #: Response without end, and its head.
        self._stream: tuple[Answer, LineStream] | None = None
        self.disconnect = self._connection.disconnect
        self.cancel = self._connection.cancel
        self.check = self._connection.check

    def exchange(self, server: Server, request: Request) -> Answer:
        if self._stream is not None and not request.is_stream:
            self.reset()
        try:
            if self._stream is None:
                return self._receive(self.begin(server, request), server, request)
            with failing_after(self._timeouts.read, server):
                return self._next_lines(*self._stream, request)
        except Retryable:
            self.reset()
            raise

    def begin(self, server: Server, request: Request) -> Response:
        """Send a request, and return its response with the body unread. Raises ``ServerFailed``."""
        if not self._connection.is_open:
            with failing_after(self._timeouts.connect, server):
                self._connection.connect(server.host, server.port, self._timeouts.connect)
        with failing_after(self._timeouts.read, server):
            target = server.path + request.target
            return self._connection.request(
                request.method, target, request.body, request.headers, self._timeouts.read
            )

    def reset(self) -> None:
        self._stream = None
        self._connection.reset()

    def _receive(self, response: Response, server: Server, request: Request) -> Answer:
        answer = _head(response, server)
        request.on_head(answer)
        with failing_after(self._timeouts.read, server):
            if request.poll_timeout is None or answer.status != 200:
                return replace(answer, body=response.whole())
            body = LiveBody(response)
            if request.is_stream:
                self._stream = answer, LineStream(body)
                return self._next_lines(*self._stream, request)
            if body.more_within(request.poll_timeout):
                return replace(answer, body=response.whole())
        self.reset()
        return answer

    def _next_lines(self, head: Answer, stream: LineStream, request: Request) -> Answer:
        assert request.poll_timeout is not None
        lines = stream.read(request.poll_timeout)
        if lines is None:
            self.reset()
            return head
        return replace(head, body=b"\n".join(lines))


@contextmanager
def failing_after(timeout: float, server: Server) -> Iterator[None]:
    """Turn errors of the connection into ``ServerFailed``. ``timeout`` is the limit in seconds to name."""
    try:
        yield
    except Unreachable as error:
        remedy = NO_NAME if isinstance(error, UnknownName) else NO_SERVER
        raise ServerFailed(str(error), remedy, sent=False) from None
    except (HTTPException, OSError) as error:
        raise server_failed(error, timeout, server) from None


def server_failed(error: Exception, timeout: float, server: Server) -> ServerFailed:
    """Return the failure for a connection error, with the same text each time it fails the same way."""
    log.log(V(2), "etcd at %s: %s: %s", server.name, type(error).__name__, error)
    problem = failure_text(error, timeout)
    if isinstance(error, ResponseTooLarge):
        return ServerFailed(problem)
    if isinstance(error, TooSlow):
        return ServerFailed(problem, "see whether etcd there is overloaded, and the network to it")
    if isinstance(error, TimeoutError):
        return ServerFailed(problem, "see whether etcd there is overloaded or cut off")
    is_tls = problem != BROKEN and type(error).__module__ == "ssl"  # else its classes would load OpenSSL
    if is_tls and isinstance(error, ssl.SSLError) and "ALERT" not in (error.reason or "ALERT"):
        code = getattr(error, "verify_code", 0)
        return ServerFailed(problem, OUTDATED if code in _OUTDATED else NO_TLS)
    if server.scheme == "https":
        # The alert about our certificate may get lost when the connection ends, so both cases share a text.
        return ServerFailed("it broke the TLS connection", _NO_CERTIFICATE, lost=problem == BROKEN)
    return ServerFailed(problem, NO_SERVER, lost=problem == BROKEN)


def _head(response: Response, server: Server) -> Answer:
    headers = response.headers
    index = headers.get("X-Etcd-Index", "")
    number = int(index) if index.isdecimal() and len(index) < 20 else 0
    return Answer(
        server.name,
        response.status,
        Position(number, headers.get("X-Etcd-Cluster-Id", "")),
        headers.get("Content-Type", "").partition(";")[0],
        headers.get("Location", ""),
    )


def json_object(answer: Answer) -> dict[str, Any] | None:
    """Return the JSON object of a response, or None if it is something else.

    Raises ``ServerFailed`` on a redirect.
    """
    if 300 <= answer.status < 400:
        raise ServerFailed(f"it redirects to {_host(answer.location)}", "name etcd itself in -etcd-endpoints")
    return parsed_object(answer.body or b"")


def parsed_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None if it is something else."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def not_etcd(answer: Answer) -> ServerFailed:
    """Return the error for a response that is not etcd's."""
    return ServerFailed(
        f"HTTP {answer.status} with {answer.content_type or 'something'} that is no JSON object"
    )


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or "another path"
    except ValueError:
        return "nowhere"
