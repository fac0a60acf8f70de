"""Daemon and pump, talking: the real two ends, with a data plane between them that carries nothing."""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from itertools import count

import pytest
from msgspec.structs import replace

from flanneld.backends.udp import client as client_module
from flanneld.backends.udp import control
from flanneld.backends.udp.client import NoProxy, ProxyClient, succeed
from flanneld.backends.udp.control import ProxyPeer, UdpProxy
from flanneld.backends.udp.proxy import __main__ as server_module
from flanneld.backends.udp.proxy.__main__ import ProxyServer
from flanneld.backends.udp.tables import ProxyPeerTable, ProxyTable
from flanneld.state.resources import Resource
from flanneld.state.table import Changes, Put, Scope, Table

HOST = IPv4Address("192.0.2.1")
MANY = [(IPv4Network((0x0A000000 + (i << 8), 24)), IPv4Address(0xC6120000 + i)) for i in range(5000)]

_numbers = count()


class Idle:
    """A data plane without a wire."""

    name = "idle"

    def __init__(self) -> None:
        self.peers: dict[IPv4Network, IPv4Address] = {}
        self._stop = threading.Event()
        self._failure: OSError | None = None

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        self.peers[subnet] = endpoint

    def drop_peer(self, subnet: IPv4Network) -> None:
        self.peers.pop(subnet, None)

    def run(self) -> None:
        self._stop.wait()
        if self._failure:
            raise self._failure

    def stop(self) -> None:
        self._stop.set()

    def fail(self, failure: OSError) -> None:
        self._failure = failure
        self._stop.set()

    def counters(self) -> dict[str, int]:
        return {"sent": 7, "received": 0}


def settings() -> UdpProxy:
    return UdpProxy(f"test{os.getpid()}.{next(_numbers)}", HOST, 8285, IPv4Address("10.5.1.0"), 1472)


class Running:
    """A pump of which only the process is missing. ``device_stays`` is what it decided at its end."""

    def __init__(self, listen: Callable[[str], socket.socket] = control.listen) -> None:
        self.settings = settings()
        self.plane = Idle()
        self.device_stays: list[bool] = []
        listener = listen(self.settings.tun)
        self.server = ProxyServer(self.settings, self.plane, "for the test", listener)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.device_stays.append(self.server.serve())
        for each in (self.server._listener, *self.server._connections.values()):
            each.close()

    def ended(self) -> bool:
        self.thread.join(60)
        return not self.thread.is_alive()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end gives the other up: a busy machine may let it wait."""
    monkeypatch.setattr(client_module, "ANSWER_PATIENCE", 60.0)
    for name in ("STOP_PATIENCE", "SEND_PATIENCE"):
        monkeypatch.setattr(server_module, name, 60.0)


@pytest.fixture
def pump() -> Iterator[Running]:
    pump = Running()
    yield pump
    pump.server.end()
    assert pump.ended()


@pytest.fixture
def client(pump: Running) -> Iterator[ProxyClient]:
    client = ProxyClient(pump.settings.tun)
    yield client
    client.close()


def test_a_pump_says_what_it_is(pump: Running, client: ProxyClient) -> None:
    running = client.hello()
    assert (running.settings, running.pid) == (pump.settings, os.getpid())
    assert (running.plane, running.why) == ("idle", "for the test")


def test_five_thousand_peers_are_told_and_read_back(pump: Running, client: ProxyClient) -> None:
    client.put(MANY)
    assert pump.plane.peers == dict(MANY)
    assert client.peers() == MANY
    client.drop(MANY[1:])
    assert pump.plane.peers == dict(MANY[:1])
    assert client.peers() == MANY[:1]


def test_a_successor_takes_over_the_peers_and_the_place(pump: Running, client: ProxyClient) -> None:
    client.put(MANY)
    assert succeed(pump.settings.tun) == MANY
    assert pump.ended()
    assert pump.device_stays == [True]
    assert succeed(pump.settings.tun) == []


def test_a_peer_that_moves_is_replaced(pump: Running, client: ProxyClient) -> None:
    subnet = MANY[0][0]
    client.put([MANY[0]])
    client.put([(subnet, HOST)])
    assert client.peers() == [(subnet, HOST)]
    assert pump.plane.peers == {subnet: HOST}


def test_counters_are_told(client: ProxyClient) -> None:
    assert client.counters() == {"sent": 7, "received": 0}


@pytest.mark.parametrize("device_stays", [True, False])
def test_a_pump_that_is_told_to_leave_has_gone_when_that_returns(
    pump: Running, client: ProxyClient, device_stays: bool
) -> None:
    client.leave(device_stays=device_stays)
    assert pump.ended()
    assert pump.device_stays == [device_stays]
    with pytest.raises(NoProxy, match="refused"):
        client.hello()
    client.leave(device_stays=True)


def test_a_signal_takes_the_device_along(pump: Running) -> None:
    pump.server.end()
    assert pump.ended()
    assert pump.device_stays == [False]


def test_the_end_of_a_pump_is_heard_at_once_with_its_reason(pump: Running, client: ProxyClient) -> None:
    client.hello()
    pump.plane.fail(OSError(77, "File descriptor in bad state"))
    poll = select.poll()
    poll.register(client.fileno(), select.POLLIN)
    assert poll.poll(60_000)
    assert client.news() == "the idle data plane: File descriptor in bad state"
    assert client.fileno() < 0
    assert pump.ended()
    assert pump.device_stays == [True]


def test_a_second_daemon_can_ask_while_the_first_is_connected(pump: Running, client: ProxyClient) -> None:
    client.put([MANY[0]])
    other = ProxyClient(pump.settings.tun)
    assert other.peers() == client.peers() == [MANY[0]]
    other.close()
    assert client.peers() == [MANY[0]]


@pytest.mark.parametrize("message", [b"?", b"\0" * 50, control.PUT + b"x", control.PUT + b"\xff" * 9])
def test_a_message_that_makes_no_sense_does_no_harm(
    pump: Running, client: ProxyClient, message: bytes
) -> None:
    client.put([MANY[0]])
    with control.new_socket() as stranger:
        stranger.connect(control.address_of(pump.settings.tun))
        stranger.settimeout(0.1)
        stranger.send(message)
        with suppress(TimeoutError):
            assert stranger.recv(100) == b""
    assert client.peers() == [MANY[0]]


def test_an_answer_of_another_version_is_no_pump_of_ours() -> None:
    name = f"test{os.getpid()}.{next(_numbers)}"
    with control.new_socket() as listener:
        listener.bind(control.address_of(name))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.send(control.HELLO + b"2\0of\0whatever")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NoProxy, match="another version"):
            ProxyClient(name).hello()
        thread.join()


def test_the_pump_of_another_device_is_no_pump_of_ours() -> None:
    name = settings().tun
    pump = Running(lambda _: control.listen(name))
    client = ProxyClient(name)
    with pytest.raises(NoProxy, match="the process that answers is no udp proxy"):
        client.hello()
    client.leave(device_stays=True)
    assert pump.ended()


# ---- the tables ------------------------------------------------------------------------------------


def held(table: Table) -> list[Resource]:
    return [seen.resource for seen in table.read(Scope({}))]


def test_the_tables_read_what_the_pump_has(pump: Running, client: ProxyClient) -> None:
    tun = pump.settings.tun
    peers = ProxyPeerTable(client, tun)
    peers.put([Put(ProxyPeer(tun, *entry)) for entry in MANY[:3]])
    peers.drop([ProxyPeer(tun, *MANY[1])])
    assert held(ProxyTable(client)) == [pump.settings]
    assert held(peers) == [ProxyPeer(tun, *MANY[0]), ProxyPeer(tun, *MANY[2])]


def test_without_a_pump_there_is_none_and_its_peers_cannot_be_known() -> None:
    client = ProxyClient("none")
    assert held(ProxyTable(client)) == []
    with pytest.raises(NoProxy):
        held(ProxyPeerTable(client, "none"))


def test_a_closing_daemon_leaves_the_pump_alone(pump: Running, client: ProxyClient) -> None:
    table = ProxyTable(client)
    assert held(table) == [pump.settings]
    table.close(remove=False)
    assert ProxyClient(pump.settings.tun).hello().settings == pump.settings


def test_a_pump_that_is_unwanted_leaves_its_device(pump: Running, client: ProxyClient) -> None:
    assert ProxyTable(client).drop([pump.settings]).removed == [pump.settings]
    assert pump.ended()
    assert pump.device_stays == [True]


def test_the_end_of_the_backend_takes_pump_and_device_along(pump: Running, client: ProxyClient) -> None:
    ProxyTable(client).close(remove=True)
    assert pump.ended()
    assert pump.device_stays == [False]


def test_a_pump_that_was_found_is_told_once(
    pump: Running, client: ProxyClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = ProxyTable(client)
    assert held(table) == held(table) == [pump.settings]
    assert caplog.messages == [
        f"Adopted the running {pump.settings}, process {os.getpid()}",
        f"Using the idle data plane: for the test; process {os.getpid()}",
    ]


def test_a_pump_whose_usual_name_was_taken_is_found_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pump = Running(control.listen_elsewhere)
    client = ProxyClient(pump.settings.tun)
    assert held(ProxyTable(client)) == [pump.settings]
    name = control.address_of(pump.settings.tun).replace("\0", "@")
    assert caplog.messages == [f"Another process poses as the udp proxy at {name}; find it with: ss -xlp"]
    client.leave(device_stays=True)
    assert pump.ended()


def test_the_end_of_a_pump_is_a_change_of_its_table(
    pump: Running, client: ProxyClient, caplog: pytest.LogCaptureFixture
) -> None:
    table = ProxyTable(client)
    assert (table.fileno(), table.changes()) == (-1, [])
    held(table)
    assert table.changes() == []
    pump.plane.fail(OSError(77, "File descriptor in bad state"))
    poll = select.poll()
    poll.register(table.fileno(), select.POLLIN)
    assert poll.poll(60_000)
    assert table.changes() == [Changes()]
    assert caplog.messages == ["The udp proxy ended: the idle data plane: File descriptor in bad state"]
    assert (table.fileno(), table.changes()) == (-1, [])


@pytest.mark.parametrize(
    ("host", "is_taken", "reason"),
    [
        ("192.0.2.1", False, "192.0.2.1:0, UDP: Cannot assign requested address"),
        ("127.0.0.1", False, "there is no device {tun}"),
        ("127.0.0.1", True, "127.0.0.1:{port}, UDP: in use by .*, which has to be stopped"),
    ],
    ids=["another host's address", "no device", "a port in use"],
)
def test_a_pump_that_does_not_start_says_why(host: str, is_taken: bool, reason: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1] if is_taken else 0
        wanted = replace(settings(), local=IPv4Address(host), port=port)
        (failure,) = ProxyTable(ProxyClient(wanted.tun)).put([Put(wanted)]).failed
    assert failure.resource == wanted
    told = reason.format(tun=wanted.tun, port=port)
    assert re.fullmatch(f"no udp proxy for {wanted.tun}: {told}", failure.reason)


def test_a_pump_of_another_version_is_not_the_wanted_one(pump: Running) -> None:
    assert replace(pump.settings, version="another") != pump.settings


def test_pump_gets_what_its_python_needs_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PYTHONUTF8", "1")
    monkeypatch.setenv("FLANNELD_ETCD_PASSWORD", "secret")
    monkeypatch.setattr(sys, "path", ["", "/one", "/other"])
    found = client_module._environment()
    assert (found["PATH"], found["PYTHONUTF8"], found["PYTHONPATH"]) == ("/bin", "1", "/one:/other")
    assert "secret" not in found.values()
