"""``HttpConnection`` with a server that does not read all of a request."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from flanneld.runtime.sockets.http_connection import HttpConnection
from tests.local_etcd import DEADLINE, server

#: Bytes that no socket buffers hold.
LONG = 64 << 20


def too_long(connection: socket.socket) -> None:
    """Answer at the head of a request, and end the connection, whose rest nobody reads."""
    while b"\r\n\r\n" not in connection.recv(4096, socket.MSG_PEEK):
        pass
    connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nlong")


def test_answer_of_a_server_that_does_not_read_the_whole_request_counts() -> None:
    with server(too_long) as url:
        connection = HttpConnection(None)
        connection.connect("127.0.0.1", urlsplit(url).port or 0, DEADLINE)
        response = connection.request("POST", "/", "x" * LONG, {}, DEADLINE)
        assert response.status == 413
        assert response.whole() == b"long"
        assert not connection.is_open
        connection.reset()
