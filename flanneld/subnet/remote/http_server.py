"""HTTP server of the REST API: ``http.server``, with a thread for each connection."""

from __future__ import annotations

import io
import logging
import socket
import ssl
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from flanneld.runtime import clock, waits
from flanneld.runtime.sockets.host_addresses import address_of
from flanneld.runtime.sockets.threaded_server import ThreadedServer
from flanneld.subnet.remote.rest import NOT_FOUND, TEXT, RestAnswer, RestApi, RestRequest
from flanneld.subnet.remote.wire import INDEX

log = logging.getLogger(__name__)

#: Seconds for a TLS handshake, for a request from its first byte to its last, and between two requests.
HANDSHAKE_TIME, REQUEST_TIME, IDLE_TIME = 10.0, 10.0, 120.0
#: Seconds for a client to receive an answer.
ANSWER_TIME = 30.0
#: Bytes of a request's body, at most; a lease has a few hundred.
MAX_BODY = 64 << 10
#: Connections at a time. A client of Go flannel has three, two of them waiting.
CONNECTIONS = 8192
#: TCP keepalive finds vanished clients within half a minute: a watch has nothing to send them.
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),  # milliseconds
)
#: Content type of Prometheus' text format.
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class LeaseServer(ThreadedServer):
    """Server on one listening socket until ``close``."""

    def __init__(
        self,
        listener: socket.socket,
        api: RestApi,
        tls: ssl.SSLContext | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        super().__init__(listener, _RequestHandler, connections)
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


class _TimedReader(io.RawIOBase):
    """Reader of a connection with a deadline, which the first byte of a request shortens."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = 0.0
        self._is_idle = False

    def expect(self) -> None:
        """Wait for the next request."""
        self._deadline, self._is_idle = clock.now() + IDLE_TIME, True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(0.001, self._deadline - clock.now()))
        size = self._connection.recv_into(buffer)
        if self._is_idle:
            self._deadline, self._is_idle = clock.now() + REQUEST_TIME, False
        return size


class _RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LeaseServer
    connection: socket.socket

    def setup(self) -> None:
        self.connection = self.request
        self._reader = _TimedReader(self.connection)
        self._is_ended = False
        self._ready = False
        self.wfile = io.BytesIO()
        self.rfile = io.BufferedReader(self._reader)
        try:
            if self.connection.family != socket.AF_UNIX:
                for level, option, value in _OPTIONS:
                    self.connection.setsockopt(level, option, value)
            if self.server.tls is not None:
                self.connection.settimeout(HANDSHAKE_TIME)
                self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
                self._reader._connection = self.connection  # noqa: SLF001 - the same reader, now encrypted
            self._ready = True
        except OSError as error:
            log.debug("A client's TLS handshake failed: %s", error)

    def handle(self) -> None:
        if not self._ready:
            return
        self.close_connection = False
        while not self.close_connection:
            self._reader.expect()
            try:
                self.handle_one_request()
                self._flush()
            except (OSError, ValueError):  # a fault of the client
                return

    def finish(self) -> None:
        if self.connection is not self.request:
            self.connection.close()
        self.rfile.close()

    def do_any(self) -> None:
        """Answer one request that was read up to its body."""
        body = self._body()
        if body is None:
            return
        header = self.headers.get("Authorization", "")
        wants_index = INDEX in self.headers
        server = address_of(str(self.connection.getsockname()[0]))
        request = RestRequest(
            self.command, self.path, body, self._is_there, header, wants_index, server=server
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
