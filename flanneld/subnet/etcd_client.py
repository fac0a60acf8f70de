"""etcd's v2 API through python-etcd, over a transport that has limits and can be cut.

The one importer of python-etcd. python-etcd alone repeats what timed out, is stuck once
every server has failed, and cannot be interrupted. Each of its requests ends up in ``api_execute``,
which ``Client`` replaces.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlencode

import etcd
from urllib3 import HTTPConnectionPool, Timeout
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError, SSLError
from urllib3.response import BaseHTTPResponse

from flanneld import clock
from flanneld.errors import Retryable
from flanneld.glog import V
from flanneld.subnet import etcd_answers
from flanneld.subnet.etcd_answers import Answer, Conflict, ListAgain, NotFound, Position, Reply, Useless
from flanneld.subnet.etcd_endpoints import Server, Servers, ssl_text
from flanneld.subnet.line import Line, Unreachable
from flanneld.subnet.pools import Pool, TlsPool

log = logging.getLogger(__name__)

_NO_SERVER = "check that etcd runs there and that -etcd-endpoints is right"
_NO_TLS = "check https in -etcd-endpoints, and -etcd-cafile"
_NO_CERTIFICATE = "check that etcd runs there and accepts -etcd-certfile"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds. ``poll`` is how long a long poll may bring no news before it is made anew; a
    connection that was not used for ``idle`` is given up, as a firewall may have forgotten it; a watch
    that failed goes on after ``pause``.
    """

    connect: float = 2.0
    read: float = 5.0
    poll: float = 60.0
    idle: float = 30.0
    pause: float = 1.0


@dataclass(frozen=True, slots=True)
class _Request:
    """``after`` is where a long poll starts, None for other requests."""

    method: str
    target: str
    body: str | None
    headers: Mapping[str, str]
    repeatable: bool
    after: Position | None


class Client(etcd.Client):  # type: ignore[misc] # python-etcd has no types
    """Requests of one thread at a time over one connection: whoever watches needs a client of its own.

    Any request may raise ``Retryable``, and raises ``Cancelled`` after ``cut``. ``contact`` is called
    when etcd begins to answer, which for a long poll is long before there is news.
    """

    def __init__(
        self, servers: Servers, timeouts: Timeouts, contact: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self._servers = servers
        self._timeouts = timeouts
        self._contact = contact
        self._turn = threading.Lock()
        self._line = Line()
        self._server: Server | None = None
        self._pool: HTTPConnectionPool | None = None
        self._used = 0.0
        #: We broke the connection ourselves, so that it broke says nothing about the server.
        self._gave_up = False
        self._after: Position | None = None
        self._reread = threading.Event()

    def fetch(self, key: str, *, recursive: bool = False) -> Reply:
        """Read a key as the majority of the servers knows it. Raises ``NotFound``."""
        reply: Reply = self.read(key, quorum=True, recursive=recursive, sorted=False)
        return reply

    def create(self, key: str, value: str, ttl: int | None) -> Reply:
        """Write a key that must not be there. Raises ``Conflict`` if it is.

        After ``Retryable`` it may have been written nevertheless.
        """
        reply: Reply = self.write(key, value, ttl=ttl, prevExist=False)
        return reply

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> Reply:
        """Write a key that must not have changed since that index. Raises ``Conflict`` if it has."""
        try:
            reply: Reply = self.write(key, value, ttl=ttl, prevIndex=modified)
        except NotFound:
            raise Conflict(f"{key} has gone") from None
        return reply

    def remove(self, key: str) -> None:
        """Delete a key, whatever it holds. Raises ``NotFound``."""
        self.delete(key)

    def wait(self, key: str, after: Position, *, recursive: bool) -> Reply:
        """The first change of a key after a position, or no news for as long as a poll may last.

        Raises ``ListAgain`` when what happened since then cannot be had.
        """
        self._check_reread()
        self._after = after
        try:
            reply: Reply = self.watch(key, index=after.index + 1, recursive=recursive)
        finally:
            self._after = None
        if reply.node is None:
            return reply
        if reply.node.modified <= after.index:
            raise ListAgain("etcd repeats what it reported before")
        return replace(reply, at=Position(reply.node.modified, reply.at.cluster))

    def reconnect(self) -> None:
        """Give up the connection of now: it may lead nowhere any more. May be called from any thread."""
        self._used = -math.inf
        self._gave_up = True
        self._line.drop()

    def reread(self) -> None:
        """Let ``wait``, now or when it is called next, raise ``ListAgain``. May be called from any thread."""
        self._reread.set()
        self.reconnect()

    def cut(self) -> None:
        """End what goes on and refuse what comes. May be called from any thread, repeatedly."""
        self._line.cut()

    def close(self) -> None:
        """Give up the connection; for the thread that uses this client."""
        with self._turn:
            self._hang_up()

    def api_execute(
        self, path: str, method: str, params: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Reply:
        """Ask the servers in turn until one answers. The place where all of python-etcd's requests meet."""
        del timeout  # python-etcd's idea of it; see Timeouts
        request = _request(path, method, params or {}, self._after)
        with self._turn:
            return self._ask_in_turn(request)

    def _check_reread(self) -> None:
        if self._reread.is_set():
            self._reread.clear()
            raise ListAgain("somebody wants to be sure")

    def _result_from_response(self, response: Reply) -> Reply:
        return response

    def _ask_in_turn(self, request: _Request) -> Reply:
        failures: dict[str, Useless] = {}
        for server in self._servers.in_turn():
            self._line.check()
            try:
                return etcd_answers.read(self._exchange(server, request))
            except Useless as failure:
                self._hang_up()
                self._line.check()
                if self._gave_up and (request.repeatable or not failure.sent):
                    self._gave_up = False
                    if request.after is not None:
                        self._check_reread()
                    return self._ask_in_turn(request)
                failures[server.name] = failure
                log.log(V(1), "etcd at %s: %s", server.name, failure.problem)
                if failure.sent and not request.repeatable:
                    self._servers.skip()
                    break
        # In the same order whichever was asked first, so that a lasting problem has one text.
        told = [(name, failures[name]) for name in sorted(failures)]
        problems = "; ".join(f"{name}: {failure.problem}" for name, failure in told)
        raise Retryable(f"etcd does not answer ({problems})", told[-1][1].remedy)

    def _exchange(self, server: Server, request: _Request) -> Answer:
        limits = Timeout(connect=self._timeouts.connect, read=self._timeouts.read)
        try:
            with self._pool_to(server).urlopen(
                request.method,
                server.path + request.target,
                body=request.body,
                headers={**server.headers, **request.headers},
                retries=False,
                redirect=False,
                preload_content=False,
                timeout=limits,
            ) as response:
                answer = self._receive(response, server, request.after)
        except Unreachable as error:
            raise Useless(str(error), _NO_SERVER, sent=False) from None
        except (HTTPError, HTTPException, OSError) as error:
            raise _useless(error, self._timeouts.read, server) from None
        except ListAgain:
            self._hang_up()
            raise
        self._used = clock.now()
        return answer

    def _receive(self, response: BaseHTTPResponse, server: Server, after: Position | None) -> Answer:
        answer = _head(response, server)
        if answer.at.index and answer.status < 500:
            self._contact()
        if after is None or answer.status != 200:
            return replace(answer, body=response.read())
        etcd_answers.check_history(after, answer.at)
        if isinstance(response.connection, HTTPConnection) and response.connection.sock:
            response.connection.sock.settimeout(self._timeouts.poll)
        try:
            first = response.read(1)
        except ReadTimeoutError:
            first = b""
        if first:
            return replace(answer, body=first + response.read())
        self._hang_up()
        return answer

    def _pool_to(self, server: Server) -> HTTPConnectionPool:
        if self._server is not server or clock.now() - self._used > self._timeouts.idle:
            self._hang_up()
        if self._pool is None:
            self._server = server
            if self._servers.tls:
                context = self._servers.tls
                self._pool = TlsPool(server.host, server.port, line=self._line, ssl_context=context)
            else:
                self._pool = Pool(server.host, server.port, line=self._line)
        return self._pool

    def _hang_up(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None
        self._line.drop()


def _request(path: str, method: str, params: Mapping[str, Any], after: Position | None) -> _Request:
    """As Go's client does, put the value and its TTL in the body and all else in the query."""
    form = {name: value for name, value in params.items() if name in ("value", "ttl")}
    query = {name: value for name, value in params.items() if name not in form}
    target = quote(path) + (f"?{urlencode(query)}" if query else "")
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if form else {}
    repeatable = method != "DELETE" and query.get("prevExist") != "false"
    return _Request(method, target, urlencode(form) if form else None, headers, repeatable, after)


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


def _useless(error: Exception, timeout: float, server: Server) -> Useless:
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
