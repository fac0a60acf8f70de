"""The transport to etcd: failover, time limits, cutting, and servers that are not etcd."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from flanneld.errors import Cancelled, Retryable
from flanneld.runtime.sockets.interruptible import InterruptibleSocket, Unreachable
from flanneld.subnet.etcd.keys import Conflict, NotFound, Position
from flanneld.subnet.etcd.transport import EtcdTimeouts
from flanneld.subnet.etcd.v2 import V2Client, V2Watcher
from flanneld.subnet.list_watch import RelistNeeded
from tests.etcd_clients import transport_to
from tests.lab.impostor import http
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
from tests.unit.subnet.etcd.misbehaviour import OF_HTTP, complaint_about, each_of

#: For servers that do not answer; etcd itself may take longer.
QUICK = EtcdTimeouts(connect=0.5, read=0.5)
LASTING = EtcdTimeouts(read=60, poll=0.5)
PATIENT = EtcdTimeouts(connect=600, read=600, poll=600)


def client(*endpoints: str, timeouts: EtcdTimeouts = LASTING) -> V2Client:
    return V2Client(transport_to(*endpoints, timeouts=timeouts))


KEY = '{"action": "get", "node": {"key": "/key", "value": "", "modifiedIndex": 3, "createdIndex": 3}}'
MISBEHAVIOUR: dict[str, tuple[Serve, str]] = {
    **OF_HTTP,
    "error": (answering(http("500 Oops", '{"message":"Raft","cause":"no leader"}')), "Raft: no leader"),
    "v2 API off": (answering(http("404 Not Found", "404 page not found\n")), "--enable-v2"),
    "JSON of wrong types": (answering(http("200 OK", '{"action": 1, "node": []}')), "not etcd's"),
    "JSON list": (answering(http("200 OK", "[]", "X-Etcd-Index: 5")), "no JSON object"),
    "no index": (answering(http("200 OK", KEY)), "not etcd's"),
    "negative index": (answering(http("200 OK", KEY, "X-Etcd-Index: -5")), "not etcd's"),
    "absurd index": (answering(http("200 OK", KEY, f"X-Etcd-Index: {'9' * 20}")), "not etcd's"),
}


@pytest.mark.parametrize(
    ("answer", "is_contact"),
    [
        (http("200 OK", "{}", "X-Etcd-Index: 5"), True),
        (http("404 Not Found", '{"errorCode": 100}', "X-Etcd-Index: 5"), True),
        (http("200 OK", "{}"), False),
        (http("500 Oops", '{"errorCode": 300}', "X-Etcd-Index: 5"), False),
    ],
)
def test_only_an_answer_of_an_etcd_that_works_counts_as_contact(answer: bytes, is_contact: bool) -> None:
    begun = threading.Event()
    with server(answering(answer)) as url, contextlib.suppress(Retryable, NotFound):
        V2Client(transport_to(url, timeouts=LASTING), begun.set).fetch("/key")
    assert begun.is_set() is is_contact


def test_index_of_an_answer_may_have_19_digits() -> None:
    with server(answering(http("200 OK", KEY, f"X-Etcd-Index: {'9' * 19}"))) as url:
        assert client(url).fetch("/key").at.index == int("9" * 19)


@each_of(MISBEHAVIOUR)
def test_a_server_that_is_of_no_use_is_named_and_the_next_one_asked(
    etcd: LocalEtcd, serve: Serve, sentence: str
) -> None:
    etcd.put("/failover", "yes")
    timeouts = QUICK if serve is silent else LASTING
    assert sentence in complaint_about(serve, etcd, partial(client, timeouts=timeouts))


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


def test_clients_share_their_knowledge_of_the_servers(etcd: LocalEtcd) -> None:
    etcd.put("/learnt", "yes")
    first, second = Relay(etcd.url), Relay(etcd.url)
    with server(first) as first_url, server(second) as second_url:
        transport = transport_to(first_url, second_url, timeouts=LASTING)
        asker = V2Client(transport)
        asker.fetch("/learnt")
        transport.servers.skip(transport.servers.current)
        asker.fetch("/learnt")
    assert (len(first.requests), len(second.requests)) == (1, 1)


def test_a_connection_that_was_idle_for_long_is_not_used_again(etcd: LocalEtcd) -> None:
    etcd.put("/idle", "yes")
    for idle, connections in ((60.0, 1), (0.0, 3)):
        relay = Relay(etcd.url)
        with server(relay) as url:
            asker = client(url, timeouts=EtcdTimeouts(read=60, idle=idle))
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


def test_refusals_of_etcd_are_told_apart(etcd: LocalEtcd) -> None:
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


@pytest.fixture(params=[True, False], ids=["stream", "poll"])
def is_stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_watch_without_news_tells_how_far_it_has_looked(etcd: LocalEtcd, is_stream: bool) -> None:
    asker = client(etcd.url)
    etcd.put("/looked", "1")
    before = asker.fetch("/looked").at
    last = etcd.put("/elsewhere", "x")
    found = asker.changes("/looked", before, recursive=False, is_stream=is_stream)
    assert found == ([], Position(last, before.cluster))


def test_a_watch_from_a_time_that_etcd_has_not_reached_is_not_silent(
    etcd: LocalEtcd, is_stream: bool
) -> None:
    etcd.put("/restored", "1")
    at = client(etcd.url).fetch("/restored").at
    for after, reason in (
        (Position(at.index + 1000, at.cluster), "restored"),
        (Position(at.index, "beef"), "cluster was replaced"),
    ):
        with pytest.raises(RelistNeeded, match=reason):
            client(etcd.url).changes("/restored", after, recursive=False, is_stream=is_stream)


def test_an_event_that_is_older_than_asked_for_is_not_taken(is_stream: bool) -> None:
    event = {"action": "set", "node": {"key": "/k", "value": "v", "modifiedIndex": 5}}
    stuck = answering(http("200 OK", json.dumps(event), "X-Etcd-Index: 9"))
    with server(stuck) as url, pytest.raises(RelistNeeded, match="repeats"):
        client(url).changes("/k", Position(7), recursive=False, is_stream=is_stream)


def test_a_server_that_falls_silent_is_noticed_at_the_next_request(etcd: LocalEtcd, is_stream: bool) -> None:
    etcd.put("/silent", "1")
    at = client(etcd.url).fetch("/silent").at
    with server(silent) as url, pytest.raises(Retryable, match="no answer within"):
        client(url, timeouts=QUICK).changes("/silent", at, recursive=False, is_stream=is_stream)


class CutOff(Relay):
    """A member that has lost the others: it takes polls, and cannot say what the majority knows."""

    def rewritten(self, data: bytes) -> bytes:
        return b"" if b"quorum=true" in data else data


@pytest.mark.parametrize("recursive", [True, False])
def test_a_member_without_the_others_is_not_taken_for_one_without_news(
    etcd: LocalEtcd, recursive: bool
) -> None:
    etcd.put("/cut-off/lease", "1")
    at = client(etcd.url).fetch("/cut-off/lease").at
    key = "/cut-off" if recursive else "/cut-off/lease"

    def watch(*urls: str) -> V2Watcher:
        return V2Watcher(client(*urls, timeouts=replace(LASTING, read=3.0)), key, recursive=recursive)

    with server(CutOff(etcd.url)) as lonely:
        with pytest.raises(Retryable, match="no answer within"):
            watch(lonely).read(at)
        relay = Relay(etcd.url)
        with server(relay) as other:
            poller = watch(lonely, other)
            assert poller.read(at).replies == ()
            assert len(relay.asked("wait=true")) == 0
            assert poller.read(at).replies == ()
            assert len(relay.asked("wait=true")) == 1


# ---- streams -------------------------------------------------------------------------------------


class Follower:
    """A watch of a directory, and the indexes of all changes that it has read."""

    def __init__(self, etcd: LocalEtcd, url: str, directory: str, at: Position, **options: str) -> None:
        self.etcd = etcd
        self.directory = directory
        #: How many requests etcd has begun to answer.
        self.begun = 0
        asker = V2Client(transport_to(url, timeouts=PATIENT, **options), self._count)
        self.watcher = V2Watcher(asker, directory, recursive=True)
        self.at = at
        self.seen: list[int] = []
        self.reads = 0

    def _count(self) -> None:
        self.begun += 1

    def put(self) -> int:
        return self.etcd.put(f"{self.directory}/key", "x")

    def read_while_waiting(self, times: int) -> None:
        """Let so many changes happen once etcd watches, and read them."""
        begun = self.begun

        def act() -> None:
            wait_for(lambda: self.begun > begun, DEADLINE, "a request")
            for _ in range(times):
                self.put()

        with ThreadPoolExecutor(1) as writer:
            done = writer.submit(act)
            self.read_up_to(self.at.index + times)
            done.result(DEADLINE)

    def read_up_to(self, last: int) -> None:
        """Read until the change with that index is there. Raises what reading raises."""
        with ThreadPoolExecutor(1) as reader:
            try:
                reader.submit(self._read_up_to, last).result(DEADLINE)
            except TimeoutError:
                self.watcher.cancel()
                raise

    def _read_up_to(self, last: int) -> None:
        while self.at.index < last:
            changes = self.watcher.read(self.at)
            self.reads += 1
            self.seen += [reply.node.modified for reply in changes.replies if reply.node]
            self.at = changes.at


@pytest.fixture
def relay(etcd: LocalEtcd) -> Relay:
    return Relay(etcd.url)


@pytest.fixture
def follower(etcd: LocalEtcd, relay: Relay, request: pytest.FixtureRequest) -> Iterator[Follower]:
    directory = f"/followed-{request.node.name}"
    at = Position(etcd.put(f"{directory}/key", "x"), client(etcd.url).fetch(directory).at.cluster)
    with server(relay) as url:
        yield Follower(etcd, url, directory, at)


def test_one_request_brings_all_changes(follower: Follower, relay: Relay) -> None:
    follower.read_while_waiting(20)
    assert len(follower.seen) == 20
    assert len(relay.asked("wait=true")) == 1


def test_changes_of_the_history_are_read_before_those_to_come(follower: Follower, relay: Relay) -> None:
    past = [follower.put() for _ in range(3)]
    follower.read_up_to(past[-1])
    assert follower.reads == 1
    follower.read_while_waiting(5)
    assert follower.seen == list(range(past[0], past[-1] + 6))
    assert len(relay.asked("wait=true")) == 4
    assert len(relay.asked("stream=true")) == 2


def test_changes_of_other_keys_hold_nothing_back(follower: Follower) -> None:
    last = follower.put()
    follower.etcd.put("/unrelated", "x")
    follower.read_up_to(last)
    assert follower.seen == [last]
    follower.read_while_waiting(1)
    assert len(follower.seen) == 2


class WithoutBodies(Relay):
    """Passes on no body of a poll, as when it is late."""

    def _pass_back(self, etcd: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := etcd.recv(65536):
                head, end, _ = data.partition(b"\r\n\r\n")
                is_poll = "wait=true" in self.requests[-1] and "stream=true" not in self.requests[-1]
                client.sendall(head + end if is_poll else data)


def test_a_change_that_comes_late_is_not_lost(etcd: LocalEtcd) -> None:
    at = Position(etcd.put("/late/key", "x"), client(etcd.url).fetch("/late").at.cluster)
    relay = WithoutBodies(etcd.url)
    with server(relay) as url:
        follower = Follower(etcd, url, "/late", at)
        told = [follower.put() for _ in range(3)]
        follower.read_up_to(told[-1])
    assert follower.seen == told
    assert any("stream=true" not in request for request in relay.asked("wait=true"))


def test_changes_come_over_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    with running_etcd(tls=tmp_path) as etcd:
        options = certificates(tmp_path)
        etcd.put("/over-tls/key", "x")
        at = V2Client(transport_to(etcd.url, timeouts=PATIENT, **options)).fetch("/over-tls").at
        follower = Follower(etcd, etcd.url, "/over-tls", at, **options)
        follower.read_while_waiting(20)
        follower.watcher.close()
    assert len(follower.seen) == 20
    assert follower.begun == 1


#: Bytes of a value: some hundred fill all buffers between etcd and a client that does not read.
LARGE = 65536


def test_a_stream_that_etcd_has_dropped_misses_nothing(follower: Follower, relay: Relay) -> None:
    follower.read_while_waiting(1)
    first = follower.at.index + 1
    follower.etcd.put_often(f"{follower.directory}/key", 400, "x" * LARGE)
    assert len(relay.asked("wait=true")) == 1
    follower.read_up_to(first + 399)
    assert follower.seen[-400:] == list(range(first, first + 400))
    assert any("stream=true" not in request for request in relay.asked("wait=true")), "it was not dropped"


def test_a_dropped_stream_whose_history_is_gone_calls_for_a_list(follower: Follower) -> None:
    follower.read_while_waiting(1)
    follower.etcd.put_often(f"{follower.directory}/key", 400, "x" * LARGE)
    follower.etcd.put_often("/unrelated", 1100)
    with pytest.raises(RelistNeeded, match="compacted"):
        follower.read_up_to(follower.at.index + 400)


# ---- cutting -------------------------------------------------------------------------------------


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
    cut()
    thread.join(DEADLINE)
    assert [type(error) for error in ended] == [Cancelled]
    with pytest.raises(Cancelled):
        request()


def test_a_name_without_an_address_is_told() -> None:
    too_long_to_be_asked_for = "x" * 64
    with pytest.raises(Unreachable, match="cannot be resolved"):
        InterruptibleSocket().connect(too_long_to_be_asked_for, 2379, DEADLINE)


def test_names_are_looked_up(etcd: LocalEtcd) -> None:
    with pytest.raises(NotFound):
        client(etcd.url.replace("127.0.0.1", "localhost")).fetch("/not-there-either")


def certificates(folder: Path) -> dict[str, str]:
    """The options for what ``make_certificates`` has made."""
    paths = {"certfile": "client.crt", "keyfile": "client.key", "cafile": "ca.crt"}
    return {name: str(folder / file) for name, file in paths.items()}


def test_a_watch_over_tls_can_be_cut(tmp_path: Path, is_stream: bool) -> None:
    make_certificates(tmp_path)
    contact = threading.Event()
    with running_etcd(tls=tmp_path) as etcd:
        transport = transport_to(etcd.url, timeouts=PATIENT, **certificates(tmp_path))
        asker = V2Client(transport, contact.set)
        with pytest.raises(NotFound) as missing:
            asker.fetch("/cut")
        contact.clear()
        at = missing.value.at
        assert_cut(
            lambda: asker.changes("/cut", at, recursive=False, is_stream=is_stream),
            asker.cancel,
            contact.is_set,
        )
