"""urllib3 connection pools on interruptible sockets, a size limit, and responses without end."""

from __future__ import annotations

import math
import select
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from io import BufferedReader
from socket import socket
from ssl import SSLSocket, SSLWantReadError
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ReadTimeoutError
from urllib3.response import BaseHTTPResponse

from flanneld.errors import Retryable
from flanneld.runtime import clock
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, PacedReader, TooSlow, no_heartbeat

#: Bytes of a response, at most. etcd's list of a large cluster's leases takes some MB.
LONGEST_ANSWER = 64 << 20
_PIECE = 256 << 10
#: Bytes of a connection's buffer. A node of Kubernetes in JSON takes some 16 KiB.
_BUFFER = 32 << 10


class ResponseTooLarge(HTTPException):
    """Error for a response that exceeds the size limit."""


class _Connection(HTTPConnection):
    def __init__(self, *args: Any, interruptible_socket: InterruptibleSocket, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interruptible_socket = interruptible_socket
        #: The response beneath urllib3's, its socket and its reader: they tell what has come already.
        self.beneath: tuple[HTTPResponse, socket, PacedReader] | None = None

    def response_class(  # type: ignore[override] # http.client only calls it
        self, sock: socket, *args: Any, **kwargs: Any
    ) -> HTTPResponse:
        response = HTTPResponse(sock, *args, **kwargs)
        reader = PacedReader(sock, response.fp.detach(), sock.gettimeout())
        response.fp = BufferedReader(reader, _BUFFER)
        self.beneath = response, sock, reader
        return response

    def _new_conn(self) -> socket:
        return self._interruptible_socket.connect(self._dns_host, self.port or 0, float(self.timeout or 0))


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class Pool(HTTPConnectionPool):
    """Connection pool on an ``InterruptibleSocket``, given as argument; so is ``TlsPool``."""

    ConnectionCls = _Connection


class TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def body_of(
    response: BaseHTTPResponse, alive: Callable[[], None] = no_heartbeat, longest: int | None = None
) -> bytes:
    """Return the whole body. Raises ``ResponseTooLarge`` if it exceeds ``longest`` bytes, or ``TooSlow``.

    ``alive`` is called for each part received, also from a slow server.
    """
    pieces, size = [], 0
    longest = LONGEST_ANSWER if longest is None else longest
    if isinstance(response.connection, _Connection) and response.connection.beneath:
        response.connection.beneath[2].expect_body(alive)
    try:
        while piece := response.read(_PIECE):
            size += len(piece)
            if size > longest:
                raise ResponseTooLarge(f"its answer is longer than {longest / (1 << 20):g} MiB")
            pieces.append(piece)
    except ReadTimeoutError as error:
        if isinstance(error.__cause__, TooSlow):
            raise error.__cause__ from None
        raise
    return b"".join(pieces)


class LiveBody:
    """Body that a server sends over time. A silence is no error, and loses nothing.

    It is read from http.client's response. urllib3's would take twice as long for a short piece.
    """

    def __init__(self, response: BaseHTTPResponse) -> None:
        connection = response.connection
        assert isinstance(connection, _Connection)
        assert connection.beneath is not None
        self._response = response
        self._raw, self._sock, self._reader = connection.beneath
        self._buffer = self._raw.fp
        self._limit = self._sock.gettimeout()
        self._failure: Exception | None = None
        self._runs = False
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)

    def more_within(self, timeout: float) -> bool:
        """Wait for data or the end. Return False after ``timeout`` seconds without."""
        return self._has_data() or bool(self._poll.poll(math.ceil(1000 * max(0.0, timeout))))

    def read(self, *, runs: bool = False) -> bytes:
        """Return what has come, or else the next piece; empty at the end.

        With ``runs`` the piece before has an end to come, for which the rule for running answers holds.
        Raises ``HTTPException`` or ``OSError``, of these ``TimeoutError`` after the socket's timeout.
        """
        if self._failure is not None:
            raise self._failure
        if not runs:
            self._reader.allow(self._limit)
        elif not self._runs:
            self._reader.expect_body()
        self._runs = runs
        pieces = [self._raw.read1(_PIECE)]
        size = len(pieces[0])
        while pieces[-1] and size < _PIECE and self._has_data():
            try:
                pieces.append(self._raw.read1(_PIECE))
            except (HTTPException, OSError) as failure:
                self._failure = failure  # after what has come before
                break
            size += len(pieces[-1])
        return b"".join(pieces)

    def close(self) -> None:
        self._response.close()

    def _has_data(self) -> bool:
        """Return True if a read returns at once, as far as that is known without one."""
        if self._buffer.closed or self._raw.length == 0 or self._failure is not None:
            return True
        buffered = self._peek()
        if self._raw.chunk_left != 0:
            return bool(buffered)
        # The line break after a chunk is in the buffer until the next chunk is read.
        if len(buffered) > 2:
            return True
        return self._sock.pending() > 0 if isinstance(self._sock, SSLSocket) else bool(self._poll.poll(0))

    def _peek(self) -> bytes:
        self._sock.setblocking(False)
        try:
            return self._buffer.peek()
        except SSLWantReadError:
            return b""
        finally:
            self._sock.settimeout(self._limit)


#: Bytes of a line, at most. The history of a large cluster in one object takes some MB.
LONGEST_LINE = 64 << 20


class Lines:
    """Assembler of lines from the pieces of a stream."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that a piece completes. Raises ``Retryable`` for one that exceeds the limit."""
        if b"\n" not in piece:
            self._rest.append(piece)
            self._size += len(piece)
            if self._size > LONGEST_LINE:
                raise Retryable("the watch sends a line without end", "see what it is that answers there")
            return []
        *lines, rest = b"".join([*self._rest, piece]).split(b"\n")
        self._rest, self._size = [rest], len(rest)
        return [line for line in lines if line.strip()]

    @property
    def is_incomplete(self) -> bool:
        """Return True if the end of a line has yet to come."""
        return self._size > 0

    def rest(self) -> bytes:
        """Return and discard the incomplete line at the end."""
        rest, self._rest, self._size = b"".join(self._rest), [], 0
        return rest.strip()


class LineStream:
    """Lines of a body that the server sends over time."""

    def __init__(self, body: LiveBody) -> None:
        self._body = body
        self._lines = Lines()

    def read(self, timeout: float) -> list[bytes] | None:
        """Return the lines that have come or come next, or None after ``timeout`` seconds.

        Raises ``HTTPException``, also at the end, or ``OSError``.
        """
        deadline = clock.now() + timeout
        while self._body.more_within(deadline - clock.now()):
            piece = self._body.read()
            # The last line may lack its end.
            lines = self._lines.feed(piece) if piece else [*filter(None, [self._lines.rest()])]
            if lines:
                return lines
            if not piece:
                raise HTTPException("the answer has ended")
        return None

    def close(self) -> None:
        self._body.close()
