"""/healthz and /readyz: how we are, for a kubelet or a load balancer."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flanneld.errors import Fatal

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler
    from socketserver import ThreadingTCPServer

log = logging.getLogger(__name__)

#: From the first byte to the last, in seconds.
REQUEST_TIME = 3.0
#: Of a request line with its headers, in bytes.
MAX_HEAD = 16 * 1024
#: Connections beyond this many threads are closed at once: the daemon needs its file descriptors itself.
MAX_THREADS = 100


@dataclass(frozen=True, slots=True)
class Checks:
    """What the answers are made of. The functions are called from several threads, and must not block."""

    #: A line for each task that is late; empty when all is well.
    overdue: Callable[[], list[str]]
    #: Whether pods can be started on this node.
    ready: Callable[[], bool]
    #: What is missing to be ready, one line each, as far as it is known.
    missing: Callable[[], list[str]] = list
    #: What a ready node lacks nevertheless, one line each.
    caveats: Callable[[], list[str]] = list
    #: Each part of the daemon, with what is not well with it: for those who ask for more.
    parts: Callable[[], list[tuple[str, str]]] = list
    #: Turns an Accept header into the content type and the page of /metrics.
    metrics: Callable[[str], tuple[str, bytes]] | None = None


def answer(path: str, checks: Checks) -> tuple[int, str]:
    """HTTP status and body; the first lines of the bodies are upstream's."""
    name, _, query = path.partition("?")
    match name:
        case "/healthz":
            late = checks.overdue()
            return (500, "\n".join(late)) if late else (200, "flanneld is running")
        case "/readyz":
            more = _each(checks.parts()) if query.partition("=")[0] == "verbose" else []
            if checks.ready():
                return 200, "\n".join(["flanneld is ready", *checks.caveats(), *more])
            return 503, "\n".join(["flanneld is not ready yet", *checks.missing(), *more])
    return 404, "not found; ask for /healthz or /readyz"


def _each(parts: list[tuple[str, str]]) -> list[str]:
    """In the words of kube-apiserver's verbose checks."""
    return [f"[-]{name}: {trouble}" if trouble else f"[+]{name} ok" for name, trouble in parts]


class HealthServer:
    """Answers on one address and port (0: any free one) from its construction to ``close``.

    Raises ``Fatal`` when it cannot listen there.
    """

    def __init__(self, ip: str, port: int, checks: Checks) -> None:
        self._closing = threading.Event()
        try:
            self._server = _listen(ip, port, _handler(checks), self._closing)
        except (OSError, OverflowError, UnicodeError) as error:
            raise Fatal(
                f"cannot listen for health checks on {ip} port {port}: {error}",
                "give a free port with -healthz-port and an address of this host with -healthz-ip",
            ) from error

    @property
    def port(self) -> int:
        port: int = self._server.socket.getsockname()[1]
        return port

    def serve(self) -> None:
        """Answer until ``close``."""
        with self._server:
            while not self._closing.is_set():
                self._server.handle_request()

    def close(self) -> None:
        """End ``serve`` at once. May be called from any thread, repeatedly."""
        self._closing.set()
        with contextlib.suppress(OSError):  # closed already
            self._server.socket.shutdown(socket.SHUT_RDWR)


def _listen(
    ip: str, port: int, handler: type[BaseHTTPRequestHandler], closing: threading.Event
) -> ThreadingTCPServer:
    # Not http.server.ThreadingHTTPServer: that one asks the DNS for its own name first.
    from socketserver import ThreadingTCPServer

    class Server(ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 128

        def get_request(self) -> tuple[socket.socket, object]:
            try:
                return super().get_request()
            except OSError:
                # Out of file descriptors, say. The connection stays in the queue: do not spin on it.
                closing.wait(0.1)
                raise

        def verify_request(self, *_connection: object) -> bool:
            return threading.active_count() < MAX_THREADS

        def handle_error(self, *_connection: object) -> None:
            error = sys.exception()
            if not isinstance(error, OSError):  # that would be the client's affair
                log.error("cannot answer a health check", exc_info=error)

    return Server((ip, port), handler)


def _handler(checks: Checks) -> type[BaseHTTPRequestHandler]:
    # Imported here: it costs 15 ms and 5 MiB, and the health checks are off by default.
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        server_version = "flanneld"
        sys_version = ""
        wbufsize = -1

        def handle(self) -> None:
            deadline = time.monotonic() + REQUEST_TIME
            self.rfile = io.BytesIO(_read_head(self.connection, deadline))
            self.raw_requestline = self.rfile.readline()
            # Parsing answers by itself what it cannot understand.
            if self.raw_requestline and self.parse_request():
                self._answer()
            self.wfile.flush()
            _hang_up(self.connection, deadline)

        def _answer(self) -> None:
            if checks.metrics and self.path.partition("?")[0] == "/metrics":
                self._send(200, *checks.metrics(self.headers.get("Accept", "")))
                return
            status, text = answer(self.path, checks)
            self._send(status, "text/plain; charset=utf-8", text.encode(errors="backslashreplace"))

        def _send(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_message: object) -> None:
            """Say nothing: health checks come every few seconds, for ever."""

    return Handler


def _read_head(connection: socket.socket, deadline: float) -> bytes:
    """The request line and the headers. Raises ``TimeoutError`` however slowly they trickle in."""
    head = b""
    while b"\n\r\n" not in head and b"\n\n" not in head and len(head) < MAX_HEAD:
        chunk = _receive(connection, deadline)
        if not chunk:
            break
        head += chunk
    return head


def _hang_up(connection: socket.socket, deadline: float) -> None:
    """Let the client close first: to close on unread data would take our answer back (RFC 9112, 9.6)."""
    connection.shutdown(socket.SHUT_WR)
    while _receive(connection, deadline):
        continue


def _receive(connection: socket.socket, deadline: float) -> bytes:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
    return connection.recv(4096)
