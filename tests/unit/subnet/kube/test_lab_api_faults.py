"""The faults that a test can order of the lab's API server do what they say."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.lab.kube_api.faults import UNANSWERED, End, Fault
from tests.lab.kube_api.server import Connection
from tests.lab.kube_api.watch import Watch
from tests.lab.wait import wait_for
from tests.local_kube import (
    DEADLINE,
    LocalKube,
    ask,
    connected,
    parse_reply,
    read_all,
    request_bytes,
    running_kube,
)

NODES = "/api/v1/nodes"
WATCH = f"{NODES}?watch=true&timeoutSeconds=30"
PATCH = {"Content-Type": "application/strategic-merge-patch+json"}


@pytest.fixture
def kube() -> Iterator[LocalKube]:
    with running_kube() as kube:
        kube.control.put_node("n1", "10.5.1.0/24", annotations={"word": "Zürich"})
        yield kube


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "Unauthorized"),
        (403, "Forbidden"),
        (409, "Conflict"),
        (410, "Expired"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ],
)
def test_a_status_can_be_ordered_for_a_number_of_requests(kube: LocalKube, status: int, reason: str) -> None:
    kube.control.add_fault(Fault("list", "nodes", times=2, status=status))
    assert ask(kube, "GET", f"{NODES}/n1").status == 200
    for _ in range(2):
        reply = ask(kube, "GET", NODES)
        assert (reply.status, reply.json()["kind"], reply.json()["code"]) == (status, "Status", status)
        assert reply.json()["reason"] == reason
    assert ask(kube, "GET", NODES).status == 200


def test_a_client_can_be_told_when_to_come_again(kube: LocalKube) -> None:
    kube.control.add_fault(Fault(status=429, retry_after=7))
    reply = ask(kube, "GET", NODES)
    assert reply.headers["Retry-After"] == "7"
    assert reply.json()["details"] == {"retryAfterSeconds": 7}


def test_an_answer_can_be_of_a_proxy_that_knows_no_kubernetes(kube: LocalKube) -> None:
    kube.control.add_fault(Fault(status=502, body="<html>bad gateway</html>"))
    reply = ask(kube, "GET", NODES)
    assert (reply.status, reply.body) == (502, b"<html>bad gateway</html>")
    assert reply.headers["Content-Type"] == "text/plain"


def test_faults_last_until_they_are_cleared(kube: LocalKube) -> None:
    kube.control.add_fault(Fault(times=0, status=500))
    assert [ask(kube, "GET", NODES).status for _ in range(3)] == [500] * 3
    kube.control.clear_faults()
    assert ask(kube, "GET", NODES).status == 200


def test_patch_persists_when_its_answer_is_lost(kube: LocalKube) -> None:
    kube.control.add_fault(Fault("patch", cut=UNANSWERED))
    with connected(kube) as sock:
        body = json.dumps({"metadata": {"annotations": {"a": "b"}}})
        sock.sendall(request_bytes("PATCH", f"{NODES}/n1/status", body, PATCH))
        assert read_all(sock) == b""
    assert kube.control.annotations("n1")["a"] == "b"


@pytest.mark.parametrize("cut", [0, 1, 100, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("then", ["close", "reset", "end"])
def test_a_long_answer_breaks_off_after_so_many_bytes(kube: LocalKube, cut: int, then: End) -> None:
    for number in range(20):
        kube.control.put_node(f"more-{number}", "10.5.9.0/24")
    whole = ask(kube, "GET", NODES)
    assert whole.chunks
    kube.control.add_fault(Fault("list", cut=cut, then=then))
    reply = ask(kube, "GET", NODES)
    assert reply.body == whole.body[:cut]
    assert reply.complete is (then == "end")


def test_a_short_answer_breaks_off_too(kube: LocalKube) -> None:
    kube.control.add_fault(Fault("get", cut=10))
    reply = ask(kube, "GET", f"{NODES}/n1")
    assert len(reply.body) == 10
    assert int(reply.headers["Content-Length"]) > 10


def test_a_cut_can_be_inside_a_letter(kube: LocalKube) -> None:
    kube.control.add_fault(Fault("watch", cut="ü"))
    reply = ask(kube, "GET", WATCH)
    assert reply.body.endswith(b'"word":"Z\xc3')
    assert not reply.complete


def test_a_cut_can_wait_for_a_certain_event(kube: LocalKube) -> None:
    kube.control.add_fault(Fault("watch", cut='"MODIFIED"', then="end"))
    with connected(kube) as sock:
        sock.sendall(request_bytes("GET", WATCH))
        wait_for(kube.control.watches, what="the watch to begin")
        kube.control.annotate("n1", {"x": "1"})
        reply = parse_reply(read_all(sock))
    assert [event["type"] for event in reply.events()] == ["ADDED"]
    assert reply.body.endswith(b'\n{"type":"')
    assert reply.complete


def test_a_stalled_answer_neither_goes_on_nor_ends(kube: LocalKube) -> None:
    kube.control.add_fault(Fault("get", cut=10, then="stall"))
    with connected(kube) as sock:
        sock.sendall(request_bytes("GET", f"{NODES}/n1"))
        raw = b""
        while len(parse_reply(raw).body if b"\r\n\r\n" in raw else b"") < 10:
            raw += sock.recv(4096)
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        kube.control.close_connections()
        sock.settimeout(DEADLINE)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("fault", [Fault(chunk=1), Fault(piece=1), Fault(piece=7, pause=0.0001)])
def test_an_answer_in_tiny_pieces_is_the_same(kube: LocalKube, fault: Fault) -> None:
    for number in range(5):
        kube.control.put_node(f"more-{number}", "10.5.9.0/24")
    whole = ask(kube, "GET", NODES)
    kube.control.add_fault(fault)
    reply = ask(kube, "GET", NODES)
    assert reply.body == whole.body
    assert reply.complete
    assert {len(chunk) for chunk in reply.chunks} == ({1} if fault.chunk else set(map(len, whole.chunks)))


@pytest.mark.parametrize("code", [410, 500])
def test_an_error_event_ends_a_new_watch(kube: LocalKube, code: int) -> None:
    kube.control.add_fault(Fault("watch", error=code))
    reply = ask(kube, "GET", WATCH)
    *_, last = reply.events()
    assert (last["type"], last["object"]["kind"], last["object"]["code"]) == ("ERROR", "Status", code)
    assert reply.complete


@pytest.mark.parametrize(
    ("fault", "line", "complete"),
    [
        (Fault(then="end"), None, True),
        (Fault(then="close"), None, False),
        (Fault(then="reset"), None, False),
        (Fault(error=410), b'"code":410', True),
        (Fault(line="{garbage", then="end"), b"{garbage", True),
        (Fault(line='{"type":"MODIFIED","object":', then="close"), b'"object":', False),
    ],
)
def test_an_open_watch_can_be_struck(
    kube: LocalKube, fault: Fault, line: bytes | None, *, complete: bool
) -> None:
    with connected(kube) as sock:
        sock.sendall(request_bytes("GET", WATCH))
        wait_for(kube.control.watches, what="the watch to begin")
        assert kube.control.disturb_watches(fault) == 1
        reply = parse_reply(read_all(sock))
    first, *rest = reply.body.split(b"\n")[:-1]
    assert first.startswith(b'{"type":"ADDED"')
    assert [line in each for each in rest if line] == ([True] if line else [])
    assert reply.complete is complete
    assert kube.control.watches() == 0


def test_watch_counts_from_its_first_read_of_the_store(kube: LocalKube) -> None:
    watch = Watch(kube.server.api.store, {}, bookmark_interval=60, patience=3)
    steps = iter(watch)
    with socket.socket() as sock:
        kube.server.connections.add(Connection(sock, idle=False, watch=watch))
        assert (next(steps), kube.control.watches()) == ([], 0)
        assert (len(next(steps)), kube.control.watches()) == (1, 1)


def test_only_idle_connections_can_be_closed(kube: LocalKube) -> None:
    with connected(kube) as idle, connected(kube) as busy:
        idle.sendall(request_bytes("GET", f"{NODES}/n1", keep=True))
        while not idle.recv(65536).endswith(b"}\n"):
            pass
        busy.sendall(request_bytes("GET", WATCH))
        wait_for(kube.control.watches, what="the watch to begin")
        wait_for(lambda: kube.control.close_connections(idle_only=True), what="an idle connection")
        assert read_all(idle) == b""
        assert kube.control.watches() == 1


def test_an_answer_can_be_late(kube: LocalKube) -> None:
    kube.control.add_fault(Fault(delay=2))
    with connected(kube) as sock:
        sock.sendall(request_bytes("GET", NODES))
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(DEADLINE)
        assert parse_reply(read_all(sock)).status == 200
