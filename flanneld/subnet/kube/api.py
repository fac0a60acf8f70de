"""Requests to the API server: lists in pages, watches line by line, patches. Raw JSON, no models."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlencode

from msgspec import Struct
from urllib3 import Timeout
from urllib3.exceptions import HTTPError, ReadTimeoutError, SSLError

from flanneld import __version__
from flanneld.compat.glog import V
from flanneld.errors import NoAnswer, Retryable
from flanneld.runtime import clock
from flanneld.runtime.connection_pools import Endless, body_of, nobody_waits
from flanneld.runtime.interruptible_socket import InterruptibleSocket, Unreachable
from flanneld.subnet.kube.access import Access, Session
from flanneld.subnet.kube.nodes import decoded

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
STRATEGIC = "application/strategic-merge-patch+json"
_AGENT = f"flanneld/{__version__}"
_UNAUTHORIZED, _GONE, _TOO_MANY = 401, 410, 429
_LONGEST_RETRY_AFTER = 60.0
#: An answer that is an error says why in so many bytes at most.
_ERROR_SIZE = 64 * 1024
#: A watch is read in pieces of so many bytes at most, each as soon as anything has come.
_PIECE = 64 * 1024


class Timeouts(Struct, frozen=True, gc=False):
    """In seconds. ``silence`` is how long a watch may bring nothing before it is given up; API servers send
    a bookmark about once a minute.
    """

    connect: float = 3.0
    read: float = 20.0
    silence: float = 90.0


class NoServer(NoAnswer):
    """There was no connection: to ask again soon burdens no server."""


class BrokenOff(Retryable):
    """The connection of a watch ended before the watch did."""


class Refusal(Retryable):
    """The API server said no."""

    def __init__(self, problem: str, remedy: str, status: int, retry_after: float = 0.0) -> None:
        super().__init__(problem, remedy, retry_after)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Whether the server is in trouble itself, and says nothing about what was asked."""
        return self.status >= 500 or self.status == _TOO_MANY


class Expired(Retryable):
    """What we know is too old to go on from (410 Gone): everything has to be read again."""


class ApiStream:
    """A watch that the server has begun, for the thread that began it."""

    def __init__(self, read: Callable[[], bytes], close: Callable[[], None]) -> None:
        self.read = read
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Give up the connection."""
        close, self._close = self._close, None
        if close is not None:
            close()


class Api:
    """Requests of one thread at a time over one connection: whoever watches needs one of its own.

    Any request may raise ``NoAnswer``, ``Refusal``, ``Expired``, and raises ``Cancelled`` after ``cut``.
    """

    def __init__(self, access: Access, timeouts: Timeouts) -> None:
        self._access = access
        self._timeouts = timeouts
        self._turn = threading.Lock()
        self._line = InterruptibleSocket()
        self._session: Session | None = None
        self.name = access.name
        #: The last request brought no answer.
        self.is_down = False

    def get(self, path: str, alive: Callable[[], None] = nobody_waits, **query: str) -> dict[str, Any]:
        """``alive`` is called while the answer comes in, however slowly it does."""
        return self._ask("GET", _target(path, query), alive=alive)

    def patch(self, path: str, body: str) -> dict[str, Any]:
        """Send a strategic-merge patch, and return the object as it is then."""
        return self._ask("PATCH", path, body, STRATEGIC)

    def post(self, path: str, obj: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, json.dumps(obj), "application/json")

    def watch(self, path: str, **query: str) -> ApiStream:
        """Begin a watch. Until it is closed, no other request can be made."""
        self._turn.acquire()
        try:
            response = self._send("GET", _target(path, query))
        except BaseException:
            self._turn.release()
            raise
        if response.connection and response.connection.sock:
            response.connection.sock.settimeout(self._timeouts.silence)
        return ApiStream(partial(self._read_piece, response), partial(self._end_watch, response))

    def _end_watch(self, response: Any) -> None:
        try:
            response.close()
        finally:
            self._hang_up()
            self._turn.release()

    def _read_piece(self, response: Any) -> bytes:
        try:
            # Not stream(), which waits for 64 KiB unless each event comes as a chunk of its own.
            piece: bytes = response.read1(_PIECE)
        except ReadTimeoutError:
            # A version that the server has yet to reach, as after a restored backup, also meets silence.
            raise Expired(f"the watch was silent for {self._timeouts.silence:g} s") from None
        except (HTTPError, HTTPException, OSError, ValueError) as error:
            self._line.check()
            log.log(V(2), "A watch broke off: %s: %s", type(error).__name__, error)
            raise BrokenOff("the connection of the watch was lost") from None
        return piece

    def reconnect(self) -> None:
        """Give up the connection of now: it may lead nowhere any more. May be called from any thread."""
        self._line.drop()

    def cut(self) -> None:
        """End what goes on and refuse what comes. May be called from any thread, repeatedly."""
        self._line.cut()
        self._access.clean_up()

    def _ask(
        self,
        method: str,
        target: str,
        body: str | None = None,
        kind: str = "",
        alive: Callable[[], None] = nobody_waits,
    ) -> dict[str, Any]:
        headers = {"Content-Type": kind} if kind else {}
        with self._turn:
            response = self._send(method, target, body, headers)
            try:
                with response:
                    answer = decoded(body_of(response, alive))
            except (HTTPError, HTTPException, OSError, ValueError, RecursionError) as error:
                raise self._lost(error) from None
            if not isinstance(answer, dict):
                raise self._lost(ValueError("its answer is no object"))
            if body is not None:
                # Writing is rare, and the server has better to do than to keep thousands of idle connections.
                self._hang_up()
            return answer

    def _send(
        self, method: str, target: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Ask, and return the answer with its body unread. Only good answers come back."""
        self._line.check()
        if self._session is None:
            self._session = self._access.open(self._line)
        began = clock.now()
        try:
            response = self._session.request(
                method,
                target,
                {"User-Agent": _AGENT, "Accept": "application/json", **(headers or {})},
                body=body,
                timeout=Timeout(connect=self._timeouts.connect, read=self._timeouts.read),
            )
        except (Unreachable, HTTPError, HTTPException, OSError, ValueError) as error:
            raise self._lost(error, clock.now() - began) from None
        self.is_down = False
        if response.status >= 300:
            with response:
                self._refuse(response)
        return response

    def _refuse(self, response: Any) -> None:
        try:
            told = json.loads(response.read(_ERROR_SIZE))
        except (HTTPError, HTTPException, OSError, ValueError, RecursionError):
            told = None
        self._hang_up()
        self._line.check()
        status = response.status
        if status == _GONE:
            raise Expired(_message(told) or "what was asked for is gone")
        problem = f"the API server says {status}" + (f": {_message(told)}" if _message(told) else "")
        raise Refusal(problem, _remedy(status), status, _retry_after(response.headers.get("Retry-After", "")))

    def _lost(self, error: Exception, waited: float = math.inf) -> NoAnswer:
        """Describe what is wrong with a connection, in words that stay the same when it happens again.

        ``waited`` is the age of the request in seconds. A TLS handshake has less time than an answer.
        """
        self._hang_up()
        self._line.check()
        self.is_down = True
        log.log(V(2), "The API server at %s: %s: %s", self.name, type(error).__name__, error)
        kind = NoServer if isinstance(error, Unreachable) else NoAnswer
        return kind(
            f"the API server at {self.name} does not answer ({_trouble(error, self._timeouts, waited)})",
            "see that it runs and that this host reaches it",
        )

    def _hang_up(self) -> None:
        """Forget the connection, and read the credentials anew for the next: they may have been rotated."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._line.drop()


def _target(path: str, query: Mapping[str, str]) -> str:
    return quote(path) + (f"?{urlencode(query)}" if query else "")


def _message(told: Any) -> str:
    """The message of a Status object, on one line and not too long."""
    text = told.get("message") if isinstance(told, dict) else None
    return " ".join(text.split())[:300] if isinstance(text, str) else ""


def _remedy(status: int) -> str:
    if status == _UNAUTHORIZED:
        return "see that our token or certificate is valid"
    if status == 403:
        return "give our service account the ClusterRole that docs/kubernetes.md shows"
    if status == 404:
        return "see that NODE_NAME is right"
    return "see the API server's log"


def _retry_after(text: str) -> float:
    return min(float(text), _LONGEST_RETRY_AFTER) if text.isdecimal() and len(text) < 6 else 0.0


def _trouble(error: Exception, timeouts: Timeouts, waited: float) -> str:
    if isinstance(error, Unreachable | Endless):
        return str(error)
    if isinstance(error, ReadTimeoutError | TimeoutError):
        if waited < timeouts.read:
            return f"no TLS handshake within {timeouts.connect:g} s"
        return f"silent for {timeouts.read:g} s"
    if isinstance(error, SSLError):
        cause = error.args[0] if error.args else error
        reason = getattr(cause, "verify_message", "") or getattr(cause, "reason", "")
        return f"TLS failed: {reason or 'it broke the connection'}"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "what it sends is no JSON"
    return "it broke the connection" if isinstance(error, OSError | HTTPError | HTTPException) else str(error)
