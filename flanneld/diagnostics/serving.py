"""Servers of a daemon's state: HTTP for kubelet and load balancers, and the status socket for flannelctl.

HTTP has /healthz, /readyz and /metrics. Each connection to the status socket receives the status as a JSON
document. Without connections it costs one sleeping thread and one file descriptor. The socket lies beside the
subnet file and has mode 0600.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from flanneld.errors import Fatal, cause_of
from flanneld.findings import Condition
from flanneld.runtime.server import WRITABLE, Conversation, Limits, PolledServer, listen, receive, send

log = logging.getLogger(__name__)

#: Seconds for a request, from the first byte to the last.
REQUEST_TIME = 3.0
#: Bytes of a request line with its headers.
MAX_HEAD = 16 * 1024
#: Connections in total, per source, and reserved for this host: kubelet opens one per probe.
CONNECTIONS, OF_ONE_SOURCE, OF_THIS_HOST = 64, 16, 16
#: Backlog of connections to accept.
_BACKLOG = 128


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
    parts: Callable[[], list[Condition]] = list
    #: Returns status, content type and page of /metrics for an Accept header.
    metrics: Callable[[str], tuple[int, str, bytes]] | None = None


def health_answer(path: str, checks: Checks) -> tuple[int, str]:
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


def _each(parts: list[Condition]) -> list[str]:
    """Return the parts in the format of kube-apiserver's verbose checks."""
    return [f"[-]{each}" if each.problem else f"[+]{each.part} ok" for each in parts]


class HealthServer(PolledServer):
    """Server on one address and port (0: any free one) from its construction to ``close``.

    Raises ``Fatal`` if it cannot listen there.
    """

    def __init__(self, ip: str, port: int, checks: Checks) -> None:
        try:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            listener = listen(family, (ip, port), _BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:
            raise Fatal(
                f"cannot listen for health checks on {ip} port {port}: {cause_of(error)}",
                "give a free port with -healthz-port and an address of this host with -healthz-ip",
            ) from error
        limits = Limits(REQUEST_TIME, CONNECTIONS, OF_ONE_SOURCE, OF_THIS_HOST)
        super().__init__(listener, partial(_talk, checks), limits, "Cannot answer a health check")
        self.port: int = listener.getsockname()[1]
        log.info("Start healthz server on %s:%d", f"[{ip}]" if ":" in ip else ip, self.port)


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
            status, text = health_answer(self.path, self._checks)
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


#: Seconds for one reader, from its connection to the last byte. 65,000 peers take 2 s of CPU.
READER_TIME = 30.0
#: Readers at a time. One more replaces the oldest, so that stuck readers do not block others.
READERS = 16


class StatusSocket(PolledServer):
    """Server of the status socket. ``document`` yields the answer in pieces, in the thread of ``serve``."""

    def __init__(
        self, listener: socket.socket, path: Path, inode: int, document: Callable[[], Iterable[bytes]]
    ) -> None:
        limits = Limits(READER_TIME, connections=READERS, per_source=READERS)
        super().__init__(listener, self._tell, limits, "Cannot tell our status")
        self._path = path
        self._inode = inode
        self._document = document

    @classmethod
    def open(cls, path: Path, document: Callable[[], Iterable[bytes]]) -> StatusSocket | None:
        """Listen, replacing an existing socket. Return None, with a log line, if that is impossible."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(0o755, parents=True, exist_ok=True)
            new.unlink(missing_ok=True)
            # Before it has a name, because another file could take that name before a chmod.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(str(new))
            listener.listen(_BACKLOG)
            inode = new.lstat().st_ino
            new.replace(path)
        except OSError as error:
            listener.close()
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            log.warning("No status socket at %s: %s", path, error)
            return None
        return cls(listener, path, inode, document)

    def close(self) -> None:
        # First, because the process may end as soon as ``serve`` does.
        with contextlib.suppress(OSError):  # closed or removed already
            # A successor may have replaced it.
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        super().close()

    def _tell(self, reader: socket.socket) -> Conversation:
        for piece in self._document():
            yield from send(reader, piece)
            yield WRITABLE  # let other readers proceed
