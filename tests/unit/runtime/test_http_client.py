"""Requests of backends to a real server on loopback, one that fails in every way included."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from flanneld.errors import Fatal, Retryable
from flanneld.runtime.sockets.http_client import HttpClient, HttpRequest
from tests.lab import wait_for
from tests.local_etcd import server

HEAD = b"HTTP/1.1 200 OK\r\nX-Kind: test\r\n"


def client() -> HttpClient:
    return HttpClient(threading.Event())


def request_of(connection: socket.socket, body: bytes = b"") -> bytes:
    heard = b""
    while b"\r\n\r\n" + body not in heard:
        heard += connection.recv(65536)
    return heard


def test_a_request_is_sent_whole_and_answered() -> None:
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        heard.append(request_of(connection, b"body"))
        connection.sendall(HEAD.replace(b"200 OK", b"404 Gone") + b"Content-Length: 4\r\n\r\nnone")

    with server(serve) as url:
        answer = client().ask(HttpRequest("PUT", f"{url}/routes/7?a=b", {"X-Token": "t"}, b"body"))
    assert (answer.status, answer.headers["x-kind"], answer.body) == (404, "test", b"none")
    assert heard[0].startswith(b"PUT /routes/7?a=b HTTP/1.1\r\n")
    assert b"X-Token: t\r\n" in heard[0]


def test_a_redirect_is_an_answer() -> None:
    def serve(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n")

    with server(serve) as url:
        assert client().ask(HttpRequest("GET", url)).status == 302


def trickle(head: bytes) -> Callable[[socket.socket], None]:
    """Send a byte every 50 ms without end: no single read takes long."""

    def serve(connection: socket.socket) -> None:
        request_of(connection)
        with suppress(OSError):
            connection.sendall(head)
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    return serve


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-", HEAD + b"\r\n"], ids=["headers", "body"])
def test_an_answer_that_trickles_is_cut_at_the_deadline(head: bytes) -> None:
    cut = pytest.raises(Retryable, match=r"does not answer: no whole answer within 1\.5 s; see whether")
    with server(trickle(head)) as url, cut:  # the server would go on for ever
        client().ask(HttpRequest("GET", url, timeout=1.5))


def test_an_answer_without_end_is_given_up() -> None:
    def serve(connection: socket.socket) -> None:
        request_of(connection)
        with suppress(OSError):
            connection.sendall(HEAD + b"\r\n" + b"x" * (4 << 20))

    with server(serve) as url, pytest.raises(Retryable, match="its answer is longer than 1 MiB"):
        client().ask(HttpRequest("GET", url, timeout=60))


def test_a_server_that_is_not_there_is_named_without_the_secrets_of_the_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Retryable) as caught:
        client().ask(HttpRequest("GET", f"http://user:secret@127.0.0.1:{port}/secret?token=secret"))
    assert str(caught.value).startswith(f"http://127.0.0.1:{port} does not answer: connection refused; ")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"What do you want?\n", "it does not speak HTTP"),
        (b"", "it broke the connection"),
        (HEAD + b"Content-Length: 4\r\n\r\nab", "it broke the connection"),
    ],
    ids=["another protocol", "nothing", "half an answer"],
)
def test_an_answer_that_makes_no_sense_is_explained_without_a_word_of_the_servers(
    answer: bytes, reason: str
) -> None:
    def serve(connection: socket.socket) -> None:
        request_of(connection)
        connection.sendall(answer)

    with server(serve) as url, pytest.raises(Retryable, match=f" does not answer: {reason}; see whether"):
        client().ask(HttpRequest("GET", url))


@pytest.mark.parametrize(
    "url", ["", "ftp://h/", "http://", "http://[", "http://h:x/", "/path", "http://h\u00e9/"]
)
def test_a_url_that_names_no_server_is_fatal(url: str) -> None:
    with pytest.raises(Fatal, match="no http or https URL"):
        client().ask(HttpRequest("GET", url))


@pytest.fixture
def silent() -> Iterator[tuple[str, threading.Event]]:
    """A server that takes a request and answers after a second; the event says that it has one."""
    asked = threading.Event()

    def serve(connection: socket.socket) -> None:
        request_of(connection)
        asked.set()
        time.sleep(1)
        with suppress(OSError):
            connection.sendall(HEAD + b"Content-Length: 2\r\n\r\nok")

    with server(serve) as url:
        yield url, asked


def test_a_stop_cuts_a_request(silent: tuple[str, threading.Event]) -> None:
    url, asked = silent
    stop, failed = threading.Event(), threading.Event()

    def ask() -> None:
        with suppress(Retryable):
            HttpClient(stop).ask(HttpRequest("GET", url, timeout=60))
            return
        failed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(asked.is_set, 5, "the request")
    stop.set()
    assert failed.wait(60)
    thread.join()


def test_a_request_at_exit_outlives_the_stop(silent: tuple[str, threading.Event]) -> None:
    stop = threading.Event()
    stop.set()
    assert HttpClient(stop).ask(HttpRequest("GET", silent[0], timeout=60, at_exit=True)).body == b"ok"
