"""HTTP service of a cloud in the lab: what all of them have in common, and the faults that tests ask for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from socketserver import TCPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from flanneld.backends.cloud.contract import ErrorKind

#: The link of the lab's nodes, and the cluster network.
VPC_NETWORK = "198.18.0.0/24"


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    @property
    def form(self) -> dict[str, str]:
        return dict(parse_qsl(self.body.decode(), keep_blank_values=True))


@dataclass(frozen=True)
class Asked:
    """A request as the cloud understands it."""

    action: str
    parameters: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.action} {json.dumps(self.parameters, sort_keys=True, default=str)}"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def said(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


@dataclass
class Fault:
    """A refusal of the next ``times`` calls of an action."""

    action: str
    trouble: ErrorKind
    times: float


@dataclass
class Service:
    """A cloud. A test and its daemons change it from several threads.

    ``stale`` answers to an action repeat the last one before, as an eventually consistent store does.
    ``late`` actions are answered after this many seconds, and ``garbage`` replaces an answer.
    """

    #: Actions by what they are for: place, list, create, replace, delete, forward.
    actions: ClassVar[Mapping[str, str]] = {}
    #: The status and code for each trouble.
    codes: ClassVar[Mapping[ErrorKind, tuple[int, str]]] = {}
    kind: ClassVar[str] = ""

    calls: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stale: dict[str, int] = field(default_factory=dict)
    garbage: dict[str, bytes] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    is_down: bool = False

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._before: dict[str, Answer] = {}
        self._last: dict[str, Answer] = {}
        self._released = threading.Event()

    # ---- what a cloud adds ---------------------------------------------------------------------

    def understand(self, request: Request) -> Asked:
        raise NotImplementedError

    def is_signed(self, request: Request) -> bool:
        """Return True if the request's signature is right, by the vendor's algorithm."""
        raise NotImplementedError

    def answer(self, asked: Asked, request: Request) -> Answer:
        raise NotImplementedError

    def refusal(self, status: int, code: str) -> Answer:
        raise NotImplementedError

    def metadata(self, address: str, request: Request) -> Answer:
        """Return what the metadata service tells the instance that has this address."""
        raise NotImplementedError

    # ---- what tests ask for --------------------------------------------------------------------

    def fail(self, purpose: str, trouble: ErrorKind, times: float = 1) -> None:
        """Refuse the next calls for a purpose."""
        with self.lock:
            self.faults.append(Fault(self.actions[purpose], trouble, times))

    def heal(self) -> None:
        with self.lock:
            self.faults.clear()
            self.denied.clear()
            self.garbage.clear()
            self.late.clear()

    def made(self, *purposes: str) -> int:
        """Return how many calls of these purposes there were."""
        names = {self.actions[purpose] for purpose in purposes}
        return sum(call in names for call in self.calls)

    # ---- the service ---------------------------------------------------------------------------

    def take(self, request: Request) -> Answer:
        asked = self.understand(request)
        if self.late.get(asked.action):
            self._released.wait(self.late[asked.action])
        with self.lock:
            self.calls.append(asked.action)
            if not self.is_signed(request):
                return self.refusal(*self.codes[ErrorKind.CREDENTIALS])
            if asked.action in self.denied:
                return self.refusal(*self.codes[ErrorKind.DENIED])
            for fault in self.faults:
                if fault.action == asked.action and fault.times > 0:
                    fault.times -= 1
                    return self.refusal(*self.codes[fault.trouble])
            if asked.action in self.garbage:
                return Answer(200, self.garbage[asked.action])
            return self._recent(asked, request)

    def _recent(self, asked: Asked, request: Request) -> Answer:
        """Return the answer, or the one before the last change while reads are stale."""
        key = str(asked)
        if self.stale.get(asked.action, 0) > 0 and key in self._last:
            self.stale[asked.action] -= 1
            return self._last[key]
        answer = self.answer(asked, request)
        self._last[key] = answer
        return answer

    def release(self) -> None:
        """Let late answers go."""
        self._released.set()


def is_inside(destination: str, network: str = VPC_NETWORK) -> bool:
    return ip_network(destination).overlaps(ip_network(network))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without a look at the name of the address: a namespace may have no resolver that answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "lab", self.server_address[1]


@contextmanager
def served(
    service: Service, host: str = "127.0.0.1", port: int = 0, *, metadata: bool = False
) -> Iterator[str]:
    """Serve the API of a cloud, or its metadata; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, body)
            if service.is_down and not metadata:
                self.close_connection = True
                self.connection.close()
                return
            take = service.metadata(self.client_address[0], request) if metadata else service.take(request)
            self.send_response(take.status)
            self.send_header("Content-Type", take.content_type)
            for name, value in take.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(take.body)))
            self.end_headers()
            self.wfile.write(take.body)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Keep the tests' output clean."""

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, ValueError):
                self.close_connection = True

    server = _Server((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        service.release()
        server.shutdown()
        server.server_close()
        thread.join()
