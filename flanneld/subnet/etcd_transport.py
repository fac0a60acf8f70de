"""HTTP to a cluster of etcd: one connection, one server after the other, with limits, and it can be cut."""

from __future__ import annotations

import logging
import math
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import TypeVar

from urllib3 import HTTPConnectionPool, Timeout
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError, SSLError
from urllib3.response import BaseHTTPResponse

from flanneld import clock
from flanneld.errors import Retryable
from flanneld.glog import V
from flanneld.subnet.etcd_endpoints import Server, Servers, ssl_text
from flanneld.subnet.etcd_http import Answer, Request, Useless
from flanneld.subnet.etcd_keys import Position
from flanneld.subnet.line import Line, Unreachable
from flanneld.subnet.pools import Pool, TlsPool

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Makes one request of one server. Raises ``Useless``.
Send = Callable[[Request], Answer]

_NO_SERVER = "check that etcd runs there and that -etcd-endpoints is right"
_NO_TLS = "check https in -etcd-endpoints, and -etcd-cafile"
_NO_CERTIFICATE = "check that etcd runs there and accepts -etcd-certfile"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. ``poll`` is how long a long poll of v2 may bring no news before it is made anew;
    ``silence`` is how long a watch of v3 may bring none before the server is asked whether it lives; a
    connection that was not used for ``idle`` is given up, as a firewall may have forgotten it; a watch
    that failed goes on after ``pause``.
    """

    connect: float = 2.0
    read: float = 5.0
    poll: float = 60.0
    silence: float = 15.0
    idle: float = 30.0
    pause: float = 1.0


class Transport:
    """Requests of one thread at a time. After ``cut`` every request raises ``Cancelled``."""

    def __init__(self, servers: Servers, timeouts: Timeouts) -> None:
        self.servers = servers
        self.timeouts = timeouts
        self._turn = threading.Lock()
        self._line = Line()
        self._server: Server | None = None
        self._pool: HTTPConnectionPool | None = None
        self._used = 0.0
        #: We broke the connection ourselves, so that it broke says nothing about the server.
        self._gave_up = False

    def ask(self, attempt: Callable[[Server, Send], T], *, repeatable: bool = True) -> T:
        """What ``attempt`` makes of the first server that is of use. Raises ``Retryable`` if none is.

        What is not ``repeatable`` is not tried on another server once it was sent to one.
        """
        with self._turn:
            return self._ask_in_turn(attempt, repeatable)

    def reconnect(self) -> None:
        """Give up the connection of now: it may lead nowhere any more. May be called from any thread."""
        self._used = -math.inf
        self._gave_up = True
        self._line.drop()

    def cut(self) -> None:
        """End what goes on and refuse what comes. May be called from any thread, repeatedly."""
        self._line.cut()

    def close(self) -> None:
        """Give up the connection; for the thread that uses this transport."""
        with self._turn:
            self._hang_up()

    def _ask_in_turn(self, attempt: Callable[[Server, Send], T], repeatable: bool) -> T:
        failures: dict[str, Useless] = {}
        for server in self.servers.in_turn():
            self._line.check()
            try:
                return attempt(server, lambda request, to=server: self._exchange(to, request))  # type: ignore[misc]
            except Useless as failure:
                self._hang_up()
                self._line.check()
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
            # Their tracebacks hold this frame: with it, each lost connection would be garbage in a cycle.
            failures.clear()

    def _exchange(self, server: Server, request: Request) -> Answer:
        limits = Timeout(connect=self.timeouts.connect, read=self.timeouts.read)
        try:
            with self._pool_to(server).urlopen(
                request.method,
                server.path + request.target,
                body=request.body,
                headers=request.headers,
                retries=False,
                redirect=False,
                preload_content=False,
                timeout=limits,
            ) as response:
                answer = self._receive(response, server, request)
        except Unreachable as error:
            raise unreachable(error) from None
        except (HTTPError, HTTPException, OSError) as error:
            raise useless(error, self.timeouts.read, server) from None
        except Retryable:
            self._hang_up()
            raise
        self._used = clock.now()
        return answer

    def _receive(self, response: BaseHTTPResponse, server: Server, request: Request) -> Answer:
        answer = _head(response, server)
        request.on_head(answer)
        if request.patience is None or answer.status != 200:
            return replace(answer, body=response.read())
        if isinstance(response.connection, HTTPConnection) and response.connection.sock:
            response.connection.sock.settimeout(request.patience)
        try:
            first = response.read(1)
        except ReadTimeoutError:
            first = b""
        if first:
            return replace(answer, body=first + response.read())
        self._hang_up()
        return answer

    def _pool_to(self, server: Server) -> HTTPConnectionPool:
        if self._server is not server or clock.now() - self._used > self.timeouts.idle:
            self._hang_up()
        if self._pool is None:
            self._server = server
            if self.servers.tls:
                context = self.servers.tls
                self._pool = TlsPool(server.host, server.port, line=self._line, ssl_context=context)
            else:
                self._pool = Pool(server.host, server.port, line=self._line)
        return self._pool

    def _hang_up(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._line.drop()


def no_answer(failures: dict[str, Useless]) -> Retryable:
    """What to raise when each server, given by its name, was of no use."""
    # In the same order whichever was asked first, so that a lasting problem has one text.
    told = [(name, failures[name]) for name in sorted(failures)]
    problems = "; ".join(f"{name}: {failure.problem}" for name, failure in told)
    kind = next((failure.kind for _, failure in told if failure.kind is not Retryable), Retryable)
    return kind(f"etcd does not answer ({problems})", told[-1][1].remedy)


def unreachable(error: Unreachable) -> Useless:
    return Useless(str(error), _NO_SERVER, sent=False)


def useless(error: Exception, timeout: float, server: Server) -> Useless:
    """What is wrong with a connection, in words that stay the same when it happens again."""
    log.log(V(2), "etcd at %s: %r", server.name, error)
    if isinstance(error, ReadTimeoutError | TimeoutError):
        return Useless(f"no answer within {timeout:g} s", "see whether etcd there is overloaded or cut off")
    cause = error.args[0] if isinstance(error, SSLError) and error.args else error
    if isinstance(cause, ssl.SSLError) and "ALERT" not in (cause.reason or "ALERT"):
        return Useless(ssl_text(cause), _NO_TLS)
    if server.scheme == "https":
        # Chance decides whether the alert about our certificate is seen before the connection ends.
        return Useless("it broke the TLS connection", _NO_CERTIFICATE)
    problem = "it does not speak HTTP" if "BadStatusLine" in repr(error) else "it broke the connection"
    return Useless(problem, _NO_SERVER)


def _head(response: BaseHTTPResponse, server: Server) -> Answer:
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
