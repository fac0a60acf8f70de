"""Which connection has to go for another one."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from flanneld.runtime.server import _CROWDED, ConnectionOrigin, Limits, _lifted, _source, to_evict

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
