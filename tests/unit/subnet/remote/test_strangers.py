"""Crowds of connections of one source, with which no request comes: others are answered meanwhile."""

from __future__ import annotations

import http.client
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.lab.credentials import trusting
from tests.lab.wait import PATIENCE, wait_for
from tests.local_etcd import free_port, make_certificates
from tests.unit.subnet.remote.servers import CONFIG

#: Connections of an everyday run, and of one with --long.
FEW, MANY = 1200, 8192
#: Memory that they may cost, in bytes.
MEMORY = 50 << 20
#: Seconds for an answer on a busy machine.
DEADLINE = 20.0 * PATIENCE
REQUESTS = 12

many = pytest.param(MANY, marks=pytest.mark.long)


class Daemon:
    """A lease server in a process of its own, with TLS."""

    def __init__(self, directory: Path, tls: Path) -> None:
        self.port = free_port()
        self.tls = trusting(tls / "ca.crt")
        flags = [
            "-serve-only",
            f"-listen=127.0.0.1:{self.port}",
            f"-store={directory / 'leases.db'}",
            f"-network={CONFIG}",
            f"-remote-certfile={tls / 'server.crt'}",
            f"-remote-keyfile={tls / 'server.key'}",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flanneld", *flags], stderr=(directory / "log").open("wb")
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE)

    def answers(self) -> bool:
        """Ask once, over a connection of its own."""
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE, context=self.tls)
        try:
            connection.request("GET", "/v1/_/config")
            return connection.getresponse().status == 200
        finally:
            connection.close()

    def is_up(self) -> bool:
        try:
            return self.answers()
        except OSError:
            return False

    def status(self, name: str) -> int:
        (line,) = (
            line
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            if line.startswith(f"{name}:")
        )
        return int(line.split()[1])


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture
def daemon(tmp_path: Path, tls: Path) -> Iterator[Daemon]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    daemon = Daemon(tmp_path, tls)
    try:
        wait_for(daemon.is_up, what="the server")
        yield daemon
    finally:
        daemon.process.terminate()
        daemon.process.wait(DEADLINE)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def silent(_daemon: Daemon, client: socket.socket) -> socket.socket:
    return client


def slow(_daemon: Daemon, client: socket.socket) -> socket.socket:
    """Begin a handshake and leave it there."""
    client.sendall(b"\x16\x03\x01\x02")
    return client


def hello(_daemon: Daemon, client: socket.socket) -> socket.socket:
    """Send a whole ClientHello and take no part in what follows."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    begun = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        begun.do_handshake()
    client.sendall(outgoing.read())
    return client


def half(daemon: Daemon, client: socket.socket) -> socket.socket:
    """Begin a request and leave it there."""
    encrypted = daemon.tls.wrap_socket(client, server_hostname="127.0.0.1")
    encrypted.sendall(b"GET /v1/_/config HT")
    return encrypted


def check(daemon: Daemon, memory: int, what: str) -> None:
    """See that each honest request is answered; print how long it took."""
    waits = []
    for _ in range(REQUESTS):
        began = time.monotonic()
        assert daemon.answers()
        waits.append(time.monotonic() - began)
    grown = daemon.status("VmRSS") * 1024 - memory
    threads = daemon.status("Threads")
    print(f"{what}: answers after {max(waits):.3f} s at most, {grown / (1 << 20):.1f} MiB, {threads} threads")
    assert grown < MEMORY
    assert threads < 50


@pytest.mark.parametrize("count", [FEW, many])
@pytest.mark.parametrize("act", [silent, slow, hello, half])
def test_crowd_without_a_request_keeps_nobody_from_an_answer(
    daemon: Daemon, act: Callable[[Daemon, socket.socket], socket.socket], count: int
) -> None:
    memory = daemon.status("VmRSS") * 1024
    with ExitStack() as crowd:
        for _ in range(count):
            crowd.enter_context(act(daemon, daemon.connect()))
        check(daemon, memory, f"{count} {act.__name__}")
        for client in [crowd.enter_context(daemon.connect()) for _ in range(count // 4)]:
            client.close()
        check(daemon, memory, f"{count // 4} hung up")
    check(daemon, memory, f"{count} hung up")
