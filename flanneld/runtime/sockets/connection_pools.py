"""urllib3 connection pools on interruptible sockets, and a size limit for responses."""

from __future__ import annotations

from collections.abc import Callable
from http.client import HTTPException
from socket import socket
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.response import BaseHTTPResponse

from flanneld.runtime.sockets.interruptible_socket import InterruptibleSocket

#: Bytes of a response, at most. etcd's list of a large cluster's leases takes some MB.
_LONGEST_ANSWER = 64 << 20
_PIECE = 256 << 10


class ResponseTooLarge(HTTPException):
    """Error for a response that exceeds the size limit."""


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, interruptible_socket: InterruptibleSocket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interruptible_socket = interruptible_socket

    def _new_conn(self) -> socket:
        return self._interruptible_socket.connect(self._dns_host, self.port or 0, float(self.timeout or 0))


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class Pool(HTTPConnectionPool):
    """Connection pool on an ``InterruptibleSocket``, given as argument; so is ``TlsPool``."""

    ConnectionCls = _Connection


class TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def no_heartbeat() -> None:
    """Do nothing: the heartbeat callback for short responses."""


def body_of(
    response: BaseHTTPResponse, alive: Callable[[], None] = no_heartbeat, longest: int | None = None
) -> bytes:
    """Return the whole body. Raises ``ResponseTooLarge`` if it exceeds ``longest`` bytes.

    ``alive`` is called for each part received, also from a slow server.
    """
    pieces, size = [], 0
    longest = _LONGEST_ANSWER if longest is None else longest
    while piece := response.read(_PIECE):
        size += len(piece)
        if size > longest:
            raise ResponseTooLarge(f"its answer is longer than {longest / (1 << 20):g} MiB")
        pieces.append(piece)
        alive()
    return b"".join(pieces)
