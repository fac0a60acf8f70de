"""Requests to an etcd cluster with failover between its servers, timeouts and cancellation."""

from __future__ import annotations

import logging
import math
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import BadStatusLine, HTTPException
from typing import Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.errors import NoAnswer, Retryable
from flanneld.runtime import clock
from flanneld.runtime.sockets.http_connection import (
    HttpConnection,
    LineStream,
    LiveBody,
    Response,
    ResponseTooLarge,
)
from flanneld.runtime.sockets.interruptible import TooSlow, UnknownName, Unreachable
from flanneld.subnet.etcd.endpoints import Server, Servers, ssl_text
from flanneld.subnet.etcd.http import Answer, Request, ServerFailed
from flanneld.subnet.etcd.keys import Position

log = logging.getLogger(__name__)

T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")
Q_contra = TypeVar("Q_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)
#: Function that makes one request to one server. Raises ``ServerFailed``.
Send = Callable[[Request], Answer]

NO_SERVER = "check that etcd runs there and that -etcd-endpoints is right"
NO_NAME = "check the name in -etcd-endpoints, and this host's resolver: getent hosts NAME"
NO_TLS = "check https in -etcd-endpoints, and -etcd-cafile"
OUTDATED = "see whether this host's clock is right (date -u); if it is, have etcd's certificate renewed"
#: OpenSSL's codes of certificates that are not valid yet, or no longer (X509_V_ERR_CERT_*).
_OUTDATED = frozenset({9, 10})
_NO_CERTIFICATE = "check https in -etcd-endpoints, and that etcd there accepts -etcd-certfile"


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


class ServerConnection(Protocol[Q_contra, A_co]):
    """Connection to one server at a time, for one thread. Any may call ``disconnect`` and ``cancel``."""

    def exchange(self, server: Server, request: Q_contra) -> A_co:
        """Send a request, connecting first if necessary.

        Raises ``ServerFailed``, or ``Cancelled`` after ``cancel``.
        """
        ...

    def reset(self) -> None:
        """Close the connection. Only for the thread that uses it."""
        ...

    def disconnect(self) -> None:
        """Close the connection; the next request opens another."""
        ...

    def cancel(self) -> None:
        """Close the connection and refuse further ones. May be called repeatedly."""
        ...

    def check(self) -> None:
        """Raise ``Cancelled`` once ``cancel`` was called."""
        ...


class Failover(Generic[Q, A]):
    """Client that tries one server after the other, for one thread at a time.

    After ``cancel`` every request raises ``Cancelled``.
    """

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts, connection: ServerConnection[Q, A]) -> None:
        self.servers = servers
        self.timeouts = timeouts
        self._connection = connection
        self._turn = threading.Lock()
        self._server: Server | None = None
        self._used = 0.0
        #: Number of lost or closed connections and of servers that failed.
        self.losses = 0
        #: True if we dropped the connection ourselves: its failure says nothing about the server.
        self._gave_up = False

    def ask(self, attempt: Callable[[Server, Callable[[Q], A]], T], *, repeatable: bool = True) -> T:
        """Return the result of ``attempt`` with the first server that works.

        Raises ``Retryable`` if none does.

        A request that is not ``repeatable`` is not tried on another server once it was sent.
        """
        with self._turn:
            return self._ask_in_turn(attempt, repeatable)

    def reconnect(self) -> None:
        """Drop the current connection, which may be dead. May be called from any thread."""
        self._used = -math.inf
        self._gave_up = True
        self._connection.disconnect()

    def cancel(self) -> None:
        """Abort the current request and refuse later ones. May be called repeatedly, from any thread."""
        self._connection.cancel()

    def close(self) -> None:
        """Close the connection. Only for the thread that uses this object."""
        with self._turn:
            self._connection.reset()

    def _ask_in_turn(self, attempt: Callable[[Server, Callable[[Q], A]], T], repeatable: bool) -> T:
        failures: dict[str, ServerFailed] = {}
        for server in self.servers.in_turn():
            self._connection.check()
            try:
                return attempt(server, lambda request, to=server: self._exchange(to, request))  # type: ignore[misc]
            except ServerFailed as failure:
                self.losses += 1
                self._connection.reset()
                self._connection.check()
                if self._gave_up and (repeatable or not failure.sent):
                    self._gave_up = False
                    return self._ask_in_turn(attempt, repeatable)
                failures[server.name] = failure
                log.log(V(1), "etcd at %s: %s", server.name, failure.problem)
                if failure.sent and not repeatable:
                    self.servers.skip()
                    break
        try:
            raise no_answer(failures)
        finally:
            # Their tracebacks refer to this frame: each lost connection would become a reference cycle.
            failures.clear()

    def _exchange(self, server: Server, request: Q) -> A:
        if self._server is not server or clock.now() - self._used > self.timeouts.idle:
            self._connection.reset()
        self._server = server
        answer = self._connection.exchange(server, request)
        self._used = clock.now()
        return answer


class Transport(Failover[Request, Answer]):
    """Failover between servers over HTTP."""

    def __init__(self, servers: Servers, timeouts: EtcdTimeouts) -> None:
        super().__init__(servers, timeouts, EtcdConnection(servers, timeouts))


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


def no_answer(failures: dict[str, ServerFailed]) -> Retryable:
    """Return the error for a request that failed on every server. Keys are server names."""
    # Sorted by name, so that a lasting problem keeps one text, whichever server was tried first.
    told = [(name, failures[name]) for name in sorted(failures)]
    problems = "; ".join(f"{name}: {failure.problem}" for name, failure in told)
    kind = next((failure.kind for _, failure in told if failure.kind is not NoAnswer), NoAnswer)
    said = "etcd does not answer" if kind is NoAnswer else "etcd answers, but is unusable"
    return kind(f"{said} ({problems})", told[-1][1].remedy)


def server_failed(error: Exception, timeout: float, server: Server) -> ServerFailed:
    """Return the failure for a connection error, with the same text each time it fails the same way."""
    log.log(V(2), "etcd at %s: %s: %s", server.name, type(error).__name__, error)
    if isinstance(error, ResponseTooLarge):
        return ServerFailed(str(error))
    if isinstance(error, TooSlow):
        return ServerFailed(str(error), "see whether etcd there is overloaded, and the network to it")
    if isinstance(error, TimeoutError):
        return ServerFailed(
            f"no answer within {timeout:g} s", "see whether etcd there is overloaded or cut off"
        )
    if isinstance(error, ssl.SSLError) and "ALERT" not in (error.reason or "ALERT"):
        code = getattr(error, "verify_code", 0)
        return ServerFailed(ssl_text(error), OUTDATED if code in _OUTDATED else NO_TLS)
    if server.scheme == "https":
        # The alert about our certificate may get lost when the connection ends, so both cases share a text.
        return ServerFailed("it broke the TLS connection", _NO_CERTIFICATE)
    problem = "it does not speak HTTP" if type(error) is BadStatusLine else "it broke the connection"
    return ServerFailed(problem, NO_SERVER)


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
