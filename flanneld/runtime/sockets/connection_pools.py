"""urllib3 connection pools on interruptible sockets, for libraries that bring their own credentials."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from socket import socket
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.response import BaseHTTPResponse
from urllib3.util.ssl_ import create_urllib3_context, resolve_cert_reqs

from flanneld.runtime.sockets.http_connection import Response
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, Unreachable, no_heartbeat


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
