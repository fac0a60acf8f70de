"""The JSON gateway of etcd v3: its versions, logins, answers that get lost, and servers that misbehave."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from flanneld.errors import Cancelled, NoAnswer, Retryable
from flanneld.runtime import clock
from flanneld.subnet.etcd.keys import Conflict, KeyChanges, NoSuchApi, NotFound, Position
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.etcd.v3 import V3Client, V3Watcher
from flanneld.subnet.list_watch import RelistNeeded
from tests.etcd_clients import transport_to
from tests.lab.etcd_v3 import V3Keys
from tests.lab.impostor import http
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
    silent,
)
from tests.unit.subnet.etcd.misbehaviour import OF_HTTP, check_watch_over_silence, complaint_about, each_of

#: For servers that do not answer; etcd itself may take longer.
QUICK = EtcdTimeouts(connect=0.5, read=0.5)
LASTING = EtcdTimeouts(read=60, silence=0.3)
PATIENT = EtcdTimeouts(connect=600, read=600, silence=600)


def client(*endpoints: str, timeouts: EtcdTimeouts = LASTING, **options: str) -> V3Client:
    return V3Client(transport_to(*endpoints, timeouts=timeouts, **options))


def watch(asker: V3Client, key: str, *, recursive: bool = False) -> V3Watcher:
    return asker.watcher(key, recursive=recursive, contact=lambda: None)


HEADER = '"header": {"cluster_id": "1", "revision": "5"}'
NO_BASE64 = f'{{{HEADER}, "kvs": [{{"key": "=", "mod_revision": "1"}}]}}'
MISBEHAVIOUR: dict[str, tuple[Serve, str]] = {
    **OF_HTTP,
    "no leader": (answering(http("503 No", '{"error":"etcdserver: no leader","code":14}')), "no leader"),
    "timed out": (answering(http("504 No", '{"message":"etcdserver: too slow","code":4}')), "too slow"),
    "shuts down": (
        answering(http("408 No", '{"message":"grpc: the client connection is closing","code":1}')),
        "connection is closing",
    ),
    "no gateway": (answering(http("404 Not Found", "404 page not found\n")), "--enable-grpc-gateway"),
    "header of wrong type": (answering(http("200 OK", '{"header": [1]}')), "not etcd's"),
    "keys of wrong type": (answering(http("200 OK", f'{{{HEADER}, "kvs": [{{"key": 1}}]}}')), "not etcd's"),
    "no base64": (answering(http("200 OK", NO_BASE64)), "not etcd's"),
    "JSON list": (answering(http("200 OK", "[]")), "no JSON object"),
}


@each_of(MISBEHAVIOUR)
def test_a_server_that_is_of_no_use_is_named_and_the_next_one_asked(
    etcd: LocalEtcd, keys: V3Keys, serve: Serve, sentence: str
) -> None:
    keys.put("/failover", "yes")
    timeouts = QUICK if serve is silent else LASTING
    assert sentence in complaint_about(serve, etcd, partial(client, timeouts=timeouts))


@pytest.mark.parametrize(
    ("prefix", "root"),
    [
        ("/coreos.com/network", "/coreos.com/network"),
        ("//coreos.com//network/", "/coreos.com/network"),
        ("coreos.com/network", "coreos.com/network"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_a_prefix_is_taken_as_go_flanneld_takes_it(prefix: str, root: str) -> None:
    assert client("http://127.0.0.1:1").root(prefix) == root


# ---- versions and logins -------------------------------------------------------------------------


class OldVersion(Relay):
    """An etcd of an old version: its gateway is elsewhere."""

    def __init__(self, target: str, root: bytes) -> None:
        super().__init__(target)
        self._root = root

    def rewritten(self, data: bytes) -> bytes:
        hidden = data.replace(b"POST /v3", b"POST /nothing-here")
        return hidden.replace(b"POST /nothing-here" + self._root + b"/", b"POST /v3/")


@pytest.mark.parametrize("root", ["beta", "alpha"])
def test_older_versions_have_their_gateway_elsewhere(etcd: LocalEtcd, keys: V3Keys, root: str) -> None:
    relay = OldVersion(etcd.url, root.encode())
    with server(relay) as url:
        asker = client(url)
        made = asker.create(f"/old-{root}", "1", 3600)
        keys.put(f"/old-{root}", "2")
        watcher = watch(asker, f"/old-{root}")
        (changed,) = wait_for(lambda: watcher.read(made.at).replies, DEADLINE, "the change")
        relay.requests.clear()
        assert changed.node
        assert changed.node.value == "2"
        asker.remove(f"/old-{root}", changed.node.modified)
    assert relay.requests == [f"POST /v3{root}/kv/txn"]


both_versions = pytest.mark.parametrize("program", [DEBIANS, NEWER], ids=["debians", "newer"])


@both_versions
def test_a_gateway_that_is_switched_off_is_named(program: str) -> None:
    with (
        running_etcd("--enable-grpc-gateway=false", program=program) as etcd,
        pytest.raises(NoSuchApi) as caught,
    ):
        client(etcd.url, transport="json").fetch("/key")
    assert "--enable-grpc-gateway=true" in caught.value.remedy


@pytest.fixture(params=[DEBIANS, NEWER], ids=["debians", "newer"])
def guarded(request: pytest.FixtureRequest) -> Iterator[LocalEtcd]:
    with running_etcd("--bcrypt-cost=4", program=request.param) as etcd:
        V3Keys(etcd.post).require_login("flannel", "secret", "/net")
        yield etcd


def test_an_outdated_login_is_renewed_once(guarded: LocalEtcd) -> None:
    relay = Relay(guarded.url)
    with server(relay) as url:
        asker = client(url, username="flannel", password="secret", timeouts=LASTING)
        made = asker.create("/net/subnets/a", "1", None)
        for _ in range(3):
            asker.fetch("/net/subnets/a")
        assert len(relay.asked("/auth/authenticate")) == 1
        guarded.stop()  # It keeps the logins in its memory.
        guarded.start()
        watcher, at = watch(asker, "/net/subnets", recursive=True), Position(1, made.at.cluster)
        replies = wait_for(lambda: watcher.read(at).replies, DEADLINE, "the change")
        assert [each.node.value for each in replies if each.node] == ["1"]
        assert len(relay.asked("/auth/authenticate")) == 2


def test_server_that_ends_each_connection_at_the_login_is_left() -> None:
    asked = []

    def serve(sock: socket.socket) -> None:
        refusal = '{"error": "etcdserver: user name is empty", "code": 3}'
        request = b""
        while data := sock.recv(65536):
            request += data
            if not request.endswith(b"}"):
                continue
            asked.append(request.split()[1].decode())
            if "/auth/" in asked[-1]:
                break
            request = b""
            sock.sendall(http("400 Bad Request", refusal, "Content-Type: application/json"))

    with server(serve) as url, pytest.raises(NoAnswer, match="broke the connection"):
        client(url, username="flannel", password="secret").fetch("/key")
    assert asked == 2 * ["/v3/kv/range", "/v3/auth/authenticate"]


def test_a_watch_with_an_outdated_login_logs_in_again(guarded: LocalEtcd) -> None:
    asker = client(guarded.url, username="flannel", password="secret", timeouts=LASTING)
    made = asker.create("/net/subnets/a", "1", None)
    guarded.stop()
    guarded.start()
    asker._answered[guarded.url] = clock.now()  # as if it had been asked in between
    watcher, at = watch(asker, "/net/subnets", recursive=True), Position(1, made.at.cluster)
    assert len(wait_for(lambda: watcher.read(at).replies, DEADLINE, "the change")) == 1


def test_a_login_that_etcd_does_not_want_is_not_made(etcd: LocalEtcd) -> None:
    relay = Relay(etcd.url)
    with server(relay) as url, pytest.raises(NotFound):
        client(url, username="flannel", password="secret", timeouts=LASTING).fetch("/nothing")
    assert relay.requests == ["POST /v3/kv/range"]


@both_versions
def test_a_certificate_that_stands_in_the_way_of_a_login_is_named(tmp_path: Path, program: str) -> None:
    make_certificates(tmp_path)
    paths = {"certfile": "client.crt", "keyfile": "client.key", "cafile": "ca.crt"}
    files = {name: str(tmp_path / file) for name, file in paths.items()} | {"transport": "json"}
    with running_etcd("--bcrypt-cost=4", tls=tmp_path, program=program) as etcd:
        V3Keys(etcd.post).require_login("flannel", "secret", "/net")
        with pytest.raises(Retryable, match="common name"):
            client(etcd.url, username="flannel", password="secret", timeouts=LASTING, **files).fetch(
                "/net/config"
            )


# ---- writing -------------------------------------------------------------------------------------


def test_a_write_whose_answer_is_lost_is_recognised_at_the_next_server(etcd: LocalEtcd, keys: V3Keys) -> None:
    losing = Relay(etcd.url)
    with server(losing) as url:
        asker = client(url, etcd.url)
        losing.answers_to_lose = 2
        made = asker.create("/lost", "mine", 3600)
        assert made.node
        asker.servers.skip(asker.servers.current)
        losing.answers_to_lose = 2
        again = asker.replace("/lost", "mine, too", 3600, made.node.modified)
    stored = keys.get("/lost") or {}
    assert again.node
    assert (stored["value"], stored["modifiedIndex"]) == ("mine, too", again.node.modified)
    assert 3000 < stored["ttl"] <= 3600
    assert losing.answers_to_lose == 0


def test_loser_of_a_race_leaves_no_etcd_lease(etcd: LocalEtcd, keys: V3Keys) -> None:
    asker = client(etcd.url)
    made = asker.create("/race", "first", 3600)
    assert made.node
    before = sorted(keys.leases())
    with pytest.raises(Conflict):
        asker.create("/race", "second", 3600)
    with pytest.raises(Conflict):
        asker.replace("/race", "second", 3600, made.node.modified + 1)
    with pytest.raises(Conflict):
        asker.replace("/not-there", "second", 3600, made.node.modified)
    with pytest.raises(Conflict):
        asker.create("/race", "second", None)
    assert sorted(keys.leases()) == before
    assert (keys.get("/race") or {})["value"] == "first"


def test_forbidden_write_leaves_no_etcd_lease(guarded: LocalEtcd) -> None:
    relay = Relay(guarded.url)
    with server(relay) as url:
        asker = client(url, username="flannel", password="secret", timeouts=LASTING)
        with pytest.raises(Retryable, match="refuses access"):
            asker.create("/elsewhere", "1", 3600)
    assert len(relay.asked("/lease/grant")) == len(relay.asked("/kv/lease/revoke")) > 0


def test_only_the_write_that_is_still_there_is_kept_alive(etcd: LocalEtcd, keys: V3Keys) -> None:
    """A key from a backup, or of another's write, has another etcd lease than the one we know."""
    asker = client(etcd.url)
    created = asker.create("/alive", "1", 3600).node
    assert created is not None
    assert asker.prolong("/alive", created.modified) is not None
    for other in (created.modified - 1, created.modified + 1):
        assert asker.prolong("/alive", other) is None
    assert asker.prolong("/unknown", created.modified) is None
    keys.delete("/alive")


def test_a_key_without_a_lease_stays(etcd: LocalEtcd) -> None:
    asker = client(etcd.url)
    made = asker.create("/stays", "1", None)
    found = asker.fetch("/stays")
    assert made.node
    assert found.node
    assert (made.node.ttl, found.node.ttl) == (None, None)


# ---- watching ------------------------------------------------------------------------------------


def test_a_watch_goes_on_at_another_server_when_its_own_falls_silent(etcd: LocalEtcd, keys: V3Keys) -> None:
    check_watch_over_silence(etcd, keys, partial(client, timeouts=EtcdTimeouts(silence=0.3)))


def test_silence_costs_no_more_than_a_question_now_and_then(etcd: LocalEtcd) -> None:
    relay = Relay(etcd.url)
    with server(relay) as url:
        asker = client(url, timeouts=EtcdTimeouts(silence=0.3))
        at = asker.fetch("/dir", recursive=True).at
        watcher = watch(asker, "/dir", recursive=True)
        for _ in range(3):
            assert watcher.read(at).at == at
        watcher.close()
        assert relay.asked("/watch") == ["POST /v3/watch"]
        assert len(relay.asked("/kv/range")) == 4
        assert relay.connections == 2


@contextmanager
def watched(etcd: LocalEtcd, key: str, *, recursive: bool) -> Iterator[tuple[Relay, V3Watcher, Position]]:
    """A watch, whose silence is in order so far, the proxy before etcd, and from where it goes on."""
    relay = Relay(etcd.url)
    with server(relay) as url:
        asker = client(url)
        at = asker.fetch(key, recursive=recursive).at
        watcher = watch(asker, key, recursive=recursive)
        assert watcher.read(at).replies == ()
        yield relay, watcher, at
        watcher.close()


@pytest.mark.parametrize("change", ["put", "delete"])
@pytest.mark.parametrize(("key", "recursive"), [("/stall", True), ("/stall/a", False)])
def test_a_watch_that_stalls_behind_a_proxy_is_left(
    etcd: LocalEtcd, keys: V3Keys, key: str, recursive: bool, change: str
) -> None:
    keys.put("/stall/a", "1")
    with watched(etcd, key, recursive=recursive) as (relay, watcher, at):
        relay.stalled.add(relay.clients[1])
        if change == "put":
            keys.put("/stall/a", "2")
        else:
            keys.delete("/stall/a")
        wait_for(lambda: watcher.read(at).replies, DEADLINE, "the change")


@pytest.mark.parametrize(("key", "recursive", "watches"), [("/quiet", True, 2), ("/quiet/a", False, 1)])
def test_foreign_writes_do_not_restart_the_watch(
    etcd: LocalEtcd, keys: V3Keys, key: str, recursive: bool, watches: int
) -> None:
    keys.put("/quiet/a", "1")
    with watched(etcd, key, recursive=recursive) as (relay, watcher, at):
        for _ in range(3):
            keys.put("/others", "x")
            assert watcher.read(at) == KeyChanges((), at)
        assert watcher.read(at) == KeyChanges((), at)
        assert len(relay.asked("/watch")) == watches


def test_relist_leaves_a_watch_trusted_that_was_restarted_over_foreign_writes(
    etcd: LocalEtcd, keys: V3Keys
) -> None:
    keys.put("/trusted/a", "1")
    with watched(etcd, "/trusted", recursive=True) as (relay, watcher, at):
        keys.put("/others", "x")
        wait_for(lambda: watcher.read(at) and len(relay.asked("/watch")) == 2, DEADLINE, "the restart")
        again = watch(watcher.client, "/trusted", recursive=True)
        at = again.client.fetch("/trusted", recursive=True).at
        for _ in range(3):
            assert again.read(at) == KeyChanges((), at)
            keys.put("/others", "x")
        again.close()
        assert len(relay.asked("/watch")) == 3


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_events_that_come_with_the_begin_of_a_watch_are_read(scheme: str, tmp_path: Path) -> None:
    header = {"cluster_id": "1", "revision": "5"}
    event = {"kv": {"key": "L2E=", "value": "MQ==", "mod_revision": "6"}}
    begun = chunk({"result": {"header": header, "created": True}})
    told = chunk({"result": {"header": header | {"revision": "6"}, "events": [event]}})
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer(connection: socket.socket) -> None:
        while asked := connection.recv(65536):
            is_watch = b"/watch" in asked
            connection.sendall(
                head + begun + told if is_watch else http("200 OK", json.dumps({"header": header}))
            )

    serve = answer
    if scheme == "https":
        make_certificates(tmp_path)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")

        def serve(connection: socket.socket) -> None:
            with context.wrap_socket(connection, server_side=True) as encrypted:
                answer(encrypted)

    with server(serve) as url:
        files = {"cafile": str(tmp_path / "ca.crt")} if scheme == "https" else {}
        asker = client(url.replace("http:", f"{scheme}:"), timeouts=PATIENT, **files)
        watcher = watch(asker, "/a")
        changes: list[KeyChanges] = []
        thread = threading.Thread(target=lambda: changes.append(watcher.read(Position(5, "1"))), daemon=True)
        thread.start()
        thread.join(DEADLINE)
        watcher.cancel()
    assert [each.node.value for change in changes for each in change.replies if each.node] == ["1"]


@pytest.mark.parametrize("end", ["", "compacted"])
def test_changes_before_the_end_of_a_stream_are_told_first_and_in_order(end: str) -> None:
    header = {"cluster_id": "1", "revision": "5"}

    def told(revision: int) -> bytes:
        event = {"kv": {"key": "L2EvYg==", "value": "MQ==", "mod_revision": str(revision)}}
        return chunk({"result": {"header": header | {"revision": str(revision)}, "events": [event]}})

    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    stream += chunk({"result": {"header": header, "created": True}}) + told(6) + told(7)
    if end:
        stream += chunk({"result": {"header": header, "canceled": True, "compact_revision": "9"}})
    stream += b"0\r\n\r\n"

    def answer(connection: socket.socket) -> None:
        request = b""
        while data := connection.recv(65536):
            request += data
            if not request.endswith(b"}"):
                continue
            is_watch, request = b"/watch" in request, b""
            connection.sendall(stream if is_watch else http("200 OK", json.dumps({"header": header})))

    with server(answer) as url:
        watcher = watch(client(url, timeouts=PATIENT), "/a", recursive=True)
        changes = watcher.read(Position(5, "1"))
        assert [each.node.modified for each in changes.replies if each.node] == [6, 7]
        assert changes.at == Position(7, "1")
        with pytest.raises(RelistNeeded if end else NoAnswer):
            watcher.read(changes.at)


def chunk(message: object) -> bytes:
    """Return a message of a stream, as a chunk of HTTP."""
    line = f"{json.dumps(message)}\n"
    return f"{len(line):x}\r\n{line}\r\n".encode()


def test_a_thousand_keys_in_one_transaction_are_one_batch(etcd: LocalEtcd, keys: V3Keys) -> None:
    asker = client(etcd.url, timeouts=PATIENT)
    names = [f"/many/{number:04}" for number in range(1000)]
    for begin in range(0, 1000, 100):
        keys.put_all(dict.fromkeys(names[begin : begin + 100], "x" * 100))
    at = asker.fetch("/many", recursive=True).at
    watcher = watch(asker, "/many", recursive=True)
    keys.delete("/many")
    gone = watcher.read(at)
    watcher.close()
    assert [(each.action, each.node.key) for each in gone.replies if each.node] == [
        ("delete", name) for name in names
    ]
    assert gone.at.index == at.index + 1


def test_compacted_or_restored_history_calls_for_a_relist(etcd: LocalEtcd, keys: V3Keys) -> None:
    asker = client(etcd.url)
    at = asker.create("/forgotten", "1", None).at
    keys.delete("/forgotten")
    keys.compact()
    with pytest.raises(RelistNeeded, match="has compacted"):
        wait_for(lambda: watch(asker, "/forgotten").read(at).replies, DEADLINE)
    with pytest.raises(RelistNeeded, match="restored"):
        watch(asker, "/forgotten").read(Position(at.index + 1_000_000, at.cluster))
    with pytest.raises(RelistNeeded, match="cluster was replaced"):
        watch(asker, "/forgotten").read(Position(at.index, "beef"))


def test_keys_and_values_that_are_no_text_hurt_nobody(etcd: LocalEtcd, keys: V3Keys) -> None:
    asker = client(etcd.url)
    keys.put("/bytes/a", b"\xff\xfe")
    etcd.post("/kv/put", {"key": "L2J5dGVzL//+", "value": "AAE="})
    keys.put("/bytes/z", "text")
    found = asker.fetch("/bytes", recursive=True).children
    assert [each.value for each in found if each.key == "/bytes/z"] == ["text"]
    assert len(found) == 3


def half_an_answer(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200")
    silent(connection)


@pytest.mark.parametrize("serve", [silent, half_an_answer])
def test_a_watch_that_is_being_opened_can_be_cut(serve: Serve) -> None:
    asked = threading.Event()

    def stuck(connection: socket.socket) -> None:
        asked.set()
        serve(connection)

    with server(stuck) as url:
        asker = client(url, timeouts=PATIENT)
        asker._answered[url] = clock.now()  # as if it had been asked before
        watcher = watch(asker, "/cut")
        check_cut(watcher, asked.is_set)


def test_a_watch_over_tls_can_be_cut(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    paths = {"certfile": "client.crt", "keyfile": "client.key", "cafile": "ca.crt"}
    with running_etcd(tls=tmp_path) as etcd:
        files = {name: str(tmp_path / file) for name, file in paths.items()}
        begun = threading.Event()
        asker = client(etcd.url, timeouts=PATIENT, **files)
        watcher = asker.watcher("/cut", recursive=False, contact=begun.set)
        check_cut(watcher, begun.is_set, asker.fetch("/cut", recursive=True).at)


def check_cut(watcher: V3Watcher, is_stuck: Callable[[], bool], at: Position = Position(1, "1")) -> None:  # noqa: B008
    ended: list[BaseException] = []

    def run() -> None:
        try:
            watcher.read(at)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(is_stuck, DEADLINE, "the watch to be stuck")
    watcher.cancel()
    thread.join(DEADLINE)
    assert [type(error) for error in ended] == [Cancelled]


def test_tokens_show_nowhere(guarded: LocalEtcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asker = client(
        guarded.url,
        f"http://127.0.0.1:{free_port()}",
        username="flannel",
        password="secret",
        timeouts=LASTING,
    )
    asker.create("/net/subnets/a", "1", None)
    with pytest.raises(Retryable) as caught:
        asker.create("/elsewhere", "1", None)
    told = caplog.text + str(caught.value) + repr(asker)
    assert not [token for token in asker._tokens.values() if token in told]
    assert "secret" not in told
