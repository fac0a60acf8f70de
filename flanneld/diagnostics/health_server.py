"""HTTP server of /healthz, /readyz and /metrics, for kubelet and load balancers."""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Protocol

from msgspec import Struct

from flanneld.errors import Fatal, cause_of
from flanneld.runtime.sockets.server import Conversation, Limits, PolledServer, receive, send

log = logging.getLogger(__name__)

#: Seconds for a request, from the first byte to the last.
REQUEST_TIME = 3.0
#: Bytes of a request line with its headers.
MAX_HEAD = 16 * 1024
#: Connections in total, per source, and reserved for this host: kubelet opens one per probe.
CONNECTIONS, OF_ONE_SOURCE, OF_THIS_HOST = 64, 16, 16
#: Backlog of connections to accept.
_QUEUE = 128


class Checks(Struct, frozen=True):
    """Sources of the answers. The functions are called from several threads, and must not block."""

    #: Returns a line for each overdue task.
    overdue: Callable[[], list[str]]
    #: Returns True if pods can be started on this node.
    ready: Callable[[], bool]
    #: Returns what readiness still requires, one line each.
    missing: Callable[[], list[str]] = list
    #: Returns restrictions of a ready node, one line each.
    caveats: Callable[[], list[str]] = list
    #: Returns each part of the daemon with its condition, for verbose answers.
    parts: Callable[[], list[tuple[str, str]]] = list
    #: Returns status, content type and page of /metrics for an Accept header.
    metrics: Callable[[str], tuple[int, str, bytes]] | None = None


def answer(path: str, checks: Checks) -> tuple[int, str]:
    """Return HTTP status and body; the first line of each body is upstream's."""
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
    """Return the parts in the format of kube-apiserver's verbose checks."""
    return [f"[-]{name}: {problem}" if problem else f"[+]{name} ok" for name, problem in parts]


class HealthServer:
    """Server on one address and port (0: any free one) from its construction to ``close``.

    Raises ``Fatal`` if it cannot listen there.
    """

    def __init__(self, ip: str, port: int, checks: Checks) -> None:
        try:
            self._listener = _listen(ip, port)
        except (OSError, OverflowError, UnicodeError) as error:
            raise Fatal(
                f"cannot listen for health checks on {ip} port {port}: {cause_of(error)}",
                "give a free port with -healthz-port and an address of this host with -healthz-ip",
            ) from error
        self._server = PolledServer(
            self._listener,
            partial(_talk, checks),
            Limits(REQUEST_TIME, CONNECTIONS, OF_ONE_SOURCE, OF_THIS_HOST),
            "Cannot answer a health check",
        )
        log.info("Start healthz server on %s:%d", f"[{ip}]" if ":" in ip else ip, self.port)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> None:
        """Answer until ``close``."""
        self._server.serve()

    def close(self) -> None:
        """End ``serve`` at once. May be called repeatedly, from any thread."""
        self._server.close()


def _listen(ip: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(_QUEUE)
    except BaseException:
        listener.close()
        raise
    return listener


def _talk(checks: Checks, connection: socket.socket) -> Conversation:
    """Answer one request."""
    head = yield from _read_head(connection)
    yield from send(connection, _handler()(head, checks).wfile.getvalue())
    # The client closes first: closing with unread data would discard our answer (RFC 9112, 9.6).
    connection.shutdown(socket.SHUT_WR)
    while (yield from receive(connection, MAX_HEAD)):
        continue


def _read_head(connection: socket.socket) -> Generator[int, None, bytes]:
    """Receive the request line and the headers."""
    head = b""
    while b"\n\r\n" not in head and b"\n\n" not in head and len(head) < MAX_HEAD:
        chunk = yield from receive(connection, 4096)
        if not chunk:
            break
        head += chunk
    return head


class _Response(Protocol):
    """Handler of one request that was already received."""

    wfile: io.BytesIO


@cache
def _handler() -> Callable[[bytes, Checks], _Response]:
    # Imported here: it costs 15 ms and 5 MiB, and health checks are off by default.
    from http.server import BaseHTTPRequestHandler

    class Handler(BaseHTTPRequestHandler):
        server_version = "flanneld"
        sys_version = ""
        wfile: io.BytesIO

        def __init__(self, head: bytes, checks: Checks) -> None:
            self._checks = checks
            self.rfile, self.wfile = io.BytesIO(head), io.BytesIO()
            self.raw_requestline = self.rfile.readline()
            # parse_request() itself answers an invalid request.
            if self.raw_requestline and self.parse_request():
                self._answer()

        def _answer(self) -> None:
            if self._checks.metrics and self.path.partition("?")[0] == "/metrics":
                self._send(*self._checks.metrics(self.headers.get("Accept", "")))
                return
            status, text = answer(self.path, self._checks)
            self._send(status, "text/plain; charset=utf-8", text.encode(errors="backslashreplace"))

        def _send(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_message: object) -> None:
            """Suppress the log of requests: health checks come every few seconds."""

    return Handler
