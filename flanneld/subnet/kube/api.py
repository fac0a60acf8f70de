"""HTTP client of the API server: paged lists, watches read line by line, patches.

Objects are plain JSON, without the models of the kubernetes package.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.parse import quote, urlencode

from msgspec import Struct
from urllib3 import Timeout
from urllib3.exceptions import HTTPError

from flanneld import __version__
from flanneld.compat.glog import V
from flanneld.errors import NoAnswer, Retryable
from flanneld.runtime import clock
from flanneld.runtime.sockets.http_client import beneath, body_of, cause_beneath
from flanneld.runtime.sockets.http_connection import BROKEN, LiveBody, failure_text
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, TooSlow, Unreachable, no_heartbeat
from flanneld.subnet.kube.access import Access, ApiSession
from flanneld.subnet.kube.nodes import decoded
from flanneld.subnet.list_watch import PossibleGap

log = logging.getLogger(__name__)

NODES = "/api/v1/nodes"
STRATEGIC = "application/strategic-merge-patch+json"
_AGENT = f"flanneld/{__version__}"
_UNAUTHORIZED, _FORBIDDEN, _GONE, _TOO_MANY = 401, 403, 410, 429
_LONGEST_RETRY_AFTER = 60.0
#: Bytes read of an error response, at most.
_ERROR_SIZE = 64 * 1024


class ApiTimeouts(Struct, frozen=True, gc=False):
    """Timeouts of requests, in seconds.

    ``silence`` ends a watch that brings no data. API servers send a bookmark about once a minute.
    """

    connect: float = 3.0
    read: float = 20.0
    silence: float = 90.0


class NoServer(NoAnswer):
    """Error for a connection that could not be made. Retrying soon puts no load on the server."""


class BrokenOff(Retryable):
    """Error for a watch whose connection was lost before the watch ended."""


class ApiRefusal(Retryable):
    """Error response of the API server. ``status`` is the HTTP status code."""

    def __init__(self, problem: str, remedy: str, status: int, retry_after: float = 0.0) -> None:
        super().__init__(problem, remedy, retry_after)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Return True if the server itself is failing or overloaded, so that a retry can succeed."""
        return self.status >= 500 or self.status == _TOO_MANY


class Denied(ApiRefusal):
    """Error for credentials or rights that the API server does not accept: 401 or 403."""


class Expired(PossibleGap):
    """Error for a resource version that is too old to watch from (410 Gone): relist."""


class ApiStream:
    """Response body of a watch, used by the thread that started it.

    ``read`` gets True if the piece before it ended inside an event.
    """

    def __init__(self, read: Callable[..., bytes], close: Callable[[], None]) -> None:
        self.read = read
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Close the watch's connection. Further calls do nothing."""
        close, self._close = self._close, None
        if close is not None:
            close()


class Api:
    """Client that sends one request at a time over one connection.

    A watch occupies the connection, so it needs a client of its own. Any request may raise ``NoAnswer``,
    ``ApiRefusal`` or ``Expired``. After ``cancel`` each raises ``Cancelled``.
    """

    def __init__(self, access: Access, timeouts: ApiTimeouts) -> None:
        self._access = access
        self._timeouts = timeouts
        self._turn = threading.Lock()
        self._socket = InterruptibleSocket()
        self._session: ApiSession | None = None
        #: True if the session's connection has answered, or if we dropped it: its end says nothing then.
        self._may_end = False
        self.name = access.name
        #: True if the last request got no response.
        self.is_down = False

    def get(
        self, path: str, alive: Callable[[], None] = no_heartbeat, read: float | None = None, /, **query: str
    ) -> dict[str, Any]:
        """Return an object or list. ``alive`` is called while the response is being read.

        ``read`` replaces the timeout of that name.
        """
        return self._ask("GET", _target(path, query), alive=alive, read=read)

    def patch(self, path: str, body: str) -> dict[str, Any]:
        """Send a strategic-merge patch and return the patched object."""
        return self._ask("PATCH", path, body, STRATEGIC)

    def post(self, path: str, obj: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, json.dumps(obj), "application/json")

    def watch(self, path: str, **query: str) -> ApiStream:
        """Start a watch. It blocks other requests until it is closed."""
        with ExitStack() as end:
            end.enter_context(self._turn)
            response = self._send("GET", _target(path, query))
            end.callback(self._reset)
            end.callback(response.close)
            body = beneath(response)
            body.sock.settimeout(self._timeouts.silence)
            return ApiStream(partial(self._read_piece, LiveBody(body)), end.pop_all().close)

    def _read_piece(self, body: LiveBody, runs: bool = False) -> bytes:
        try:
            piece = body.read(runs=runs)
        except TooSlow as error:
            raise self._lost(error) from None
        except TimeoutError:
            # The server also stays silent if it has not yet reached our resource version, as after a restored
            # backup.
            raise Expired(f"the watch was silent for {self._timeouts.silence:g} s") from None
        except (HTTPException, OSError, ValueError) as error:
            self._socket.check()
            log.log(V(2), "A watch broke off: %s: %s", type(error).__name__, error)
            raise BrokenOff("the connection of the watch was lost") from None
        return piece

    def reconnect(self) -> None:
        """Drop the current connection, which may be dead. May be called from any thread."""
        self._may_end = True
        self._socket.disconnect()

    def cancel(self) -> None:
        """Abort the current request and refuse later ones. May be called repeatedly, from any thread."""
        self._socket.cancel()

    def close(self) -> None:
        """Close the connection. Only for the thread that uses this object, and not during a watch."""
        with self._turn:
            self._reset()

    def _ask(
        self,
        method: str,
        target: str,
        body: str | None = None,
        kind: str = "",
        alive: Callable[[], None] = no_heartbeat,
        read: float | None = None,
    ) -> dict[str, Any]:
        headers = {"Content-Type": kind} if kind else {}
        with self._turn:
            response = self._send(method, target, body, headers, read)
            try:
                with response:
                    answer = decoded(body_of(response, alive))
            except (HTTPError, HTTPException, OSError, ValueError, RecursionError) as error:
                raise self._lost(error) from None
            if not isinstance(answer, dict):
                raise self._lost(ValueError("its answer is no object"))
            self._may_end = True
            if body is not None:
                # Writes are rare: do not leave the server with thousands of idle connections.
                self._reset()
            return answer

    def _send(
        self,
        method: str,
        target: str,
        body: str | None = None,
        headers: Mapping[str, str] | None = None,
        read: float | None = None,
    ) -> Any:
        """Send a request and return its response with the body unread. Raises for any status from 300 on."""
        self._socket.check()
        if self._session is None:
            self._session = self._access.open(self._socket)
        began = clock.now()
        try:
            response = self._session.request(
                method,
                target,
                {"User-Agent": _AGENT, "Accept": "application/json", **(headers or {})},
                body=body,
                timeout=Timeout(connect=self._timeouts.connect, read=read or self._timeouts.read),
            )
        except (Unreachable, HTTPError, HTTPException, OSError, ValueError) as error:
            if body is None and self._may_end and _trouble(error, 0) == BROKEN:
                self._reset()
                return self._send(method, target, body, headers, read)
            raise self._lost(error, clock.now() - began, read) from None
        self.is_down = False
        if response.status >= 300:
            with response:
                self._refuse(response)
        return response

    def _refuse(self, response: Any) -> None:
        try:
            told = json.loads(body_of(response, longest=_ERROR_SIZE))
        except (HTTPError, HTTPException, OSError, ValueError, RecursionError):
            told = None
        access, read = self._access, self._session.files if self._session else ()
        self._reset()
        self._socket.check()
        status = response.status
        if status == _GONE:
            raise Expired(_message(told) or "what was asked for is gone")
        problem = f"the API server says {status}" + (f": {_message(told)}" if _message(told) else "")
        wait = _retry_after(response.headers.get("Retry-After", ""))
        if status not in (_UNAUTHORIZED, _FORBIDDEN):
            raise ApiRefusal(problem, _remedy(status), status, wait)
        denied = Denied(problem, _remedy(status), status, wait)
        denied.is_cured = lambda: access.files() != read
        raise denied

    def _lost(self, error: Exception, waited: float = math.inf, read: float | None = None) -> NoAnswer:
        """Return an error for a failed connection, with the same text each time it fails the same way.

        ``waited`` is the age of the request in seconds. It tells the connect timeout, which also covers the
        TLS handshake, from the read timeout, which is ``read``.
        """
        self._reset()
        self._socket.check()
        self.is_down = True
        log.log(V(2), "The API server at %s: %s: %s", self.name, type(error).__name__, error)
        kind = NoServer if isinstance(error, Unreachable) else NoAnswer
        seconds = read or self._timeouts.read
        if waited < seconds:
            seconds = self._timeouts.connect
        return kind(
            f"the API server at {self.name} does not answer ({_trouble(error, seconds)})",
            "see that it runs and that this host reaches it",
        )

    def _reset(self) -> None:
        """Close the session. The next request reads the credentials again: they may have been rotated."""
        if self._session is not None:
            self._session.close()
        self._session, self._may_end = None, False
        self._socket.disconnect()


def _target(path: str, query: Mapping[str, str]) -> str:
    return quote(path) + (f"?{urlencode(query)}" if query else "")


def _message(told: Any) -> str:
    """Return the message of a Status object on one line, in at most 300 characters."""
    text = told.get("message") if isinstance(told, dict) else None
    return " ".join(text.split())[:300] if isinstance(text, str) else ""


def _remedy(status: int) -> str:
    if status == _UNAUTHORIZED:
        return "see that our token or certificate is valid"
    if status == _FORBIDDEN:
        return "give our service account the ClusterRole that docs/kubernetes.md shows"
    if status == 404:
        return "see that NODE_NAME is right"
    return "see the API server's log"


def _retry_after(text: str) -> float:
    return min(float(text), _LONGEST_RETRY_AFTER) if text.isdecimal() and len(text) < 6 else 0.0


def _trouble(error: Exception, seconds: float) -> str:
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "what it sends is no JSON"
    if isinstance(error, ValueError | RecursionError):
        return str(error)
    return failure_text(cause_beneath(error) if isinstance(error, HTTPError) else error, seconds)
