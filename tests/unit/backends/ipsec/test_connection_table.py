"""The table of charon's keys and connections, beside a charon that keeps what it is told."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flanneld.backends.ipsec import tables, vici
from flanneld.backends.ipsec.resources import IkeConnection, SharedKey
from flanneld.backends.ipsec.tables import ConnectionTable
from flanneld.backends.ipsec.vici import PacketType
from flanneld.model import Secret
from flanneld.runtime import clock
from flanneld.state.resources import Resource
from flanneld.state.table import Put, Scope
from tests.calls import at_once

HERE, THERE = IPv4Address("192.0.2.1"), IPv4Address("192.0.2.2")
NETWORK, OWN, PEER = map(IPv4Network, ("10.5.0.0/16", "10.5.1.0/24", "10.5.2.0/24"))
KEY = SharedKey(THERE, Secret(b"secret"))
CONNECTION = IkeConnection(HERE, HERE, OWN, PEER, THERE, "aes256-sha256")
ENDS = {"unload-conn", "terminate", "unload-shared"}
CHILD = {"state": "INSTALLED", "spi-in": "1", "spi-out": "2", "uniqueid": "7", "install-time": "60"}


class FakeCharon:
    """charon's control socket: connections, keys and SAs, the requests so far, and those it refuses."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.connections: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}
        self.associations: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}  # listed after those, under the same names
        self.asked: list[tuple[str, Any]] = []
        self.refuses: set[str] = set()
        self.before: Callable[[], object] = int  # each answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    @property
    def commands(self) -> list[str]:
        """The requests that change something."""
        return [command for command, _ in self.asked if not command.startswith(("list", "get"))]

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, connection.makefile("rwb") as stream:
                    while length := stream.read(4):
                        packet = vici.unpack(stream.read(vici.length_of(length)))
                        stream.write(self._answer(packet.kind, packet.name, packet.message))
                        stream.flush()

    def _answer(self, kind: PacketType, command: str, message: Any) -> bytes:
        if kind is not PacketType.REQUEST:
            return vici.pack(PacketType.CONFIRM)
        self.before()
        self.asked.append((command, message))
        if command in self.refuses:
            return vici.pack(PacketType.RESPONSE, "", {"success": "no", "errmsg": "no such luck"})
        events: dict[str, Any] = {}
        match command:
            case "list-conns":
                events = {name: _as_listed(each) for name, each in self.connections.items()}
            case "list-sas":
                events = self.associations
            case "get-shared":
                return vici.pack(PacketType.RESPONSE, "", {"keys": [*self.keys]})
            case "load-shared":
                self.keys[message["id"].decode()] = message
            case "load-conn":
                self.connections |= message
            case "unload-conn":
                self.connections.pop(message["name"].decode(), None)
            case "unload-shared":
                self.keys.pop(message["id"].decode(), None)
        name = command.removesuffix("s")
        more = self.requests if command == "list-sas" else {}
        items = [*events.items(), *more.items()]
        listed = (vici.pack(PacketType.EVENT, name, {key: value}) for key, value in items)
        return b"".join(listed) + vici.pack(PacketType.RESPONSE, "", {"success": "yes"})


def _as_listed(connection: Any) -> dict[str, Any]:
    """charon tells a loaded connection in other words."""
    children = {
        name: {"local-ts": child["local_ts"], "remote-ts": child["remote_ts"]}
        for name, child in connection["children"].items()
    }
    return {name: connection[name] for name in ("local_addrs", "remote_addrs")} | {"children": children}


class FakeAssociations:
    """The kernel's SAs."""

    known = frozenset({"1", "2"})
    flushed = False

    def spis(self) -> frozenset[str]:
        return self.known

    def fileno(self) -> int:
        return 7

    def were_flushed(self) -> bool:
        return self.flushed


@pytest.fixture
def charon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCharon]:
    monkeypatch.setattr(tables, "Associations", FakeAssociations)
    found = FakeCharon(tmp_path / "vici")
    yield found
    found.close()


@pytest.fixture
def table(charon: FakeCharon) -> ConnectionTable:
    return ConnectionTable(NETWORK, at_once, charon.path)


def read(table: ConnectionTable, *desired: Resource) -> list[Resource]:
    return [each.resource for each in table.read(Scope({each.key: each for each in desired}))]


def sas(*children: dict[str, str], state: str = "ESTABLISHED") -> dict[str, Any]:
    numbered = {f"child-{number}": each for number, each in enumerate(children)}
    ike = {"state": state, "remote-host": str(THERE), "remote-port": "4500", "child-sas": numbered}
    return {CONNECTION.name: ike}


def test_what_is_loaded_is_read_back_and_what_is_dropped_is_gone(
    charon: FakeCharon, table: ConnectionTable
) -> None:
    both: list[Resource] = [KEY, CONNECTION]
    report = table.put([Put(CONNECTION), Put(KEY)])
    assert report.made == both  # a connection starts at once, and needs the key for that
    assert charon.commands == ["load-shared", "load-conn"]
    assert read(table, *both) == both
    assert table.drop(both).removed == both
    assert charon.commands[2:] == ["unload-conn", "terminate", "unload-shared"]
    assert read(table) == []


def test_nothing_of_others_is_read(charon: FakeCharon, table: ConnectionTable) -> None:
    elsewhere = IkeConnection(HERE, HERE, OWN, IPv4Network("10.6.2.0/24"), THERE)
    charon.connections = {"vpn": CONNECTION.message()[CONNECTION.name], **elsewhere.message()}
    charon.keys = {"theirs": {}, "flannel-of-others": {}}
    assert read(table) == []


def test_what_another_run_has_loaded_is_not_taken_for_known(
    charon: FakeCharon, table: ConnectionTable
) -> None:
    ConnectionTable(NETWORK, at_once, charon.path).put([Put(KEY), Put(CONNECTION)])
    key, connection = read(table, KEY, CONNECTION)
    assert (key.key, connection.key) == (KEY.key, CONNECTION.key)
    assert key != KEY
    assert connection != CONNECTION


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("local_addrs",), ["192.0.2.7"]),
        (("remote_addrs",), ["192.0.2.7"]),
        (("children", CONNECTION.child, "local_ts"), ["10.5.0.0/24"]),
        (("children", CONNECTION.child, "remote_ts"), ["10.5.3.0/24"]),
        (("children",), {}),
    ],
)
def test_connection_that_charon_has_otherwise_is_not_the_wanted_one(
    charon: FakeCharon, table: ConnectionTable, path: tuple[str, ...], value: Any
) -> None:
    table.put([Put(CONNECTION)])
    place = charon.connections[CONNECTION.name]
    for word in path[:-1]:
        place = place[word]
    place[path[-1]] = value
    (found,) = read(table, CONNECTION)
    assert found.key == CONNECTION.key
    assert found != CONNECTION


def test_changed_connection_ends_the_sas_of_the_former_and_an_equal_one_does_not(
    charon: FakeCharon, table: ConnectionTable
) -> None:
    changed = IkeConnection(HERE, HERE, OWN, PEER, THERE, "aes128-sha256")
    assert changed.key == CONNECTION.key
    for wanted, ends in ((CONNECTION, 0), (CONNECTION, 0), (changed, 2), (CONNECTION, 4)):
        table.put([Put(wanted)])
        assert sum(command in ENDS for command in charon.commands) == ends


def test_refused_resource_is_reported_and_the_others_are_loaded(
    charon: FakeCharon, table: ConnectionTable
) -> None:
    charon.refuses = {"load-shared", "unload-shared", "terminate"}
    report = table.put([Put(KEY), Put(CONNECTION)])
    assert [failure.resource for failure in report.failed] == [KEY]
    assert "charon refused load-shared: no such luck" in str(report.failed[0])
    assert report.made == [CONNECTION]
    # What is gone already is as good as removed.
    both: list[Resource] = [KEY, CONNECTION]
    assert table.drop(both).removed == both


def test_round_of_loading_ends_after_5_s(
    charon: FakeCharon, table: ConnectionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = clock.now()
    later = [0.0]
    monkeypatch.setattr(clock, "now", lambda: begin + later[0])
    others = [SharedKey(IPv4Address(f"192.0.2.{number}"), KEY.secret) for number in range(3, 6)]

    def pass_time() -> None:
        later[0] += 2.5

    charon.before = pass_time
    report = table.put([Put(each) for each in (KEY, *others)])
    assert (report.made, report.pending) == ([KEY, *others[:2]], others[2:])


def test_lost_sa_is_negotiated_again_unless_this_run_has_loaded_nothing(
    charon: FakeCharon, table: ConnectionTable, caplog: pytest.LogCaptureFixture
) -> None:
    lost = {**CHILD, "spi-in": "9"}
    charon.associations = sas(lost)
    charon.connections = dict(CONNECTION.message())
    read(table, CONNECTION)  # as a dry run does
    assert charon.commands == []
    table.put([Put(CONNECTION)])
    read(table, CONNECTION)
    assert charon.asked[-1] == ("rekey", {"child-id": b"7"})
    assert "Negotiating 1 lost SA again" in caplog.text


def test_peer_without_sas_at_two_reads_is_called_once_a_read(
    charon: FakeCharon, table: ConnectionTable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table.put([Put(CONNECTION)])
    loaded = len(charon.commands)
    read(table, CONNECTION)
    assert charon.commands[loaded:] == []
    table.note({"msg": b"received AUTHENTICATION_FAILED", "ikesa-name": CONNECTION.name.encode()})
    charon.refuses = {"initiate"}
    for _ in range(2):
        read(table, CONNECTION)
    calls = [message for command, message in charon.asked if command == "initiate"]
    assert [(each["ike"], each["child"]) for each in calls] == [
        (CONNECTION.name.encode(), CONNECTION.child.encode())
    ] * 2
    fails = f"IKE with {THERE} for {PEER} fails: received AUTHENTICATION_FAILED; give all nodes one PSK"
    assert caplog.text.count(fails) == 1
    (session,) = table.sessions()
    assert (session.is_established, session.is_silent) == (False, True)
    assert session.problem.endswith("give all nodes one PSK")

    charon.associations = sas(state="CONNECTING")
    read(table, CONNECTION)
    assert len(charon.commands) == loaded + 2
    charon.associations = sas(CHILD)
    read(table, CONNECTION)
    assert caplog.text.count(f"IKE with {THERE} for {PEER} succeeds again") == 1
    (session,) = table.sessions()
    assert (session.is_established, session.problem, session.endpoint) == (True, "", f"{THERE}:4500")


def test_a_request_without_an_answer_ends_once_the_peers_own_has_led_to_sas(
    charon: FakeCharon, table: ConnectionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, later = clock.now(), [0.0]
    monkeypatch.setattr(clock, "now", lambda: begin + later[0])
    assert table.next_look == math.inf
    request = {"uniqueid": "8", "responder-spi": "0" * 16}
    charon.requests = {CONNECTION.name: sas(state="CONNECTING")[CONNECTION.name] | request}
    charon.associations = sas(CHILD)
    read(table, CONNECTION)  # as a dry run does
    assert charon.commands == []
    table.put([Put(CONNECTION)])
    later[0] = table.next_look - begin - 0.1
    assert not table.look()
    later[0] += 0.2
    assert table.look()
    assert not table.look()
    charon.refuses = {"terminate"}  # it ended by itself
    read(table, CONNECTION)
    assert charon.commands == ["load-conn", "terminate"]
    assert charon.asked[-1][1]["ike-id"] == b"8"
    charon.associations = {}
    read(table, CONNECTION)
    assert charon.commands == ["load-conn", "terminate"]


def test_a_first_request_without_an_answer_ends_before_charon_repeats_it_and_another_one_does_not(
    charon: FakeCharon, table: ConnectionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, later = clock.now(), [0.0]
    monkeypatch.setattr(clock, "now", lambda: begin + later[0])
    request = {"uniqueid": "8", "responder-spi": "0" * 16}
    negotiation = {CONNECTION.name: sas(state="CONNECTING")[CONNECTION.name] | request}
    steps: list[tuple[float, bool, dict[str, Any], list[str]]] = [
        (2.9, False, negotiation, []),
        (3.0, True, negotiation, ["terminate"]),
        (5.9, False, {}, []),
        (6.0, True, {}, ["initiate"]),
        (9.1, False, negotiation, []),
    ]
    table.put([Put(CONNECTION)])
    for later[0], is_due, charon.requests, expected in steps:
        del charon.asked[:]
        assert table.look() is is_due
        if is_due or charon.requests:
            read(table, CONNECTION)
        assert charon.commands == expected


@pytest.mark.parametrize(
    "line",
    [
        {"msg": b"received AUTHENTICATION_FAILED", "ikesa-name": b"vpn"},
        {"msg": b"all is well", "ikesa-name": CONNECTION.name.encode()},
    ],
)
def test_line_of_another_connection_or_without_a_failure_is_no_reason(
    table: ConnectionTable, line: Any
) -> None:
    table.put([Put(CONNECTION)])
    table.note(line)
    read(table, CONNECTION)
    (session,) = table.sessions()
    assert (session.problem, session.is_silent) == ("", False)


def test_flush_of_the_kernels_sas_is_a_change(
    table: ConnectionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert table.fileno() == 7
    assert table.changes() == []
    monkeypatch.setattr(FakeAssociations, "flushed", True)
    assert len(table.changes()) == 1
