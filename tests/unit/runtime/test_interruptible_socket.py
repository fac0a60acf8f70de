"""The one connection of a thread: how soon a server that vanished is noticed, and who holds it."""

from __future__ import annotations

import socket

import pytest

from flanneld.errors import Cancelled
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, Unreachable
from tests.local_etcd import free_port, server, silent


def test_server_that_vanished_is_noticed_within_25_seconds_idle_or_not() -> None:
    with server(silent) as url:
        port = int(url.rpartition(":")[2])
        connection = InterruptibleSocket()
        sock = connection.connect("127.0.0.1", port, 5.0)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, interval, count, unanswered = (sock.getsockopt(socket.IPPROTO_TCP, each) for each in options)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == unanswered / 1000 == 25
        assert sock.gettimeout() == 5.0
        sock.close()
        connection.disconnect()


def test_refused_connection_is_unreachable_and_a_cancelled_one_is_not_made() -> None:
    connection = InterruptibleSocket()
    with pytest.raises(Unreachable, match="connection refused"):
        connection.connect("127.0.0.1", free_port(), 5.0)
    connection.cancel()
    with server(silent) as url, pytest.raises(Cancelled):
        connection.connect("127.0.0.1", int(url.rpartition(":")[2]), 5.0)
