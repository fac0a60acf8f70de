"""Requests to several servers of one store: the last good one first, the next one after a failure."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

from flanneld.compat.glog import V
from flanneld.errors import NoAnswer, Retryable
from flanneld.runtime import clock
from flanneld.runtime.sockets.interruptible import HostAddresses

log = logging.getLogger(__name__)


class Endpoint(Protocol):
    """One server. ``name`` shows no secret."""

    @property
    def name(self) -> str: ...

    @property
    def host(self) -> str: ...


S = TypeVar("S", bound=Endpoint)
S_contra = TypeVar("S_contra", bound=Endpoint, contravariant=True)
T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")
Q_contra = TypeVar("Q_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class ServerFailed(Exception):
    """Failure of one server, after which another is tried.

    ``sent`` is True if the server may have received the request, ``lost`` if the connection ended without an
    answer. ``kind`` is the error to raise if all servers fail.
    """

    def __init__(
        self,
        problem: str,
        remedy: str = "",
        *,
        sent: bool = True,
        lost: bool = False,
        kind: type[Retryable] = NoAnswer,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.sent = sent
        self.lost = lost
        self.kind = kind


class ServerRing(Generic[S]):
    """The servers of a store in their order. Threads share one object, and so the last server that worked.

    ``down`` and ``unusable`` are the words for servers that all do not answer, or not as they should, and
    ``remedy`` that of failures which name none.
    """

    def __init__(self, servers: Sequence[S], down: str, unusable: str, remedy: str) -> None:
        self._servers = servers
        self._words = down, unusable
        self._remedy = remedy
        self.name = ", ".join(dict.fromkeys(server.name for server in servers))
        self.addresses = HostAddresses(lambda: [server.host for server in servers])
        self._good = 0

    def apart(self) -> Self:
        """Return the same servers with a last good one of its own, as for another API."""
        from copy import copy  # most daemons use one API

        return copy(self)

    def in_turn(self) -> Iterator[S]:
        """Yield each server once, starting with the last good one.

        The last one yielded becomes the good one.
        """
        first, count = self._good, len(self._servers)
        for offset in range(count):
            self._good = (first + offset) % count
            yield self._servers[self._good]

    @property
    def current(self) -> S:
        """The last good server, or the one being tried."""
        return self._servers[self._good]

    def skip(self, server: S) -> None:
        """Start with the server after this one from now on, unless another thread has left it already."""
        if self.current is server:
            self._good = (self._good + 1) % len(self._servers)

    def no_answer(self, failures: dict[str, ServerFailed]) -> Retryable:
        """Return the error for a request that failed on every server. Keys are server names."""
        # Sorted by name, so that a lasting problem keeps one text, whichever server was tried first.
        told = [(name, failures[name]) for name in sorted(failures)]
        problems = "; ".join(f"{name}: {failure.problem}" for name, failure in told)
        kind = next((failure.kind for _, failure in told if failure.kind is not NoAnswer), NoAnswer)
        return kind(f"{self._words[kind is not NoAnswer]} ({problems})", told[-1][1].remedy or self._remedy)


class ServerConnection(Protocol[S_contra, Q_contra, A_co]):
    """Connection to one server at a time, for one thread. Any may call ``disconnect`` and ``cancel``."""

    def exchange(self, server: S_contra, request: Q_contra) -> A_co:
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


class Failover(Generic[S, Q, A]):
    """Client that tries one server after the other, for one thread at a time.

    A connection that was unused for ``idle`` seconds is replaced: a firewall may have forgotten it. After
    ``cancel`` every request raises ``Cancelled``.
    """

    def __init__(self, servers: ServerRing[S], connection: ServerConnection[S, Q, A], idle: float) -> None:
        self.servers = servers
        self._connection = connection
        self._idle = idle
        self._turn = threading.Lock()
        #: Server of the connection, and when it answered last; it did if ``_is_kept``.
        self._server: S | None = None
        self._used = 0.0
        self._is_kept = False
        #: Number of lost or closed connections and of servers that failed.
        self.losses = 0
        #: True if we dropped the connection ourselves: its failure says nothing about the server.
        self._gave_up = False

    def ask(self, attempt: Callable[[S, Callable[[Q], A]], T], *, repeatable: bool = True) -> T:
        """Return the result of ``attempt`` with the first server that works.

        Raises ``Retryable`` if none does.

        A request that is not ``repeatable`` is not tried on another server once it was sent.
        """
        with self._turn:
            return self._ask_in_turn(attempt, repeatable, may_be_kept=True)

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
            self._reset()

    def _ask_in_turn(
        self, attempt: Callable[[S, Callable[[Q], A]], T], repeatable: bool, *, may_be_kept: bool
    ) -> T:
        failures: dict[str, ServerFailed] = {}
        for server in self.servers.in_turn():
            self._connection.check()
            try:
                return attempt(server, lambda request, to=server: self._exchange(to, request))  # type: ignore[misc]
            except ServerFailed as failure:
                # A server may close a connection that it kept just when a request comes. That counts once: an
                # attempt of several requests may fail after the first one each time.
                is_ours = self._gave_up or (may_be_kept and self._is_kept and failure.lost)
                self.losses += 1
                self._reset()
                self._connection.check()
                if is_ours and (repeatable or not failure.sent):
                    self._gave_up = False
                    return self._ask_in_turn(attempt, repeatable, may_be_kept=False)
                failures[server.name] = failure
                log.log(V(1), "%s: %s", server.name, failure.problem)
                if failure.sent and not repeatable:
                    self.servers.skip(server)
                    break
        try:
            raise self.servers.no_answer(failures)
        finally:
            # Their tracebacks refer to this frame: each lost connection would become a reference cycle.
            failures.clear()

    def _exchange(self, server: S, request: Q) -> A:
        if self._server is not server or clock.now() - self._used > self._idle:
            self._reset()
        self._server = server
        answer = self._connection.exchange(server, request)
        self._used, self._is_kept = clock.now(), True
        return answer

    def _reset(self) -> None:
        self._is_kept = False
        self._connection.reset()
