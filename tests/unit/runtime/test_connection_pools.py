"""Answers of servers over urllib3's connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from flanneld.errors import Retryable
from flanneld.runtime.sockets import http_connection
from flanneld.subnet.etcd import api_choice
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers, Transport
from flanneld.subnet.kube import api
from flanneld.subnet.kube.access import Access
from tests.local_etcd import DEADLINE, server, silent

LIMIT = 4 << 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b" " * 0x10000 + b"\r\n"


def endless(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(HEAD)
    while True:
        connection.sendall(CHUNK)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(http_connection, "LONGEST_ANSWER", LIMIT)
    with server(endless) as url:
        yield url


def ask_etcd(api: str, url: str) -> None:
    transport = Transport(Servers(EtcdOptions((url,))), EtcdTimeouts(read=60))
    api_choice.open_client(api, transport).fetch("/key")


def ask_kubernetes(url: str) -> None:
    api.Api(Access(url, "", {}), api.ApiTimeouts(read=60)).get(api.NODES)


@pytest.mark.parametrize(
    "ask",
    [lambda url: ask_etcd("v2", url), lambda url: ask_etcd("v3", url), ask_kubernetes],
    ids=["etcd v2", "etcd v3", "Kubernetes"],
)
def test_an_answer_without_end_is_given_up(url: str, ask: Callable[[str], None]) -> None:
    with pytest.raises(Retryable, match="its answer is longer than 4 MiB"):
        ask(url)


def events(*texts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(text), text) for text in texts)


def test_events_of_a_watch_that_have_come_together_are_one_piece() -> None:
    """The buffer of a connection is smaller; the rest of an event that is cut is waited for."""
    nodes = [letter * 17_000 + b"\n" for letter in (b"a", b"b", b"c")]
    stream = events(*nodes)
    has_come, go_on = threading.Event(), threading.Event()

    def watched(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(HEAD + stream[:-100])
        has_come.set()
        go_on.wait(DEADLINE)
        connection.sendall(stream[-100:] + b"0\r\n\r\n")

    with server(watched) as url:
        watch = api.Api(Access(url, "", {}), api.ApiTimeouts()).watch(api.NODES)
        assert has_come.wait(DEADLINE)
        pieces = [watch.read()]
        assert len(pieces[0]) == sum(map(len, nodes)) - 98  # with the line end of the last chunk
        go_on.set()
        while pieces[-1]:
            pieces.append(watch.read())
        watch.close()
    assert b"".join(pieces) == b"".join(nodes)


def test_a_watch_that_stays_silent_ends() -> None:
    def quiet(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        silent(connection)

    with server(quiet) as url:
        watch = api.Api(Access(url, "", {}), api.ApiTimeouts(silence=0.05)).watch(api.NODES)
        with pytest.raises(api.Expired, match=r"silent for 0\.05 s"):
            watch.read()
        watch.close()
