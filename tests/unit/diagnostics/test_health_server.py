"""The health server, asked over real HTTP on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection

import pytest
from msgspec.structs import replace

from flanneld.diagnostics import serving as server_module
from flanneld.diagnostics.serving import Checks, HealthServer
from flanneld.errors import Fatal
from flanneld.findings import Condition

DEADLINE = 60.0
WELL = Checks(overdue=list, ready=lambda: True)


def checks(late: tuple[str, ...] = (), ready: bool = True, missing: Callable[[], list[str]] = list) -> Checks:
    return Checks(overdue=lambda: list(late), ready=lambda: ready, missing=missing)


@contextmanager
def serving(checks: Checks, ip: str = "127.0.0.1") -> Iterator[HealthServer]:
    server = HealthServer(ip, 0, checks)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()


def ask(server: HealthServer, path: str, method: str = "GET", ip: str = "127.0.0.1") -> tuple[int, str]:
    connection = HTTPConnection(ip, server.port, timeout=DEADLINE)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def connect(server: HealthServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)


def send_byte_by_byte(client: socket.socket, count: int) -> None:
    pause = threading.Event()
    for _ in range(count):
        client.sendall(b"x")
        pause.wait(0.02)


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize(
    ("state", "path", "expected"),
    [
        (checks(), "/healthz", (200, "flanneld is running")),
        (checks(late=("a is late", "b is late")), "/healthz", (500, "a is late\nb is late")),
        (checks(ready=False), "/healthz", (200, "flanneld is running")),
        (checks(), "/readyz", (200, "flanneld is ready")),
        (checks(ready=False), "/readyz", (503, "flanneld is not ready yet")),
        (
            checks(ready=False, missing=lambda: ["no lease"]),
            "/readyz",
            (503, "flanneld is not ready yet\nno lease"),
        ),
        (checks(late=("a is late",)), "/readyz", (200, "flanneld is ready")),
        (
            replace(checks(), parts=lambda: [Condition("store", "no answer"), Condition("kernel", "")]),
            "/readyz?verbose",
            (200, "flanneld is ready\n[-]store: no answer\n[+]kernel ok"),
        ),
        (
            replace(checks(ready=False, missing=lambda: ["no lease"]), parts=lambda: [Condition("store")]),
            "/readyz?verbose=1",
            (503, "flanneld is not ready yet\nno lease\n[+]store ok"),
        ),
        (
            replace(checks(), parts=lambda: [Condition("store")]),
            "/readyz?quiet",
            (200, "flanneld is ready"),
        ),
        (checks(), "/healthz?verbose", (200, "flanneld is running")),
        (checks(late=("d\u00e9j\u00e0 \u2192",)), "/healthz", (500, "d\u00e9j\u00e0 \u2192")),
        (checks(late=("eth\udcff",)), "/healthz", (500, "eth\\udcff")),
    ],
)
def test_the_answer_follows_the_checks(state: Checks, path: str, expected: tuple[int, str]) -> None:
    with serving(state) as server:
        assert ask(server, path) == expected


@pytest.mark.parametrize("path", ["/", "/healthz/", "/healthzz", "/metrics", "*"])
def test_other_paths_are_not_found(path: str) -> None:
    with serving(WELL) as server:
        assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_any_method_works(method: str) -> None:
    with serving(WELL) as server:
        assert ask(server, "/healthz", method) == (200, "flanneld is running")


def test_head_gets_the_headers_of_get_and_no_body() -> None:
    with serving(WELL) as server, connect(server) as client:
        client.sendall(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = everything(client).partition(b"\r\n\r\n")
    assert b"Content-Length: 19" in head
    assert body == b""


def test_an_ipv6_address_works() -> None:
    with serving(WELL, ip="::1") as server:
        assert ask(server, "/healthz", ip="::1") == (200, "flanneld is running")


def test_the_answer_may_change_between_requests() -> None:
    ready = threading.Event()
    with serving(Checks(overdue=list, ready=ready.is_set)) as server:
        assert ask(server, "/readyz")[0] == 503
        ready.set()
        assert ask(server, "/readyz")[0] == 200


@pytest.mark.parametrize(
    "request_line",
    [b"nonsense", b"\x00\xff\xfe", b"GET /healthz HTTP/x.y", b"GET " + b"/" * 20_000 + b" HTTP/1.1"],
)
def test_a_broken_request_is_refused_and_the_next_one_answered(
    request_line: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(WELL) as server:
        with connect(server) as client:
            client.sendall(request_line + b"\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert b"200" not in everything(client).partition(b"\r\n")[0]
        assert ask(server, "/healthz")[0] == 200
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is cut off because of the time."""
    monkeypatch.setattr(server_module, "REQUEST_TIME", 10 * DEADLINE)


@pytest.mark.usefixtures("_patient")
def test_a_silent_client_does_not_keep_others_waiting() -> None:
    with serving(WELL) as server, connect(server) as silent:
        silent.sendall(b"GET /healthz HT")
        assert ask(server, "/healthz")[0] == 200


def test_a_client_that_trickles_is_cut_off_without_a_word_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_TIME", 0.2)
    with serving(WELL) as server, connect(server) as client:
        begun = time.monotonic()
        client.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        with pytest.raises(ConnectionError):
            send_byte_by_byte(client, 500)
        assert time.monotonic() - begun >= 0.2
    assert caplog.records == []


def test_a_late_byte_gains_a_client_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_TIME", 3.0)
    with serving(WELL) as server, connect(server) as client:
        client.sendall(b"GET")
        client.settimeout(2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        late = time.monotonic()
        client.sendall(b" ")
        client.settimeout(DEADLINE)
        assert everything(client) == b""
        assert time.monotonic() - late < 3.0


@pytest.mark.usefixtures("_patient")
def test_headers_without_end_are_refused_at_once() -> None:
    with serving(WELL) as server, connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 5000)
        assert client.recv(4096).startswith(b"HTTP/1.0 431 ")


def test_a_client_may_send_its_body_after_it_got_the_answer() -> None:
    with serving(WELL) as server, connect(server) as client:
        client.sendall(b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n")
        assert everything(client).endswith(b"flanneld is running")
        send_byte_by_byte(client, 5)


def test_a_request_is_not_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(0)
    with serving(WELL) as server:
        ask(server, "/healthz")
        ask(server, "/nowhere")
        started = f"Start healthz server on 127.0.0.1:{server.port}"
    assert caplog.messages == [started]
    assert capfd.readouterr() == ("", "")


def test_a_check_that_fails_is_logged_and_costs_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[str]:
        raise ValueError("a bug")

    with serving(Checks(overdue=broken, ready=lambda: True)) as server:
        with connect(server) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert everything(client) == b""
        assert ask(server, "/readyz")[0] == 200
    assert "a bug" in caplog.text


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_idle_connections_keep_no_probe_from_its_answer(source: str) -> None:
    with serving(WELL) as server, ExitStack() as idle:
        for _ in range(90):
            idle.enter_context(
                socket.create_connection(("127.0.0.1", server.port), DEADLINE, source_address=(source, 0))
            )
        assert ask(server, "/healthz") == (200, "flanneld is running")


@pytest.mark.usefixtures("_patient")
def test_of_too_many_connections_of_one_source_the_oldest_is_cut() -> None:
    with serving(WELL) as server, ExitStack() as idle:
        clients = [idle.enter_context(connect(server)) for _ in range(server_module.OF_ONE_SOURCE + 1)]
        assert everything(clients[0]) == b""
        for client in clients[1:]:
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert everything(client).endswith(b"flanneld is running")


@pytest.mark.usefixtures("_patient")
def test_closing_ends_serving_at_once_even_with_a_client_inside() -> None:
    server = HealthServer("127.0.0.1", 0, WELL)
    thread = threading.Thread(target=server.serve)
    thread.start()
    with connect(server) as client:
        client.sendall(b"GET")
        assert ask(server, "/healthz")[0] == 200  # so the other is inside as well
        server.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert everything(client) == b""
    server.close()


def test_closing_before_serving_ends_it_too() -> None:
    server = HealthServer("127.0.0.1", 0, WELL)
    server.close()
    server.serve()


def test_the_port_is_free_again_after_closing() -> None:
    with serving(WELL) as server:
        port = server.port
        ask(server, "/healthz")
    again = HealthServer("127.0.0.1", port, WELL)
    again.close()
    again.serve()


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_a_taken_port_is_fatal_and_named(ip: str) -> None:
    with serving(WELL, ip) as server:
        port = server.port
        with pytest.raises(Fatal) as refused:
            HealthServer(ip, port, WELL)
    message = str(refused.value)
    assert f"{ip} port {port}" in message
    assert "in use" in message
    assert "-healthz-port" in message


@pytest.mark.parametrize(("ip", "port"), [("192.0.2.1", 8080), ("127.0.0.1", 70_000), ("2001:db8::1", 8080)])
def test_an_address_that_is_not_ours_is_fatal_and_named(ip: str, port: int) -> None:
    with pytest.raises(Fatal, match=f"{ip} port {port}"):
        HealthServer(ip, port, WELL)


def test_the_http_library_is_not_imported_before_it_serves() -> None:
    program = "import sys, flanneld.diagnostics.serving; "
    program += "print('http.server' in sys.modules, 'socketserver' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        == b"False False\n"
    )


STARVED = """
import os, resource, socket, threading, time
from flanneld.diagnostics.serving import Checks, HealthServer

server = HealthServer("127.0.0.1", 0, Checks(overdue=list, ready=lambda: True))
threading.Thread(target=server.serve, daemon=True).start()
client = socket.socket()
client.settimeout(60)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
client.connect(("127.0.0.1", server.port))
client.sendall(b"GET /healthz HTTP/1.1\\r\\n\\r\\n")
begun = time.process_time()
threading.Event().wait(0.5)
print(time.process_time() - begun)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
print(client.recv(100).split()[1].decode())
"""


def test_a_lack_of_descriptors_costs_no_processor_time_and_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED], capture_output=True, check=True, text=True, timeout=DEADLINE
    )
    processor_time, status = done.stdout.split()
    assert float(processor_time) < 0.1
    assert status == "200"
