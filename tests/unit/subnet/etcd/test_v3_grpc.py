"""etcd's v3 API over gRPC: users whom a certificate names, the choice of the transport, and bad servers."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from flanneld.config import parse
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.model import Added, Event, LeaseAttrs, Snapshot
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.grpc import Grpc
from flanneld.subnet.etcd.keys import NoSuchApi, NotFound, Position
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts, Servers
from flanneld.subnet.etcd.v3 import V3Client
from flanneld.subnet.etcd.v3_messages import AccessRefused, GatewayRefused
from flanneld.subnet.failover import ServerFailed
from tests.etcd_clients import opened, transport_to
from tests.lab.etcd_v3 import V3Keys
from tests.lab.wait import wait_for
from tests.local_etcd import (
    DEADLINE,
    DEBIANS,
    NEWER,
    LocalEtcd,
    Relay,
    Serve,
    answering,
    free_port,
    make_certificates,
    running_etcd,
    server,
)
from tests.unit.subnet.etcd.misbehaviour import check_watch_over_silence, complaint_about, each_of

#: What the CommonName of the certificate "client" is; a password is not needed to come with it.
USER, PASSWORD = "client", "not used"
CONFIG = '{"Network": "10.3.0.0/16"}'
QUICK = EtcdTimeouts(read=5, silence=0.5)
PATIENT = EtcdTimeouts(connect=30, read=30, silence=30)


def client(
    *endpoints: str, timeouts: EtcdTimeouts = QUICK, transport: str = "grpc", **options: Any
) -> V3Client:
    asker = V3Client(transport_to(*endpoints, timeouts=timeouts, transport=transport, **options))
    opened.callback(asker.cancel)
    return asker


@pytest.fixture
def no_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if grpcio were not installed."""
    monkeypatch.setitem(sys.modules, "grpc", None)


# ---- users whom a certificate names --------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    paths = {"certfile": "client.crt", "keyfile": "client.key", "cafile": "ca.crt"}
    return {name: str(folder / file) for name, file in paths.items()}


@pytest.fixture(scope="module", params=[DEBIANS, NEWER], ids=["debians", "newer"])
def guarded(request: pytest.FixtureRequest, certificates: dict[str, Any]) -> Iterator[LocalEtcd]:
    """An etcd whose user is the one named in our certificate."""
    folder = Path(certificates["cafile"]).parent
    with running_etcd("--bcrypt-cost=4", tls=folder, program=request.param) as etcd:
        keys = V3Keys(etcd.post)
        keys.put("/net/config", CONFIG)
        keys.require_login(USER, PASSWORD, "/net")
        yield etcd


def test_the_user_is_the_one_whom_the_certificate_names(
    guarded: LocalEtcd, certificates: dict[str, Any]
) -> None:
    asker = client(guarded.url, **certificates)
    made = asker.create("/net/subnets/a", "1", 60)
    assert made.node
    asker.replace("/net/subnets/a", "2", 60, made.node.modified)
    watcher = asker.watcher("/net/subnets", recursive=True, contact=lambda: None)
    (changed,) = wait_for(lambda: watcher.read(made.at).replies, DEADLINE, "the change")
    assert changed.node
    assert changed.node.value == "2"
    watcher.close()
    with pytest.raises(AccessRefused, match="refuses access"):
        asker.create("/elsewhere", "1", None)
    asker.remove("/net/subnets/a", changed.node.modified)


def test_a_password_counts_where_the_certificate_has_no_rights(
    guarded: LocalEtcd, certificates: dict[str, Any]
) -> None:
    asker = client(guarded.url, username="root", password=PASSWORD, timeouts=EtcdTimeouts(), **certificates)
    made = asker.create("/elsewhere", "1", None)
    asker.remove("/elsewhere", made.at.index)


def test_json_is_left_when_it_is_refused(
    guarded: LocalEtcd, certificates: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    manager = open_etcd(EtcdOptions((guarded.url,), "/net", **certificates), "auto", QUICK)
    events: list[Event] = []
    ended: list[BaseException] = []
    attrs = LeaseAttrs(IPv4Address("192.0.2.1"), backend_type="host-gw")

    def watch() -> None:
        try:
            manager.watch(events.extend, lambda: None)
        except BaseException as error:
            ended.append(error)

    config = manager.network_config()
    thread = threading.Thread(target=watch)
    thread.start()
    wait_for(lambda: events, DEADLINE, "the snapshot")
    lease = manager.acquire(config, attrs, (None, None))
    wait_for(lambda: events[1:], DEADLINE, "our own lease")
    manager.close()
    thread.join(DEADLINE)
    assert config == parse(CONFIG)
    assert isinstance(events[0], Snapshot)
    assert isinstance(events[1], Added)
    assert events[1].lease.key == lease.key
    assert [type(error) for error in ended] == [Cancelled]
    assert sum("Using gRPC for etcd" in message for message in caplog.messages) == 1


def test_json_that_was_asked_for_is_not_left(guarded: LocalEtcd, certificates: dict[str, Any]) -> None:
    with pytest.raises(GatewayRefused, match="common name"):
        client(guarded.url, transport="json", **certificates).fetch("/net/config")


@pytest.mark.usefixtures("no_grpc")
def test_fallback_to_missing_grpcio_names_its_package(
    guarded: LocalEtcd, certificates: dict[str, Any]
) -> None:
    with pytest.raises(GatewayRefused) as caught:
        client(guarded.url, transport="auto", **certificates).fetch("/net/config")
    assert "common name" in caught.value.problem
    assert "-m pip install 'flanneld[grpc]'" in caught.value.remedy


@pytest.mark.usefixtures("no_grpc")
def test_transport_grpc_without_grpcio_names_its_package() -> None:
    with pytest.raises(Fatal) as caught:
        client("http://127.0.0.1:1")
    assert "-m pip install 'flanneld[grpc]'" in caught.value.remedy


def test_a_gateway_that_is_switched_off_is_done_without() -> None:
    with running_etcd("--enable-grpc-gateway=false") as etcd:
        asker = client(etcd.url, transport="auto")
        made = asker.create("/without", "1", None)
        watcher = asker.watcher("/without", recursive=False, contact=lambda: None)
        assert watcher.read(Position(1, made.at.cluster)).replies
        watcher.close()


def test_an_outdated_login_is_renewed() -> None:
    with running_etcd("--bcrypt-cost=4") as etcd:
        V3Keys(etcd.post).require_login("flannel", "secret", "/net")
        asker = client(etcd.url, username="flannel", password="secret", timeouts=EtcdTimeouts())
        made = asker.create("/net/subnets/a", "1", None)
        etcd.stop()  # It keeps the logins in its memory.
        etcd.start()
        watcher = asker.watcher("/net/subnets", recursive=True, contact=lambda: None)
        assert len(watcher.read(Position(1, made.at.cluster)).replies) == 1
        watcher.close()
        asker.replace("/net/subnets/a", "2", None, made.at.index)


# ---- servers that are of no use ------------------------------------------------------------------


def http_only(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


MISBEHAVIOUR: dict[str, tuple[Serve, str]] = {
    "speaks HTTP": (http_only, "it does not speak gRPC"),
    "says something": (answering(b"\x15\x03\x01\x00\x02\x02\x28 what?\r\n\r\n"), "it does not speak gRPC"),
}


@each_of(MISBEHAVIOUR)
def test_a_server_that_is_of_no_use_is_named_and_the_next_one_asked(
    etcd: LocalEtcd, keys: V3Keys, serve: Serve, sentence: str
) -> None:
    keys.put("/failover", "yes")
    assert sentence in complaint_about(serve, etcd, client)


def test_a_server_that_is_down_is_named() -> None:
    with pytest.raises(Retryable, match="connection refused"):
        client(f"http://127.0.0.1:{free_port()}").fetch("/key")
    with pytest.raises(Retryable, match="cannot be resolved"):
        client("http://name.invalid:2379").fetch("/key")


def test_a_server_that_has_nothing_of_etcd_is_named(etcd: LocalEtcd) -> None:
    """By the path, which a server of gRPC takes for the name of a service."""
    with pytest.raises(NoSuchApi, match="v3 API over gRPC"):
        client(f"{etcd.url}/below").fetch("/key")


class Losing(Relay):
    """Can lose the next answer, whatever it is, and the connection with it."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.requests = ["/kv/txn"]


def test_a_write_whose_answer_is_lost_is_recognised_at_the_next_server(etcd: LocalEtcd, keys: V3Keys) -> None:
    losing = Losing(etcd.url)
    with server(losing) as url:
        asker = client(url, etcd.url)
        with pytest.raises(NotFound):
            asker.fetch("/lost")
        losing.answers_to_lose = 1
        made = asker.create("/lost", "mine", None)
    assert made.node
    assert losing.answers_to_lose == 0
    assert (keys.get("/lost") or {})["modifiedIndex"] == made.node.modified


# ---- watching ------------------------------------------------------------------------------------


def test_a_watch_goes_on_at_another_server_when_its_own_falls_silent(etcd: LocalEtcd, keys: V3Keys) -> None:
    check_watch_over_silence(etcd, keys, client)


def test_a_watch_can_be_cut(etcd: LocalEtcd) -> None:
    asker = client(etcd.url, timeouts=PATIENT)
    at = asker.fetch("/cut", recursive=True).at
    begun = threading.Event()
    watcher = asker.watcher("/cut", recursive=True, contact=begun.set)
    ended = in_thread(lambda: watcher.read(at))
    assert begun.wait(DEADLINE)
    watcher.cancel()
    assert [type(error) for error in ended()] == [Cancelled]
    with pytest.raises(Cancelled):
        watcher.read(at)


def test_no_connection_is_opened_once_it_is_cancelled() -> None:
    servers = Servers(EtcdOptions((f"http://127.0.0.1:{free_port()}",)))
    carrier = Grpc(servers, PATIENT)
    stream = carrier.stream()
    stream.cancel()
    with pytest.raises(ServerFailed, match="the connection was given up"):
        stream.open(servers.current, {}, "")


def in_thread(call: Callable[[], object]) -> Callable[[], list[BaseException]]:
    """Run it, and give what waits until it has ended and tells what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> list[BaseException]:
        thread.join(DEADLINE)
        assert not thread.is_alive()
        return raised

    return ended


def test_a_list_may_be_longer_than_grpc_takes_by_itself(etcd: LocalEtcd, keys: V3Keys) -> None:
    value = "x" * 1_000_000
    for number in range(5):
        keys.put(f"/long/{number}", value)
    found = client(etcd.url, timeouts=PATIENT).fetch("/long", recursive=True).children
    keys.delete("/long")
    assert [len(each.value) for each in found] == [1_000_000] * 5
