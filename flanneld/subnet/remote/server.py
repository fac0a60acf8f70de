"""HTTP server of the REST API, with a thread for each connection that has sent a request, and its socket."""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

from flanneld.errors import Fatal, cause_of, printable
from flanneld.runtime import clock, waits
from flanneld.runtime.server import READABLE, WRITABLE, Conversation, Limits, PolledServer, listen
from flanneld.runtime.sockets.interruptible import TCP_OPTIONS, address_of
from flanneld.subnet.remote.rest import NOT_FOUND, TEXT, RestAnswer, RestApi, RestRequest
from flanneld.subnet.remote.wire import INDEX, SECRET

log = logging.getLogger(__name__)

T = TypeVar("T")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Seconds until the first request is there, with the TLS handshake; for a further request from its first
#: byte to its last; and between two requests.
FIRST_TIME, REQUEST_TIME, IDLE_TIME = 10.0, 10.0, 120.0
#: Seconds for a client to receive an answer.
ANSWER_TIME = 30.0
#: Bytes of a request's head, and of its body, at most; a lease has a few hundred.
MAX_HEAD, MAX_BODY = 64 << 10, 64 << 10
#: Connections without a request at a time, in total and of one source. For a new one the oldest is closed.
#: One source may be a NAT, whose nodes all come back at once.
SEATS, SEATS_OF_ONE_SOURCE = 2048, 1024
#: Connections with one, a thread each. A client of Go flannel has three, two of them waiting.
CONNECTIONS = 8192
#: Bytes before a record of TLS: its type, version and size.
_RECORD_HEAD = 5
#: Type of the record with which a client begins (RFC 8446, 5.1).
_HANDSHAKE = b"\x16"
#: Events by which a TLS socket says what it waits for.
_EVENTS = {
    ssl.SSLWantReadError: READABLE,
    ssl.SSLWantWriteError: WRITABLE,
    BlockingIOError: READABLE,
}
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([0-9]{1,9})[ \t\r]*\n", re.IGNORECASE)
_EXPECTS = re.compile(rb"\nexpect:[ \t]*100-continue[ \t\r]*\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\ntransfer-encoding:", re.IGNORECASE)
#: Content type of Prometheus' text format.
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class LeaseServer(PolledServer):
    """Server on one listening socket until ``close``."""

    def __init__(
        self,
        listener: socket.socket,
        api: RestApi,
        tls: ssl.SSLContext | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        limits = Limits(FIRST_TIME, SEATS, SEATS_OF_ONE_SOURCE, threads=connections)
        super().__init__(listener, self._receive, limits, "Cannot answer a request")
        self.api = api
        self.tls = tls
        #: Answers not sent yet.
        self._busy = 0
        #: Answers by method and status.
        self._answers: Counter[tuple[str, int]] = Counter()

    def close(self, within: float = 0.3) -> None:
        """End ``serve`` after the ready answers were sent. May be called repeatedly, from any thread."""
        waits.until(lambda: self._busy == 0, within=within, every=0.01)
        super().close()

    def _receive(self, connection: socket.socket) -> Conversation:
        """Receive the first request, so that only clients with one get a thread."""
        if self.tls is not None:
            yield from _first_record(connection)
        if connection.family != socket.AF_UNIX:
            for level, option, value in TCP_OPTIONS:
                connection.setsockopt(level, option, value)
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        is_complete = False
        try:
            if isinstance(connection, ssl.SSLSocket):
                yield from _ready(connection.do_handshake)
            received = yield from _first_request(connection)
            is_complete = True
        finally:
            if not is_complete:
                connection.close()
        return connection, partial(_RequestHandler, connection, received, self)

    def answer(self, request: RestRequest) -> RestAnswer:
        with self.lock:
            self._busy += 1
        try:
            return self.api.answer(request)
        except Exception:
            log.exception("Cannot answer %s %s", request.method, shown(request.target))
            return RestAnswer(500, b"internal error", TEXT)

    def sent(self, request: RestRequest, answer: RestAnswer) -> None:
        """Count an answer, sent or not."""
        with self.lock:
            self._busy -= 1
            self._answers[request.method, answer.status] += 1

    def metrics(self, _accept: str) -> tuple[int, str, bytes]:
        """Return the status, content type and body of /metrics."""
        return 200, METRICS, self.metrics_text().encode()

    def metrics_text(self) -> str:
        """Return the counters in Prometheus' text format."""
        with self.lock:
            counted = sorted(self._answers.items())
            gauges = {"connections": self.connections, "pending_requests": self._busy}
        lines = ["# TYPE flannel_server_requests_total counter"]
        for (method, status), count in counted:
            lines.append(f'flannel_server_requests_total{{method="{method}",status="{status}"}} {count}')
        for name, value in gauges.items():
            lines += [f"# TYPE flannel_server_{name} gauge", f"flannel_server_{name} {value}"]
        return "\n".join([*lines, ""])


def _first_record(connection: socket.socket) -> Generator[int, None, None]:
    """Wait for the whole first record of TLS: for a handshake that has begun OpenSSL takes some 45 KiB."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _RECORD_HEAD)
    yield READABLE
    head = connection.recv(_RECORD_HEAD, socket.MSG_PEEK)
    # OpenSSL refuses all that is no handshake at its first bytes, such as plain HTTP.
    size = _RECORD_HEAD + (int.from_bytes(head[3:], "big") if head[:1] == _HANDSHAKE else 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
    if len(connection.recv(size, socket.MSG_PEEK)) < size:
        yield READABLE
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _ready(act: Callable[[], T]) -> Generator[int, None, T]:
    """Call ``act`` until the socket is ready for it, and return its result."""
    while True:
        try:
            return act()
        except tuple(_EVENTS) as wanted:
            event = _EVENTS[type(wanted)]
        yield event


def _first_request(connection: socket.socket) -> Generator[int, None, bytes]:
    """Return the first request with its body, or as much of it as is needed to refuse it."""
    data, size = bytearray(), 0
    while not size or len(data) < size:
        piece = yield from _ready(lambda: connection.recv(MAX_HEAD))
        if not piece:
            raise ConnectionError
        seen = len(data)
        data += piece
        if size:
            continue
        size = _size(data, max(0, seen - 3))
        if len(data) < size and _EXPECTS.search(data):
            connection.send(CONTINUE)  # the first bytes on this connection find room
    return bytes(data)


def _size(data: bytearray, start: int) -> int:
    """Return the bytes of a request; 0 if the end of its head has yet to come. It is not before ``start``."""
    ends = [(at, at + len(end)) for end in (b"\r\n\r\n", b"\n\n") if (at := data.find(end, start)) >= 0]
    if not ends:
        return len(data) if len(data) > MAX_HEAD else 0
    _, end = min(ends)
    length = _LENGTH.search(data, 0, end)
    body = int(length[1]) if length and not _CHUNKED.search(data, 0, end) else 0
    return end + (body if body <= MAX_BODY else 0)


class _TimedReader(io.RawIOBase):
    """Reader of a connection with a deadline, which the first byte of a request shortens.

    ``received`` has come already.
    """

    def __init__(self, connection: socket.socket, received: bytes) -> None:
        self._connection = connection
        self._received = received
        self._deadline = 0.0
        self._is_idle = False

    def expect(self) -> None:
        """Wait for the next request."""
        self._deadline, self._is_idle = clock.now() + IDLE_TIME, True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._received:
            size = min(len(buffer), len(self._received))
            buffer[:size], self._received = self._received[:size], self._received[size:]
        else:
            self._connection.settimeout(max(0.001, self._deadline - clock.now()))
            size = self._connection.recv_into(buffer)
        if self._is_idle:
            self._deadline, self._is_idle = clock.now() + REQUEST_TIME, False
        return size


class _RequestHandler(BaseHTTPRequestHandler):
    """Handler of one connection whose first request has come: made, it answers until the connection ends."""

    protocol_version = "HTTP/1.1"
    server: LeaseServer  # type: ignore[assignment] # no server of the standard library

    def __init__(self, connection: socket.socket, received: bytes, server: LeaseServer) -> None:
        self.connection = connection
        self.server = server
        self._reader = _TimedReader(connection, received)
        self._is_first = True
        self.wfile = io.BytesIO()
        self.rfile = io.BufferedReader(self._reader)
        try:
            self.handle()
        finally:
            self.rfile.close()

    def handle_expect_100(self) -> bool:
        return self._is_first or super().handle_expect_100()  # the first request has its body

    def handle(self) -> None:
        self.close_connection = False
        while not self.close_connection:
            self._reader.expect()
            try:
                self.handle_one_request()
                self._flush()
            except (OSError, ValueError):  # a fault of the client
                return
            self._is_first = False

    def do_any(self) -> None:
        """Answer one request that was read up to its body."""
        body = self._body()
        if body is None:
            return
        request = RestRequest(
            self.command,
            self.path,
            body,
            self._is_there,
            authorization=self.headers.get("Authorization", ""),
            secret=self.headers.get(SECRET, ""),
            wants_index=INDEX in self.headers,
            server=address_of(str(self.connection.getsockname()[0])),
        )
        answer = self.server.answer(request)
        try:
            self._send(answer)
            self._flush()
        finally:
            self.server.sent(request, answer)
        log.info("%s %s - %d", self.command, shown(self.path), answer.status)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_any  # noqa: N815 - http.server's names

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that ``http.server`` cannot parse."""
        del explain
        if code == HTTPStatus.NOT_IMPLEMENTED:  # an unknown method
            self._send(NOT_FOUND)
            self.close_connection = True
            return
        text = message or HTTPStatus(code).phrase
        self._send(RestAnswer(code, text.encode(errors="backslashreplace"), TEXT))
        self.close_connection = True

    def send_response_only(self, code: int, message: str | None = None) -> None:
        if self.request_version == "HTTP/0.9":
            self.request_version = "HTTP/1.0"
        super().send_response_only(code, message)

    def log_message(self, *_message: object) -> None:
        """Log nothing: our own log line has Go flannel's format."""

    def _body(self) -> bytes | None:
        """Read the body; None if it is unreadable and the request was answered with an error."""
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding"):
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
        elif not (length.isascii() and length.isdigit()):
            self.send_error(HTTPStatus.BAD_REQUEST)
        elif len(length) > 9 or int(length) > MAX_BODY:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._flush()  # "100 Continue", if the client waits for it
            body = self.rfile.read(int(length))
            if len(body) == int(length):
                return body
            self.close_connection = True
        return None

    def _send(self, answer: RestAnswer) -> None:
        self.send_response_only(answer.status)
        if answer.content_type:
            self.send_header("Content-Type", answer.content_type)
        if answer.status == HTTPStatus.NOT_FOUND:
            self.send_header("X-Content-Type-Options", "nosniff")
        if answer.location:
            self.send_header("Location", answer.location)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("Connection", "close")  # strangers keep no thread
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _flush(self) -> None:
        assert isinstance(self.wfile, io.BytesIO)
        data = self.wfile.getvalue()
        if data:
            self.wfile.seek(0)
            self.wfile.truncate()
            self.connection.settimeout(ANSWER_TIME)
            self.connection.sendall(data)

    def _is_there(self) -> bool:
        """Return True unless the client has closed the connection."""
        return not waits.hung_up(self.connection.fileno())


def shown(target: str) -> str:
    """Return a request's target, safe for one log line."""
    return target[:1000].encode("unicode_escape").decode("ascii")


#: The first descriptor that systemd passes (sd_listen_fds(3)).
_FIRST = 3
#: Backlog of connections to accept.
_QUEUE = 1024


def open_listener(text: str, environ: Mapping[str, str]) -> socket.socket:
    """Return the listening socket for ``host:port``, ``tcp://host:port``, ``fd://`` or ``fd://N``.

    Raises ``Fatal`` with Go flannel's text; Go flannel goes on without a listener.
    """
    scheme, separator, rest = text.rpartition("://")
    try:
        if scheme == "fd":
            return _activated(rest, environ)
        if separator and scheme != "tcp":
            raise _failed(text, "bad listener scheme", "give host:port, tcp://host:port or fd://")
        return _bound(text, rest)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _failed(
            text, cause_of(error).lower(), "give a free port and an address of this host with -listen"
        ) from None


def _bound(text: str, address: str) -> socket.socket:
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise _failed(text, "missing port in address", "give -listen=host:port, or :port for all addresses")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        return _everywhere(int(port))
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return listen(found[0][0], found[0][4], _QUEUE)


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_QUEUE, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_QUEUE)


def _activated(text: str, environ: Mapping[str, str]) -> socket.socket:
    """Return a socket passed by systemd; the first if none is named."""
    count = _passed(environ)
    shown = f"fd://{text}"
    remedy = "start flanneld through its .socket unit, and name one of its sockets with -listen=fd://N"
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _failed(shown, "fd index is not a number", "give fd:// or fd://3")
    number = int(text) if text else _FIRST
    if not _FIRST <= number < _FIRST + count:
        raise _failed(shown, f"fd {text} is out of range ({_FIRST + count})", remedy)
    try:
        is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        raise _failed(shown, f"fd {text} was not socket activated", remedy)
    listener = socket.socket(fileno=number)
    if listener.type != socket.SOCK_STREAM or not listener.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        listener.detach()
        raise _failed(shown, f"fd {text} was not socket activated", remedy)
    listener.setblocking(True)
    os.set_inheritable(number, False)
    return listener


def _passed(environ: Mapping[str, str]) -> int:
    """Return the number of sockets that systemd has passed to this process."""
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID", "") != str(os.getpid()):
        return 0
    return int(count) if count.isascii() and count.isdigit() and len(count) < 5 else 0


def _failed(text: str, problem: str, remedy: str) -> Fatal:
    return Fatal(f"Error listening on {printable(text)}: {problem}", remedy)
