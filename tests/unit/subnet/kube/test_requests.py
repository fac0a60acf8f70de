"""Single requests to the API server: the life of their connection, and the text of a refusal."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from flanneld.subnet.kube.access import Access
from flanneld.subnet.kube.api import NODES, Api, ApiRefusal, ApiTimeouts
from tests.lab.impostor import http
from tests.local_etcd import DEADLINE, answering, server


class Served:
    """A server that gives each request one answer. ``is_left`` is set when a client closes its connection."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.connections = 0
        self.is_left = threading.Event()

    def __call__(self, connection: socket.socket) -> None:
        self.connections += 1
        while data := connection.recv(65536):
            if b"\r\n\r\n" in data:  # the head of a request; a body follows by itself
                connection.sendall(self._answer)
        self.is_left.set()


def api(url: str) -> Api:
    return Api(Access(url, "", {}), ApiTimeouts())


def test_connection_serves_several_reads_and_is_left_after_a_write() -> None:
    served = Served(http("200 OK", "{}"))
    with server(served) as url:
        client = api(url)
        client.get(NODES)
        client.get(NODES)
        client.patch(f"{NODES}/n1", "{}")
        assert served.is_left.wait(DEADLINE)
    assert served.connections == 1


def test_connection_of_a_refused_request_is_left() -> None:
    served = Served(http("403 Forbidden", "{}"))
    with server(served) as url:
        client = api(url)
        with pytest.raises(ApiRefusal):
            client.get(NODES)
        assert served.is_left.wait(DEADLINE)


def test_message_of_a_refusal_is_one_line_of_300_characters_at_most() -> None:
    with server(answering(http("403 No", json.dumps({"message": "no\n\tright " + 400 * "x"})))) as url:
        with pytest.raises(ApiRefusal) as refusal:
            api(url).get(NODES)
        assert refusal.value.problem == f"the API server says 403: no right {291 * 'x'}"


@pytest.mark.parametrize("body", ["[]", '{"message": 5}', "forbidden"])
def test_refusal_without_a_message_is_told_by_its_status(body: str) -> None:
    with server(answering(http("403 No", body))) as url:
        with pytest.raises(ApiRefusal) as refusal:
            api(url).get(NODES)
        assert refusal.value.problem == "the API server says 403"
