"""One suite of the clients of stores at servers that misbehave: verdict, next server, cancel."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import Struct

from flanneld.errors import Cancelled, NoAnswer, Retryable
from flanneld.option_values import RemoteServer
from flanneld.runtime.sockets import http_connection, interruptible
from flanneld.runtime.sockets.http_connection import TlsFiles
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.etcd.v2 import V2Client
from flanneld.subnet.etcd.v3 import V3Client
from flanneld.subnet.kube.access import Access
from flanneld.subnet.kube.api import NODES, Api, ApiTimeouts
from flanneld.subnet.remote import connection
from flanneld.subnet.remote.store import RemoteOptions, RemoteStore
from tests.etcd_clients import opened, transport_to
from tests.lab.impostor import http
from tests.lab.wait import wait_for
from tests.local_etcd import DEADLINE, LocalEtcd, Serve, answering, hang_up, make_certificates, server, silent

#: Seconds for an answer of a server that does not answer, and of one that has no time limit.
QUICK, FOREVER = 0.5, 600.0


class Client(Struct):
    """A client of a store: ``ask`` makes one request that may be repeated."""

    ask: Callable[[], object]
    cancel: Callable[[], object]
    reconnect: Callable[[], object]


def etcd_v2(urls: tuple[str, ...], seconds: float, cafile: str) -> Client:
    timeouts = EtcdTimeouts(connect=seconds, read=seconds)
    found = V2Client(transport_to(*urls, timeouts=timeouts, cafile=cafile))
    return Client(lambda: found.fetch("/key").node, found.cancel, found.reconnect)


def etcd_v3(urls: tuple[str, ...], seconds: float, cafile: str, transport: str = "json") -> Client:
    timeouts = EtcdTimeouts(connect=seconds, read=seconds)
    found = V3Client(transport_to(*urls, timeouts=timeouts, cafile=cafile, transport=transport))
    return Client(lambda: found.fetch("/key").node, found.cancel, found.reconnect)


def grpc(urls: tuple[str, ...], seconds: float, cafile: str) -> Client:
    return etcd_v3(urls, max(seconds, 2.0), cafile, "grpc")  # it takes half a second to connect


def lease_server(urls: tuple[str, ...], seconds: float, cafile: str) -> Client:
    del seconds  # constants, which a fixture sets
    addresses = [url.rpartition("/")[2].rpartition(":") for url in urls]
    servers = tuple(RemoteServer(host, int(port)) for host, _, port in addresses)
    found = RemoteStore(RemoteOptions(servers, TlsFiles(cafile=cafile)))
    return Client(found.read_leases, found.close, found.reconnect)


def kube(urls: tuple[str, ...], seconds: float, cafile: str) -> Client:
    found = Api(Access(urls[0], "", {}), ApiTimeouts(connect=seconds, read=seconds))
    del cafile  # a kubeconfig has it
    return Client(lambda: found.get(NODES), found.cancel, found.reconnect)


_JSON = "Content-Type: application/json"
_NODE = {"key": "/key", "value": "yes", "modifiedIndex": 3, "createdIndex": 3}
_KEY = {"key": b64encode(b"/key").decode(), "value": b64encode(b"yes").decode(), "mod_revision": "3"}
_RANGE = {"header": {"cluster_id": "1", "revision": "5"}, "kvs": [_KEY], "count": "1"}
#: By name, how to make a client of some URLs, and what a good server says to it.
CLIENTS: dict[str, tuple[Callable[[tuple[str, ...], float, str], Client], bytes]] = {
    "v2": (etcd_v2, http("200 OK", json.dumps({"action": "get", "node": _NODE}), _JSON, "X-Etcd-Index: 5")),
    "v3": (etcd_v3, http("200 OK", json.dumps(_RANGE), _JSON)),
    "remote": (lease_server, http("200 OK", '{"snapshot": [], "cursor": "5"}', _JSON)),
    "Kubernetes": (kube, http("200 OK", '{"items": []}', _JSON)),
    "gRPC": (grpc, b""),  # a real etcd
}
OVER_HTTP = [name for name in CLIENTS if name != "gRPC"]
#: Clients that know several servers.
SEVERAL = [name for name in CLIENTS if name != "Kubernetes"]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all limits end soon, so that each server is left within the test."""
    monkeypatch.setattr(interruptible, "WITHIN", QUICK)
    monkeypatch.setattr(http_connection, "LONGEST_ANSWER", 1 << 16)
    monkeypatch.setattr(connection, "ANSWER_TIME", QUICK)
    monkeypatch.setattr(connection, "CONNECT_TIME", QUICK)


@pytest.fixture
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no limit end within the test, so that nothing but a cancel ends a request."""
    monkeypatch.setattr(interruptible, "WITHIN", FOREVER)
    monkeypatch.setattr(connection, "ANSWER_TIME", FOREVER)
    monkeypatch.setattr(connection, "CONNECT_TIME", FOREVER)


def client_of(name: str, *urls: str, seconds: float = DEADLINE, cafile: str = "") -> Client:
    client = CLIENTS[name][0](urls, seconds, cafile)
    opened.callback(client.cancel)
    return client


@contextlib.contextmanager
def good_server(name: str, etcd: LocalEtcd) -> Iterator[str]:
    """Yield the URL of a server that works."""
    if name == "gRPC":
        etcd.keys("v3").put("/key", "yes")
        yield etcd.url
    else:
        with server(lambda sock: answer_each(sock, CLIENTS[name][1])) as url:
            yield url


def read_request(sock: socket.socket) -> bool:
    """Read one request; return False at the end of the connection."""
    head = b""
    while b"\r\n\r\n" not in head:
        data = sock.recv(65536)
        if not data:
            return False
        head += data
    head, _, body = head.partition(b"\r\n\r\n")
    sizes = [
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    ]
    while sizes and len(body) < sizes[0]:
        body += sock.recv(65536)
    return True


def answer_each(sock: socket.socket, answer: bytes) -> None:
    while read_request(sock):
        sock.sendall(answer)


# ---- misbehaviour ---------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def says(*pieces: bytes, then: Serve = lambda _: None) -> Serve:
    """Answer one request with some bytes, and go on with ``then``: the end of the connection by default."""

    def serve(sock: socket.socket) -> None:
        if read_request(sock):
            sock.sendall(b"".join(pieces))
            then(sock)

    return serve


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def drip(sock: socket.socket) -> None:
    """Send a byte now and then. It ends, so that a client without the rule fails its test."""
    pause = threading.Event()
    for _ in range(200):
        sock.sendall(b" ")
        pause.wait(0.05)


BROKEN, SLOW, DRIPS, NO_HTTP = "broke the connection", "no answer within", "less than 4 KiB in", "speak HTTP"
#: By name, what a server does to a request, and the verdict.
OF_HTTP: dict[str, tuple[Serve, str]] = {
    "hangs up": (says(), BROKEN),
    "resets": (says(then=reset), BROKEN),
    "cut in the first line": (says(b"HTTP/1.1 2"), BROKEN),
    "cut in the head": (says(HEAD, b"Content-Len"), BROKEN),
    "cut after a header": (says(HEAD), BROKEN),
    "cut in the body": (says(HEAD, b"Content-Length: 9\r\n\r\n{"), BROKEN),
    "reset in the body": (says(HEAD, b"Content-Length: 9\r\n\r\n{", then=reset), BROKEN),
    "cut before a chunk": (says(CHUNKED), BROKEN),
    "cut in a chunk": (says(CHUNKED, b"9\r\n{"), BROKEN),
    "cut between chunks": (says(CHUNKED, b"1\r\n{\r\n"), BROKEN),
    "no chunk": (says(CHUNKED, b"nonsense\r\n"), BROKEN),
    "silent": (silent, SLOW),
    "silent in the head": (says(HEAD, then=silent), SLOW),
    "drips in the head": (says(HEAD, b"X: ", then=drip), SLOW),
    "silent in the body": (says(HEAD, b"Content-Length: 900\r\n\r\n{", then=silent), DRIPS),
    "drips in the body": (says(HEAD, b"Content-Length: 900\r\n\r\n{", then=drip), DRIPS),
    "drips a chunk": (says(CHUNKED, b"900\r\n{", then=drip), DRIPS),
    "no HTTP": (says(b"\x15\x03\x01\x00\x02\x02\x28 what?\r\n\r\n"), NO_HTTP),
    "a line without end": (says(HEAD, b"X: " + b"x" * 70_000, then=silent), NO_HTTP),
    "huge body": (says(HEAD, b"Content-Length: 100000\r\n\r\n", b" " * 100_000), "longer than"),
    "huge body without a length": (says(HEAD, b"\r\n", b" " * 100_000), "longer than"),
    "length too short": (says(HEAD, b'Content-Length: 4\r\n\r\n{"items": []}', then=silent), "JSON"),
    "page": (says(http("200 OK", "<html>hello</html>", "Content-Type: text/html"), then=silent), "JSON"),
    "page of a gateway": (
        says(http("502 Bad Gateway", "<html>", "Content-Type: text/html"), then=silent),
        "502",
    ),
}
REDIRECT = http("307 Away", "", "Location: /again", "Connection: keep-alive")
OVER_GRPC: dict[str, tuple[Serve, str]] = {
    "hangs up": (hang_up, BROKEN),
    "resets": (reset, BROKEN),
    "silent": (silent, SLOW),
    "no gRPC": (lambda sock: sock.sendall(b"what?\r\n\r\n"), "speak gRPC"),
}
MISBEHAVIOUR = [
    pytest.param(name, serve, verdict, id=f"{name}-{deed}")
    for name in CLIENTS
    for deed, (serve, verdict) in (OVER_GRPC if name == "gRPC" else OF_HTTP).items()
]


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("name", "serve", "verdict"), MISBEHAVIOUR)
def test_server_is_named_and_left(name: str, serve: Serve, verdict: str, etcd: LocalEtcd) -> None:
    seconds = QUICK if verdict == SLOW else DEADLINE
    with server(serve) as bad, good_server(name, etcd) as good:
        with pytest.raises(Retryable, match=verdict) as caught:
            client_of(name, bad, seconds=seconds).ask()
        if name != "Kubernetes" or isinstance(caught.value, NoAnswer):
            assert bad.rpartition("/")[2] in str(caught.value)
        assert caught.value.remedy
        if name in SEVERAL:
            both = client_of(name, bad, good, seconds=seconds)
            wait_for(lambda: suppressed(both.ask) is not None, DEADLINE, "the answer of the other server")


def suppressed(ask: Callable[[], object]) -> object:
    """Return an answer, None without one: a busy server may take longer than such a client waits."""
    with contextlib.suppress(Retryable):
        return ask()
    return None


@pytest.mark.parametrize("name", OVER_HTTP)
def test_redirect_is_not_followed(name: str, etcd: LocalEtcd) -> None:
    asked = []

    def serve(sock: socket.socket) -> None:
        while read_request(sock):
            asked.append(sock)
            sock.sendall(REDIRECT)

    with server(serve) as bad, good_server(name, etcd) as good:
        with pytest.raises(Retryable, match=r"307|redirects to"):
            client_of(name, bad).ask()
        assert len(asked) == 1
        if name in SEVERAL:
            client_of(name, bad, good).ask()
            assert len(asked) == 2


@pytest.mark.parametrize("name", OVER_HTTP)
def test_server_without_tls_is_named(name: str, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    plain = answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with server(plain) as url, pytest.raises(Retryable, match="wrong version number"):
        client_of(name, url.replace("http", "https"), cafile=str(tmp_path / "ca.crt")).ask()


# ---- kept connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OVER_HTTP)
@pytest.mark.parametrize("then", [lambda _: None, reset], ids=["closes", "resets"])
def test_connection_that_the_server_does_not_keep_costs_no_failure(name: str, then: Serve) -> None:
    left = threading.Semaphore(0)
    connections = []

    def serve(sock: socket.socket) -> None:
        connections.append(sock)
        read_request(sock)
        sock.sendall(CLIENTS[name][1])
        then(sock)
        if then is not reset:
            sock.close()
        left.release()

    with server(serve) as url:
        client = client_of(name, url)
        for _ in range(3):
            client.ask()
            assert left.acquire(timeout=DEADLINE)
    assert len(connections) == 3


def go_on(sock: socket.socket, answer: bytes) -> None:
    sock.sendall(answer)
    answer_each(sock, answer)


@pytest.mark.parametrize("name", OVER_HTTP)
@pytest.mark.parametrize(
    ("then", "number"),
    [(lambda *_: None, 3), (lambda sock, _: reset(sock), 3), (go_on, 1)],
    ids=["closes", "resets", "answers"],
)
def test_kept_connection_is_replaced_only_if_it_ends_with_the_next_request(
    name: str, then: Callable[[socket.socket, bytes], None], number: int
) -> None:
    connections = []

    def serve(sock: socket.socket) -> None:
        connections.append(sock)
        read_request(sock)
        sock.sendall(CLIENTS[name][1])
        if read_request(sock):
            then(sock, CLIENTS[name][1])

    with server(serve) as url:
        client = client_of(name, url)
        for _ in range(3):
            client.ask()
    assert len(connections) == number


@pytest.mark.parametrize("name", OVER_HTTP)
def test_reconnect_during_a_request_is_no_failure(name: str) -> None:
    """It asks the same server again: that the connection ended was ours."""
    asked = threading.Event()

    def serve(sock: socket.socket) -> None:
        read_request(sock)
        if asked.is_set():
            sock.sendall(CLIENTS[name][1])
        else:
            asked.set()
            silent(sock)

    with server(serve) as url:
        client = client_of(name, url)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.ask)
            assert asked.wait(DEADLINE)
            client.reconnect()
            answer.result(DEADLINE)


# ---- cancel ----------------------------------------------------------------------------------------


def stuck(*pieces: bytes) -> Serve:
    return says(*pieces, then=silent)


#: By name, the state in which a request is when it is cancelled.
STATES: dict[str, tuple[Serve, str]] = {
    "in the handshake": (silent, "https"),
    "before the head": (silent, "http"),
    "in the head": (stuck(HEAD), "http"),
    "in the body": (stuck(HEAD, b"Content-Length: 900\r\n\r\n{"), "http"),
    "in a chunk": (stuck(CHUNKED, b"900\r\n{"), "http"),
    "in an endless body": (stuck(HEAD, b"\r\n{"), "http"),
}


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize(
    ("name", "state"),
    [
        (name, state)
        for name in CLIENTS
        for state, (serve, _) in STATES.items()
        if name != "gRPC" or serve is silent
    ],
)
def test_cancel_ends_a_request_in_any_state_and_refuses_the_next(
    name: str, state: str, tmp_path: Path
) -> None:
    serve, scheme = STATES[state]
    make_certificates(tmp_path)
    begun = threading.Event()

    def serve_stuck(sock: socket.socket) -> None:
        begun.set()
        serve(sock)

    with server(serve_stuck) as url:
        client = client_of(
            name, url.replace("http", scheme), seconds=FOREVER, cafile=str(tmp_path / "ca.crt")
        )
        check_cancel(client, begun.is_set)


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("name", CLIENTS)
def test_cancel_ends_a_connection_that_is_being_made(name: str) -> None:
    with full_backlog() as url:
        client = client_of(name, url, seconds=FOREVER)
        port = int(url.rpartition(":")[2])
        check_cancel(client, lambda: syn_sent_to(port) > 0)


@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize("name", OVER_HTTP)
def test_cancel_ends_the_lookup_of_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = threading.Event(), threading.Event()
    real = socket.getaddrinfo

    def slow(host: bytes, *args: int, **kwargs: int) -> object:
        if kwargs.get("flags"):
            return real(host, *args, **kwargs)
        asked.set()
        over.wait(DEADLINE)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    check_cancel(client_of(name, "http://etcd.example.com:2379", seconds=FOREVER), asked.is_set)
    over.set()


def check_cancel(client: Client, is_stuck: Callable[[], bool]) -> None:
    """Cancel a request that is stuck. Nothing else would end it within the test."""
    ended: list[BaseException] = []

    def run() -> None:
        try:
            client.ask()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(is_stuck, DEADLINE, "the request to be stuck")
    assert not ended
    client.cancel()
    thread.join(DEADLINE)
    assert [type(error) for error in ended] == [Cancelled]
    with pytest.raises(Cancelled):
        client.ask()


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the URL of a server to which no connection can be made: the kernel has no room for another."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def syn_sent_to(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return sum(line.split()[2] == f"0100007F:{port:04X}" and line.split()[3] == "02" for line in lines)
