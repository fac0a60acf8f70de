"""Which connection has to go for another one, how long one may last, and what a failed request costs."""

from __future__ import annotations

import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from flanneld.runtime.server import (
    _CROWDED,
    READABLE,
    ConnectionOrigin,
    Conversation,
    Limits,
    PolledServer,
    _lifted,
    _source,
    to_evict,
)
from tests.clock import Clock
from tests.lab.wait import PATIENCE, wait_for

DEADLINE = 20.0 * PATIENCE

LIMITS = Limits(3.0, connections=6, per_source=3, reserved=2)
HERE, ELSEWHERE = (
    ConnectionOrigin("192.0.2.1", is_local=True),
    ConnectionOrigin("198.51.100.1", is_local=False),
)


def others(*names: str) -> list[ConnectionOrigin]:
    return [ConnectionOrigin(name, is_local=False) for name in names]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param([], ELSEWHERE, None, id="the first one"),
        pytest.param([ELSEWHERE] * 2, ELSEWHERE, None, id="room for this source"),
        pytest.param([HERE, *[ELSEWHERE] * 3], ELSEWHERE, 1, id="the oldest of a source that has enough"),
        pytest.param(others("a", "b", "c"), ELSEWHERE, None, id="room for all sources"),
        pytest.param(others("a", "b", "b", "c"), ELSEWHERE, 1, id="the oldest of the largest source"),
        pytest.param(others("a", "b", "c", "d"), ELSEWHERE, 0, id="the oldest of sources of one size"),
        pytest.param([HERE, *others("a", "b", "c", "d")], ELSEWHERE, 1, id="others go before our own"),
        pytest.param(others("a", "b", "c", "d"), HERE, None, id="room is kept for this host"),
        pytest.param([HERE, HERE, *others("a", "a", "b", "c")], HERE, 0, id="no room for anybody"),
        pytest.param([HERE, *others("a", "a", "b", "c", "d")], HERE, 1, id="the largest goes for our own"),
        pytest.param([HERE] * 3, HERE, 0, id="this host is bounded as well"),
    ],
)
def test_a_crowd_displaces_itself(
    old: list[ConnectionOrigin], new: ConnectionOrigin, expected: int | None
) -> None:
    assert to_evict(old, new, LIMITS) == expected


FEW_DESCRIPTORS = """
import resource, socket
from flanneld.runtime.server import READABLE, Limits, PolledServer

def talk(connection):
    yield READABLE
    connection.send(b"yes")

resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
PolledServer(listener, talk, Limits(3600.0, 1000, 1000), "failed").serve()
"""


def test_oldest_connection_goes_when_there_is_no_descriptor_for_a_new_one() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ExitStack() as crowd:
        crowd.callback(process.kill)
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        clients = [crowd.enter_context(socket.create_connection(address, timeout=60)) for _ in range(60)]
        clients[-1].sendall(b"?")
        assert clients[-1].recv(10) == b"yes"
        assert clients[0].recv(10) == b""


def test_connections_of_a_crowd_leave_the_low_descriptors_to_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as crowd:
        crowd.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        one, other = map(crowd.enter_context, socket.socketpair())
        assert _lifted(one) is one
        null = crowd.enter_context(Path(os.devnull).open())
        for _ in range(_CROWDED):
            crowd.callback(os.close, os.dup(null.fileno()))
        duplicate = one.dup()
        lifted = crowd.enter_context(_lifted(duplicate))
        assert lifted.fileno() >= 1024
        assert duplicate.fileno() == -1
        other.sendall(b"?")
        assert lifted.recv(10) == b"?"


def test_clients_of_one_ipv6_subnet_are_one_source() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        first, second, other = (
            _source(server, (f"2001:db8:0:{net}::{host}", 5000, 0, 0))
            for net, host in (("7", "1"), ("7", "2"), ("8", "1"))
        )
        assert first == second != other
        assert not first.is_local
        assert _source(server, ("::1", 5000, 0, 0)).is_local
        mapped = ConnectionOrigin("192.0.2.7", is_local=False)
        assert _source(server, ("::ffff:192.0.2.7", 5000, 0, 0)) == mapped


Handler = Callable[[socket.socket], object]


def in_a_thread(handle: Handler) -> Callable[[socket.socket], Conversation]:
    """Return the conversation that leaves each request to a thread."""

    def talk(connection: socket.socket) -> Conversation:
        yield READABLE
        connection.setblocking(True)
        return connection, lambda: handle(connection)

    return talk


@contextmanager
def serving(handle: Handler, limits: Limits) -> Iterator[tuple[PolledServer, Callable[[], socket.socket]]]:
    """Serve meanwhile; yield the server, and what connects to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = PolledServer(listener, in_a_thread(handle), limits, "Cannot answer")
    thread = threading.Thread(target=server.serve)
    thread.start()
    with ExitStack() as clients:
        clients.callback(thread.join, DEADLINE)
        clients.callback(server.close)
        yield (
            server,
            lambda: clients.enter_context(socket.create_connection(address, timeout=DEADLINE)),
        )
    assert not thread.is_alive()


def answer(connection: socket.socket) -> None:
    connection.sendall(b"yes " + connection.recv(10))


def test_silent_client_is_cut_off_once_its_time_is_over_though_nothing_else_happens() -> None:
    with serving(answer, Limits(0.01, 10, 10, threads=1)) as (server, connect):
        assert connect().recv(10) == b""
        wait_for(lambda: server.connections == 0)


def test_end_of_a_server_ends_its_connections_and_frees_its_port_and_the_size_of_stacks() -> None:
    def tell_size_of_stacks(connection: socket.socket) -> None:
        connection.sendall(b"%d" % threading.stack_size())

    assert threading.stack_size() == 0
    with serving(tell_size_of_stacks, Limits(DEADLINE, 10, 10, threads=1)) as (server, connect):
        client, silent = connect(), connect()
        address = client.getpeername()
        client.sendall(b"?")
        assert 0 < int(client.recv(10)) < 1 << 20
        wait_for(lambda: server.connections == 1)
        server.close()
        assert silent.recv(10) == b""
        with pytest.raises(ConnectionRefusedError):
            wait_for(lambda: socket.create_connection(address).close())
    assert threading.stack_size() == 0


def test_request_that_finds_no_free_thread_is_refused_and_that_is_told_once_a_minute(
    daemon_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    def hold(connection: socket.socket) -> None:
        answer(connection)
        may_end.wait(DEADLINE)

    def ask() -> socket.socket:
        client = connect()
        client.sendall(b"1")
        return client

    with serving(hold, Limits(DEADLINE, 10, 10, threads=1)) as (server, connect):
        served = ask()
        assert served.recv(10) == b"yes 1"
        told = []
        for seconds in (0.0, 59.0, 1.0):
            daemon_clock.time += seconds
            refused = ask()
            with pytest.raises(ConnectionResetError):
                assert refused.recv(10)
            told.append(len(caplog.messages))
        assert told == [1, 1, 2]
        assert caplog.messages[1].startswith("Too many connections: refusing one of ('127.0.0.1', ")
        assert server.connections == 1
        may_end.set()
        assert served.recv(10) == b""
        wait_for(lambda: server.connections == 0)
        assert ask().recv(10) == b"yes 1"


def test_request_that_fails_through_a_bug_is_told_with_its_client_and_harms_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def handle(connection: socket.socket) -> None:
        if connection.recv(1) == b"!":
            raise ZeroDivisionError
        answer(connection)

    with serving(handle, Limits(DEADLINE, 10, 10, threads=1)) as (server, connect):
        client = connect()
        client.sendall(b"!")
        assert client.recv(10) == b""
        wait_for(lambda: server.connections == 0)
        assert caplog.messages == [f"Cannot answer of {client.getsockname()}"]
        client = connect()
        client.sendall(b"12")
        assert client.recv(10) == b"yes 2"


def test_client_that_has_gone_is_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    has_gone = threading.Event()

    def handle(connection: socket.socket) -> None:
        has_gone.wait(DEADLINE)
        connection.sendall(connection.recv(10))

    with serving(handle, Limits(DEADLINE, 10, 10, threads=1)) as (server, connect):
        client = connect()
        client.sendall(b"1")
        wait_for(lambda: server.connections == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # with a reset
        has_gone.set()
        wait_for(lambda: server.connections == 0)
        assert caplog.messages == ["Cannot answer of a client that has gone"]
