"""HTTP over a connection that another thread can cut: requests, answers of any length, TLS from files."""

from __future__ import annotations

import math
import select
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from io import BufferedReader
from pathlib import Path
from socket import socket
from typing import Any

from msgspec import Struct

from flanneld.errors import Fatal, Retryable
from flanneld.runtime import clock
from flanneld.runtime.sockets.interruptible import (
    InterruptibleSocket,
    PacedReader,
    TooSlow,
    Unreachable,
    no_heartbeat,
)
from flanneld.runtime.waits import readable

#: Bytes of a response, at most. etcd's list of a large cluster's leases takes some MB.
LONGEST_ANSWER = 64 << 20
_PIECE = 256 << 10
#: Bytes of a connection's buffer. A node of Kubernetes in JSON takes some 16 KiB.
_BUFFER = 32 << 10


class ResponseTooLarge(HTTPException):
    """Error for a response that exceeds the size limit."""


#: Words for a connection that ended before its answer did.
BROKEN = "it broke the connection"


def failure_text(error: Exception, seconds: float) -> str:
    """Return the words for an exchange that failed: for each kind of failure the same, without the server's.

    ``seconds`` is the time limit to name.
    """
    if isinstance(error, Unreachable | ResponseTooLarge | TooSlow):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    if type(error).__module__ == "ssl":  # else its classes would load OpenSSL
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"certificate verify failed: {error.verify_message}"
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return (error.reason or "TLS failed").lower().replace("_", " ")
    if isinstance(error, HTTPException) and not isinstance(error, RemoteDisconnected | IncompleteRead):
        return "it does not speak HTTP"
    return BROKEN


class _Buffer(BufferedReader):
    """Buffer that tells a head that breaks off, where ``HTTPResponse`` would see its end."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n") and len(line) != size:
            raise IncompleteRead(line)
        return line


class Response(HTTPResponse):
    """Response whose body is read at the pace that the rule for all stores demands."""

    reader: PacedReader
    sock: socket

    @classmethod
    def of(cls, sock: socket, waiting: Callable[[], None] | None, *args: Any, **kwargs: Any) -> Response:
        """Return the response to come on a socket; ``waiting`` as ``PacedReader`` has it."""
        response = cls(sock, *args, **kwargs)
        response.sock = sock
        response.reader = PacedReader(sock, response.fp.detach(), sock.gettimeout(), waiting)
        response.fp = _Buffer(response.reader, _BUFFER)
        return response

    def whole(self, alive: Callable[[], None] = no_heartbeat, longest: int | None = None) -> bytes:
        """Return the whole body. Raises ``HTTPException`` or ``OSError``.

        ``ResponseTooLarge`` means more than ``longest`` bytes, ``TooSlow`` a server that drips. ``alive`` is
        called for each part received, also from a slow server.
        """
        pieces, size = [], 0
        longest = LONGEST_ANSWER if longest is None else longest
        self.reader.expect_body(alive)
        while piece := self.read(_PIECE):
            size += len(piece)
            if size > longest:
                raise ResponseTooLarge(f"its answer is longer than {longest / (1 << 20):g} MiB")
            pieces.append(piece)
        if self.length:  # which read() does not notice
            raise IncompleteRead(b"", self.length)
        return b"".join(pieces)


class HttpConnection:
    """Connection of one thread, to one server at a time. Any thread may ``disconnect`` and ``cancel`` it."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._socket = InterruptibleSocket()
        self._http: _Http | None = None
        self.check = self._socket.check
        self.disconnect = self._socket.disconnect
        self.cancel = self._socket.cancel

    @property
    def is_open(self) -> bool:
        """True if the next request needs no new connection: the server has not closed this one while idle."""
        sock = self._http.sock if self._http is not None else None
        return sock is not None and not readable(sock.fileno(), 0)

    def connect(self, host: str, port: int, seconds: float) -> socket:
        """Connect, with a limit for each address and for the TLS handshake. Return the socket.

        Raises ``Unreachable``, ``OSError`` or ``Cancelled``.
        """
        self.reset()
        sock = self._socket.connect(host, port, seconds)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_hostname=host)
        self._http = _Http(host, port, sock)
        return sock

    def request(
        self,
        method: str,
        target: str,
        body: str | None,
        headers: Mapping[str, str],
        seconds: float,
        waiting: Callable[[], None] | None = None,
    ) -> Response:
        """Send a request and return the response, whose head has to come within ``seconds``.

        With ``waiting`` that begins with the first byte. Raises ``HTTPException`` or ``OSError``.
        """
        assert self._http is not None
        self._http.sock.settimeout(seconds)
        self._http.waiting = waiting
        # A server may answer at the head, with 401 or 413, and end the connection without reading the rest.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._http.request(method, target, body.encode() if body is not None else None, dict(headers))
        response = self._http.getresponse()
        assert isinstance(response, Response)
        return response

    def reset(self) -> None:
        """Close the connection. Only for the thread that uses it."""
        if self._http is not None:
            self._http.close()
        self._http = None
        self._socket.disconnect()


class _Http(HTTPConnection):
    waiting: Callable[[], None] | None = None
    auto_open = 0

    def __init__(self, host: str, port: int, sock: socket) -> None:
        super().__init__(host, port)
        self.sock = sock
        if hasattr(sock, "pending"):  # one of ssl, whose class would load OpenSSL
            self.default_port = 443

    def response_class(  # type: ignore[override] # http.client only calls it
        self, sock: socket, *args: Any, **kwargs: Any
    ) -> HTTPResponse:
        return Response.of(sock, self.waiting, *args, **kwargs)


class LiveBody:
    """Body that a server sends over time. A silence is no error, and loses nothing."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._sock, self._reader = response.sock, response.reader
        self._buffer = response.fp
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
        pieces = [self._response.read1(_PIECE)]
        size = len(pieces[0])
        while pieces[-1] and size < _PIECE and self._has_data():
            try:
                pieces.append(self._response.read1(_PIECE))
            except (HTTPException, OSError) as failure:
                self._failure = failure  # after what has come before
                break
            size += len(pieces[-1])
        return b"".join(pieces)

    def _has_data(self) -> bool:
        """Return True if a read returns at once, as far as that is known without one."""
        if self._buffer.closed or self._response.length == 0 or self._failure is not None:
            return True
        buffered = self._peek()
        if self._response.chunk_left != 0:
            return bool(buffered)
        # The line break after a chunk is in the buffer until the next chunk is read.
        if len(buffered) > 2:
            return True
        pending = getattr(self._sock, "pending", None)  # one of ssl has that
        return pending() > 0 if pending else bool(self._poll.poll(0))

    def _peek(self) -> bytes:
        self._sock.setblocking(False)
        try:
            return self._buffer.peek()
        except OSError as failure:
            if type(failure).__name__ != "SSLWantReadError":  # a class that would load OpenSSL
                raise
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


# ---- TLS from files that flags name --------------------------------------------------------------


class TlsFiles(Struct, frozen=True, gc=False):
    """Flags ``-remote-certfile``, ``-remote-keyfile`` and ``-remote-cafile``, each empty if not given.

    ``flags`` is the beginning of their names.
    """

    certfile: str = ""
    keyfile: str = ""
    cafile: str = ""
    flags: str = "-remote"

    def __bool__(self) -> bool:
        """Return True if there is one."""
        return any((self.certfile, self.keyfile, self.cafile))

    def check(self) -> None:
        """Raise ``Fatal`` for half a pair, or for a file that cannot be read."""
        if bool(self.certfile) != bool(self.keyfile):
            problem = f"only one of {self.flags}-certfile and {self.flags}-keyfile is set"
            raise Fatal(problem, "set both, or none")
        for name in ("cafile", "certfile", "keyfile"):
            try:
                if file := getattr(self, name):
                    Path(file).open("rb").close()
            except OSError as error:
                remedy = f"correct {self.flags}-{name} or the file"
                raise Fatal(f"cannot read {file}: {error.strerror}", remedy) from None

    def load(self, context: ssl.SSLContext) -> None:
        """Load authority, certificate and key, as far as given. Raises ``Fatal``."""
        if self.cafile:
            remedy = f"set {self.flags}-cafile to the authority's certificate in PEM format"
            with _refusing(f"{self.cafile} holds no certificates", remedy):
                context.load_verify_locations(self.cafile)
        if self.certfile:
            problem = f"{self.certfile} and {self.keyfile} do not hold a certificate and its key"
            remedy = f"set {self.flags}-certfile and {self.flags}-keyfile to a matching pair in PEM format"
            with _refusing(problem, remedy):
                context.load_cert_chain(self.certfile, self.keyfile, self._no_passphrase)

    def _no_passphrase(self) -> str:
        problem = f"the key in {self.keyfile} is encrypted"
        raise Fatal(problem, f"set {self.flags}-keyfile to a key without a passphrase")


def client_context(files: TlsFiles, *, is_pinned: bool = False) -> ssl.SSLContext:
    """Return a client's TLS. Without an authority the system's are trusted, as in Go.

    With ``is_pinned`` the server is known by its certificate: neither authority nor name is checked.
    """
    files.check()
    # Not create_default_context: since Python 3.13 it refuses authorities that Go accepts.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if is_pinned:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED if files.cafile else ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    files.load(context)
    if not files.cafile and not is_pinned:
        context.load_default_certs()
    return context


@contextmanager
def _refusing(problem: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        raise Fatal(f"{problem}: {failure_text(error, 0)}", remedy) from None
