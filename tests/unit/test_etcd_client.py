"""The transport to etcd: failover, time limits, cutting, TLS, credentials, and servers that are not etcd."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from flanneld.errors import Fatal, Retryable
from flanneld.subnet.etcd_answers import Conflict, ListAgain, NotFound, Position
from flanneld.subnet.etcd_client import Client, Timeouts
from flanneld.subnet.etcd_endpoints import EtcdOptions, Servers
from flanneld.subnet.line import Line, Unreachable
from flanneld.subnet.manager import Cancelled
from tests.lab.wait import wait_for
from tests.local_etcd import (
    DEADLINE,
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

PASSWORD = "hünter/2 secret"
QUICK = Timeouts(connect=0.5, read=0.5, poll=0.5)
PATIENT = Timeouts(connect=30, read=30, poll=30)


opened: list[Client] = []


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


def in_order(_: list[object]) -> None:
    """Leaves the servers as they are given."""


def client(*endpoints: str, **options: str) -> Client:
    return client_of(Servers(EtcdOptions(endpoints, **options), in_order))


def client_of(
    servers: Servers, timeouts: Timeouts = QUICK, contact: Callable[[], None] = lambda: None
) -> Client:
    opened.append(Client(servers, timeouts, contact))
    return opened[-1]


def patient_client(*endpoints: str) -> Client:
    return client_of(Servers(EtcdOptions(endpoints)), PATIENT)


def http(status: str, body: str, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", body]).encode()


def hang_up(connection: socket.socket) -> None:
    connection.recv(65536)


def partly(connection: socket.socket, then: Serve = silent) -> None:
    connection.recv(65536)
    connection.sendall(http("200 OK", "x" * 100)[:-50])
    then(connection)


@pytest.fixture(scope="module")
def etcd() -> Iterator[LocalEtcd]:
    with running_etcd() as etcd:
        yield etcd


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def tls_etcd(certificates: Path) -> Iterator[LocalEtcd]:
    with running_etcd(tls=certificates) as etcd:
        yield etcd


MISBEHAVIOUR: dict[str, tuple[Serve, str]] = {
    "html": (answering(http("200 OK", "<html>hello</html>", "Content-Type: text/html")), "text/html"),
    "not http": (answering(b"\x15\x03\x01\x00\x02\x02\x28 what?\r\n\r\n"), "does not speak HTTP"),
    "hangs up": (hang_up, "broke the connection"),
    "error": (answering(http("500 Oops", '{"message":"Raft","cause":"no leader"}')), "Raft: no leader"),
    "bad gateway": (answering(http("502 Bad Gateway", "<html>")), "HTTP 502"),
    "redirects": (answering(http("307 Away", "", "Location: http://u:pw@else/x")), "redirects to else"),
    "v2 API off": (answering(http("404 Not Found", "404 page not found\n")), "--enable-v2"),
    "foreign JSON": (answering(http("200 OK", '{"hello": "world"}')), "JSON that is not etcd's"),
    "JSON of wrong types": (answering(http("200 OK", '{"action": 1, "node": []}')), "not etcd's"),
    "JSON list": (answering(http("200 OK", "[]", "X-Etcd-Index: 5")), "no JSON object"),
    "too deep": (answering(http("200 OK", "[" * 100_000)), "no JSON object"),
    "absurd index": (answering(http("200 OK", "{}", f"X-Etcd-Index: {'9' * 9000}")), "not etcd's"),
    "cut short": (lambda connection: partly(connection, then=lambda _: None), "broke the connection"),
    "silent": (silent, "no answer within 0.5 s"),
}


@pytest.mark.parametrize(("serve", "sentence"), MISBEHAVIOUR.values(), ids=MISBEHAVIOUR.keys())
def test_a_server_that_is_of_no_use_is_named_with_what_is_wrong(serve: Serve, sentence: str) -> None:
    with server(serve) as url, pytest.raises(Retryable) as caught:
        client(url).fetch("/key")
    assert url in str(caught.value)
    assert sentence in str(caught.value)
    assert caught.value.remedy
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("serve", [serve for serve, _ in MISBEHAVIOUR.values()], ids=MISBEHAVIOUR.keys())
def test_the_next_server_is_asked_when_one_is_of_no_use(etcd: LocalEtcd, serve: Serve) -> None:
    etcd.put("/failover", "yes")
    with server(serve) as url:
        reply = client(url, etcd.url).fetch("/failover")
    assert reply.node
    assert reply.node.value == "yes"


def test_the_last_good_server_is_asked_first(etcd: LocalEtcd) -> None:
    etcd.put("/pinned", "yes")
    relay = Relay(etcd.url)
    first = Relay(etcd.url)
    with server(first) as first_url, server(relay) as relay_url:
        dead = f"http://127.0.0.1:{free_port()}"
        asker = client(dead, relay_url, first_url)
        for _ in range(3):
            asker.fetch("/pinned")
    assert len(relay.requests) == 3
    assert not first.requests


def test_what_one_client_learns_of_the_servers_the_others_know(etcd: LocalEtcd) -> None:
    etcd.put("/learnt", "yes")
    first, second = Relay(etcd.url), Relay(etcd.url)
    with server(first) as first_url, server(second) as second_url:
        servers = Servers(EtcdOptions((first_url, second_url)), in_order)
        asker = client_of(servers)
        asker.fetch("/learnt")
        servers.skip()
        asker.fetch("/learnt")
    assert (len(first.requests), len(second.requests)) == (1, 1)


def test_a_connection_that_was_idle_for_long_is_not_used_again(etcd: LocalEtcd) -> None:
    etcd.put("/idle", "yes")
    for idle, connections in ((60.0, 1), (0.0, 3)):
        relay = Relay(etcd.url)
        with server(relay) as url:
            asker = client_of(Servers(EtcdOptions((url,))), Timeouts(idle=idle))
            for _ in range(3):
                asker.fetch("/idle")
        assert relay.connections == connections


def test_when_all_servers_fail_each_is_named_with_its_reason() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with server(answering(http("500 Oops", "{}"))) as broken:
        asker = client(dead, broken)
        texts = set()
        for _ in range(3):
            with pytest.raises(Retryable) as caught:
                asker.fetch("/key")
            texts.add(str(caught.value))
    (text,) = texts
    assert f"{dead}: connection refused" in text
    assert f"{broken}: HTTP 500" in text


def test_servers_that_were_all_down_are_found_when_they_are_back() -> None:
    with running_etcd() as etcd:
        etcd.put("/key", "yes")
        etcd.stop()
        asker = client(f"http://127.0.0.1:{free_port()}", etcd.url)
        with pytest.raises(Retryable):
            asker.fetch("/key")
        etcd.start()
        assert asker.fetch("/key").node


def test_a_create_that_may_have_happened_is_not_sent_to_another_server(etcd: LocalEtcd) -> None:
    losing, second = Relay(etcd.url), Relay(etcd.url)
    losing.answers_to_lose = 1
    with server(losing) as losing_url, server(second) as second_url:
        asker = client(losing_url, second_url)
        with pytest.raises(Retryable):
            asker.create("/one-shot", "mine", 60)
        assert not second.requests
        with pytest.raises(Conflict):
            asker.create("/one-shot", "mine", 60)
    assert second.requests, "the server that failed should not be the first again"


def test_a_create_goes_to_the_next_server_when_the_first_cannot_be_reached(etcd: LocalEtcd) -> None:
    reply = client(f"http://127.0.0.1:{free_port()}", etcd.url).create("/second-choice", "mine", 60)
    assert reply.action == "create"


def test_what_etcd_refuses_is_told_apart(etcd: LocalEtcd) -> None:
    asker = client(etcd.url)
    made = asker.create("/told", "1", None)
    assert made.node
    with pytest.raises(Conflict):
        asker.create("/told", "2", None)
    with pytest.raises(Conflict):
        asker.replace("/told", "2", None, made.node.modified + 1)
    with pytest.raises(Conflict):
        asker.replace("/not-there", "2", None, 1)
    with pytest.raises(NotFound) as missing:
        asker.fetch("/not-there")
    assert missing.value.at == made.at
    etcd.ask("PUT", "/v2/keys/told-dir", {"dir": "true"})
    with pytest.raises(Retryable, match="Not a file"):
        asker.replace("/told-dir", "x", None, 1)


def test_a_poll_without_news_tells_how_far_it_has_looked(etcd: LocalEtcd) -> None:
    asker = client(etcd.url)
    before = asker.create("/looked", "1", None).at
    last = etcd.put("/elsewhere", "x")
    reply = asker.wait("/looked", before, recursive=False)
    assert reply.node is None
    assert reply.at == Position(last, before.cluster)


def test_a_watch_from_a_time_that_etcd_has_not_reached_is_not_silent(etcd: LocalEtcd) -> None:
    at = client(etcd.url).create("/restored", "1", None).at
    with pytest.raises(ListAgain, match="restored"):
        client(etcd.url).wait("/restored", Position(at.index + 1000, at.cluster), recursive=False)
    with pytest.raises(ListAgain, match="another cluster"):
        client(etcd.url).wait("/restored", Position(at.index, "beef"), recursive=False)


def test_an_event_that_is_older_than_asked_for_is_not_taken() -> None:
    event = {"action": "set", "node": {"key": "/k", "value": "v", "modifiedIndex": 5}}
    stuck = answering(http("200 OK", json.dumps(event), "X-Etcd-Index: 9"))
    with server(stuck) as url, pytest.raises(ListAgain, match="repeats"):
        client(url).wait("/k", Position(7), recursive=False)


def test_a_server_that_falls_silent_is_noticed_at_the_next_poll(etcd: LocalEtcd) -> None:
    at = client(etcd.url).create("/silent", "1", None).at
    with server(silent) as url, pytest.raises(Retryable, match="no answer within"):
        client(url).wait("/silent", at, recursive=False)


# ---- cutting -------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """A server to which no connection can be made: the kernel has no room for another."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def assert_cut(request: Callable[[], object], cut: Callable[[], None], is_stuck: Callable[[], bool]) -> None:
    ended: list[BaseException] = []

    def run() -> None:
        try:
            request()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(is_stuck, DEADLINE, "the request to be stuck")
    assert not ended
    begin = time.monotonic()
    cut()
    thread.join(DEADLINE)
    assert time.monotonic() - begin < 0.5
    assert [type(error) for error in ended] == [Cancelled]
    with pytest.raises(Cancelled):
        request()


@pytest.mark.parametrize(("serve", "scheme"), [(silent, "http"), (partly, "http"), (silent, "https")])
def test_a_request_without_an_answer_can_be_cut(serve: Serve, scheme: str) -> None:
    stuck = threading.Event()

    def serve_stuck(connection: socket.socket) -> None:
        stuck.set()
        serve(connection)

    with server(serve_stuck) as url:
        asker = patient_client(url.replace("http", scheme))
        assert_cut(lambda: asker.fetch("/key"), asker.cut, stuck.is_set)


def test_a_connection_that_is_being_made_can_be_cut() -> None:
    with full_backlog() as url:
        asker = patient_client(url)
        port = int(url.rpartition(":")[2])
        assert_cut(lambda: asker.fetch("/key"), asker.cut, lambda: syn_sent_to(port) > 0)


def syn_sent_to(port: int) -> int:
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return sum(line.split()[2] == f"0100007F:{port:04X}" and line.split()[3] == "02" for line in lines)


def test_the_lookup_of_a_name_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, over = threading.Event(), threading.Event()
    real = socket.getaddrinfo

    def slow(host: bytes, *args: int, **kwargs: int) -> object:
        if kwargs.get("flags"):
            return real(host, *args, **kwargs)
        asked.set()
        over.wait(DEADLINE)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asker = patient_client("http://etcd.example.com:2379")
    assert_cut(lambda: asker.fetch("/key"), asker.cut, asked.is_set)
    over.set()


def test_a_name_without_an_address_is_told() -> None:
    with pytest.raises(Unreachable, match="resolved"):
        Line().connect("etcd.invalid", 2379, DEADLINE)


def test_names_are_looked_up(etcd: LocalEtcd) -> None:
    with pytest.raises(NotFound):
        client(etcd.url.replace("127.0.0.1", "localhost")).fetch("/not-there-either")


# ---- TLS and credentials -------------------------------------------------------------------------


def files(folder: Path, name: str, ca: str = "ca") -> dict[str, str]:
    paths = {"certfile": f"{name}.crt", "keyfile": f"{name}.key", "cafile": f"{ca}.crt"}
    return {option: str(folder / file) for option, file in paths.items()}


def test_a_client_certificate_opens_the_door(tls_etcd: LocalEtcd, certificates: Path) -> None:
    asker = client(tls_etcd.url, **files(certificates, "client"))
    made = asker.create("/tls", "1", None)
    tls_etcd.put("/tls", "2")
    changed = asker.wait("/tls", made.at, recursive=False)
    assert changed.node
    assert changed.node.value == "2"


def test_a_poll_over_tls_can_be_cut(tls_etcd: LocalEtcd, certificates: Path) -> None:
    contact = threading.Event()
    servers = Servers(EtcdOptions((tls_etcd.url,), **files(certificates, "client")))
    asker = client_of(servers, PATIENT, contact.set)
    with pytest.raises(NotFound) as missing:
        asker.fetch("/cut")
    contact.clear()
    assert_cut(lambda: asker.wait("/cut", missing.value.at, recursive=False), asker.cut, contact.is_set)


def test_what_is_wrong_with_tls_is_said(tls_etcd: LocalEtcd, etcd: LocalEtcd, certificates: Path) -> None:
    foreign = files(certificates, "client", ca="other")
    with pytest.raises(Retryable, match=r"certificate verify failed.*-etcd-cafile"):
        client(tls_etcd.url, **foreign).fetch("/key")
    with pytest.raises(Retryable, match=r"broke the TLS connection.*-etcd-certfile"):
        client(tls_etcd.url, **files(certificates, "other")).fetch("/key")
    with pytest.raises(Retryable, match=r"HTTP 400|broke"):
        client(tls_etcd.url.replace("https", "http")).fetch("/key")
    with pytest.raises(Retryable, match="https"):
        client(etcd.url.replace("http", "https"), **files(certificates, "client")).fetch("/key")


def test_tls_files_that_cannot_be_used_are_named(certificates: Path, tmp_path: Path) -> None:
    good = files(certificates, "client")
    garbage = tmp_path / "garbage"
    garbage.write_text("no certificate")
    locked = tmp_path / "locked.key"
    encrypt = ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", good["keyfile"], "-out", str(locked)]
    subprocess.run(encrypt, check=True, capture_output=True)
    wrong = {
        "no such file": good | {"cafile": str(tmp_path / "missing")},
        "garbage": good | {"cafile": str(garbage)},
        "garbage ": good | {"certfile": str(garbage)},
        "directory": good | {"keyfile": str(tmp_path)},
        "other.key": good | {"keyfile": str(certificates / "other.key")},
        "encrypted": good | {"keyfile": str(locked)},
        "set both": good | {"keyfile": ""},
    }
    for sentence, options in wrong.items():
        with pytest.raises(Fatal) as caught:
            client("https://127.0.0.1:1", **options)
        assert sentence.strip() in str(caught.value).lower()
        assert caught.value.remedy


@pytest.fixture(scope="module")
def guarded_etcd() -> Iterator[LocalEtcd]:
    """An etcd that lets in root and the user flannel only."""
    root = {"user": "root", "password": PASSWORD}
    with running_etcd() as etcd:
        rights = {"kv": {"read": ["/*"], "write": ["/open/*"]}}
        etcd.ask("PUT", "/v2/auth/users/root", json.dumps(root))
        etcd.ask("PUT", "/v2/auth/roles/net", json.dumps({"role": "net", "permissions": rights}))
        user = {"user": "flännel", "password": PASSWORD, "roles": ["net"]}
        etcd.ask("PUT", "/v2/auth/users/fl%C3%A4nnel", json.dumps(user))
        etcd.ask("PUT", "/v2/auth/enable", "{}")
        etcd.ask("DELETE", "/v2/auth/roles/guest", "{}", user=f"root:{PASSWORD}")
        yield etcd


def test_a_user_with_a_password_is_let_in(guarded_etcd: LocalEtcd) -> None:
    asker = client(guarded_etcd.url, username="flännel", password=PASSWORD)
    assert asker.create("/open/door", "1", None).action == "create"
    with pytest.raises(Retryable, match="refuses access"):
        asker.create("/closed", "1", None)
    with_url = guarded_etcd.url.replace("//", f"//fl%C3%A4nnel:{quote(PASSWORD, safe='')}@")
    assert client(with_url).fetch("/open/door").node


def test_a_password_shows_nowhere(guarded_etcd: LocalEtcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    quoted = quote(PASSWORD, safe="")
    url = guarded_etcd.url.replace("//", f"//eve:{quoted}@")
    shown = []
    wrong = [
        EtcdOptions((url,)),
        EtcdOptions((guarded_etcd.url,), username="eve", password=PASSWORD),
        EtcdOptions((f"http://eve:{quoted}@127.0.0.1:{free_port()}",)),
        EtcdOptions((f"http://eve:{quoted}@127.0.0.1:99999",)),
        EtcdOptions((f"http://eve:{quoted}@host", "https://other")),
    ]
    for options in wrong:
        with pytest.raises((Retryable, Fatal)) as caught:
            client_of(Servers(options)).fetch("/key")
        shown.append(str(caught.value))
    options = EtcdOptions((url,), username="eve", password=PASSWORD)
    shown += [repr(options), Servers(options).name, *(repr(each) for each in Servers(options).in_turn())]
    assert "refuses access" in shown[0]
    told = "\n".join([*shown, caplog.text])
    for secret in (PASSWORD, quoted, b64encode(f"eve:{PASSWORD}".encode()).decode()):
        assert secret not in told


# ---- endpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "sentence"),
    [
        ((), "empty"),
        (("",), "element 1"),
        (("http://a", "127.0.0.1:2379"), "element 2"),
        (("http://a", "https://b"), "mixes"),
        (("ftp://a",), "element 1"),
        (("http://[::1",), "element 1"),
    ],
)
def test_endpoints_that_cannot_be_used_are_fatal(endpoints: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(Fatal, match=sentence):
        client(*endpoints)


def test_an_endpoint_may_lie_below_a_path(etcd: LocalEtcd) -> None:
    with server(Relay(etcd.url)) as url, pytest.raises(Retryable, match="no v2 API"):
        client(f"{url}/below/").fetch("/key")


def test_servers_are_shuffled_and_keep_their_names() -> None:
    given = tuple(f"http://10.0.0.{number}:2379" for number in range(20))
    orders = {tuple(each.name for each in Servers(EtcdOptions(given)).in_turn()) for _ in range(5)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(given)}
