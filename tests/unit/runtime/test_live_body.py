"""Bodies without end: what a connection has already taken in is read before the kernel is asked for more."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from flanneld.runtime.sockets import http_connection
from flanneld.runtime.sockets.http_connection import HttpConnection, LiveBody
from tests.lab.credentials import trusting
from tests.local_etcd import DEADLINE, make_certificates, server, silent

SIZE = 1000


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_bytes_that_were_taken_in_are_read_before_the_kernel_is_asked(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one TLS record a part is in the buffer, and the rest is decrypted, where no poll sees it."""
    monkeypatch.setattr(http_connection, "_BUFFER", 16)
    monkeypatch.setattr(http_connection, "_PIECE", 40)
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")

    def answer(sock: socket.socket) -> None:
        sock.recv(65536)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head + b"%x\r\n%b\r\n" % (SIZE, b"x" * SIZE))
        silent(sock)

    def serve(sock: socket.socket) -> None:
        if scheme == "http":
            answer(sock)
            return
        with context.wrap_socket(sock, server_side=True) as encrypted:
            answer(encrypted)

    with server(serve) as url:
        connection = HttpConnection(trusting(tmp_path / "ca.crt") if scheme == "https" else None)
        connection.connect("127.0.0.1", int(url.rpartition(":")[2]), DEADLINE)
        body = LiveBody(connection.request("GET", "/", None, {}, DEADLINE))
        assert body.more_within(DEADLINE)
        read = len(body.read())
        while read < SIZE:
            assert body.more_within(0)
            read += len(body.read())
        assert not body.more_within(0)
        connection.reset()
