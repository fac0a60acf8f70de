"""A Kubernetes API server on loopback, within the process of the test, and a client that shows every byte."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.credentials import trusting
from tests.lab.kube_api.access import Access
from tests.lab.kube_api.api import Api
from tests.lab.kube_api.control import Control
from tests.lab.kube_api.server import Server, tls_context
from tests.lab.kube_api.store import Store

DEADLINE = 60.0
ADMIN, FLANNEL_TOKEN, NOBODY = "admintoken", "flanneltoken", "nobodytoken"


@dataclass(frozen=True, slots=True)
class LocalKube:
    """``control`` is what a test may ask of it, besides requests to ``url``; the three tokens are good."""

    url: str
    control: Control
    server: Server


@contextmanager
def running_kube(tls: Path | None = None, journal: Path | None = None) -> Iterator[LocalKube]:
    """Run a server; ``tls`` is a folder with certificates."""
    store = Store(journal)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(listener, Api(store, Access(store)), tls_context(tls) if tls else None)
        control = Control(server)
        control.put_token(ADMIN, "admin", "admin")
        control.put_token(FLANNEL_TOKEN)
        control.put_token(NOBODY, "nobody", "nobody")
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            port = listener.getsockname()[1]
            yield LocalKube(f"{'https' if tls else 'http'}://127.0.0.1:{port}", control, server)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            control.close_connections(idle_only=False)
            thread.join(DEADLINE)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came: header names as written, the body without its chunks, and the chunks."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    chunks: list[bytes]
    complete: bool  # the body came to its end

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """The complete lines of a watch."""
        return [json.loads(line) for line in self.body.split(b"\n")[:-1]]


def parse_reply(raw: bytes) -> Reply:
    """Take one answer apart."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    status = int(first.split(" ")[1])
    if headers.get("Transfer-Encoding") != "chunked":
        whole = len(rest) == int(headers.get("Content-Length", "-1"))
        return Reply(status, headers, rest, [], whole)
    chunks, complete = [], False
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            complete = rest == b"\r\n"
            break
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return Reply(status, headers, b"".join(chunks), chunks, complete)


def ask(
    kube: LocalKube,
    method: str,
    target: str,
    body: str = "",
    headers: Mapping[str, str] | None = None,
    token: str = ADMIN,
    ca: Path | None = None,
) -> Reply:
    """One request on a connection of its own, read until the server closes it."""
    with connected(kube, ca) as sock:
        sock.sendall(request_bytes(method, target, body, headers, token))
        return parse_reply(read_all(sock))


def connected(kube: LocalKube, ca: Path | None = None) -> socket.socket:
    host, port = kube.url.rpartition("/")[2].split(":")
    sock = socket.create_connection((host, int(port)), timeout=DEADLINE)
    if ca is None:
        return sock
    return trusting(ca).wrap_socket(sock, server_hostname=host)


def request_bytes(
    method: str,
    target: str,
    body: str = "",
    headers: Mapping[str, str] | None = None,
    token: str = ADMIN,
    *,
    keep: bool = False,
) -> bytes:
    all_headers = {"Host": "127.0.0.1", "Accept": "application/json"}
    all_headers |= {} if keep else {"Connection": "close"}
    all_headers |= {"Authorization": f"Bearer {token}"} if token else {}
    all_headers |= {"Content-Length": str(len(body.encode()))} if body else {}
    all_headers |= headers or {}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def read_all(sock: socket.socket) -> bytes:
    """What comes until the connection is closed or reset."""
    raw = b""
    try:
        while data := sock.recv(1 << 20):
            raw += data
    except ConnectionResetError:
        pass
    return raw
