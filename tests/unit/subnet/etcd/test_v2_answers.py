"""What comes from a server is either understood or refused in a way that the callers expect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import Retryable
from flanneld.subnet.etcd.keys import Conflict, KeyReply, NotFound, Position, StoredKey
from flanneld.subnet.etcd.transport import Answer
from flanneld.subnet.etcd.v2_messages import check_history, read
from flanneld.subnet.failover import ServerFailed
from flanneld.subnet.list_watch import RelistNeeded

AT = Position(7, "cafe")
KEYS = [
    "action",
    "node",
    "nodes",
    "key",
    "value",
    "ttl",
    "dir",
    "modifiedIndex",
    "errorCode",
    "index",
    "message",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([100, 101, 105, 110, 300, 400, 401])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=20,
)
BODIES = st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode())
ANSWERS = st.builds(
    Answer,
    server=st.just("http://a:1"),
    status=st.sampled_from([200, 201, 204, 301, 400, 401, 403, 404, 412, 500, 503]),
    at=st.builds(Position, st.integers(0, 9), st.sampled_from(["", "cafe"])),
    content_type=st.text(max_size=9),
    location=st.text(max_size=9) | st.just("http://[nonsense/"),
    body=st.none() | BODIES,
)


def answer(status: int, body: Any) -> Answer:
    return Answer("http://a:1", status, AT, "application/json", body=json.dumps(body).encode())


@given(ANSWERS)
def test_any_answer_is_understood_or_refused(given_answer: Answer) -> None:
    try:
        reply = read(given_answer)
    except (Retryable, ServerFailed):
        return
    assert isinstance(reply, KeyReply)
    assert given_answer.status in (200, 201) or given_answer.body is None


def test_a_directory_comes_with_its_children() -> None:
    leaf = {"key": "/d/k", "value": "v", "modifiedIndex": 5, "ttl": 9, "expiration": "2030-01-01T00:00:00Z"}
    body = {"action": "get", "node": {"key": "/d", "dir": True, "nodes": [leaf], "modifiedIndex": 3}}
    expected = StoredKey("/d", "", None, 3, is_dir=True), (StoredKey("/d/k", "v", 9, 5, is_dir=False),)
    reply = read(answer(200, body))
    assert (reply.node, reply.children, reply.at) == (*expected, AT)


def test_a_key_in_its_last_second_is_no_reservation() -> None:
    node = {"key": "/k", "value": "v", "modifiedIndex": 5, "expiration": "2030-01-01T00:00:00Z"}
    reply = read(answer(200, {"action": "get", "node": node}))
    assert reply.node
    assert reply.node.ttl == 0


def test_an_answer_without_an_index_is_not_from_etcd() -> None:
    body = json.dumps({"action": "get", "node": {"key": "/k", "value": "v", "modifiedIndex": 5}})
    with pytest.raises(ServerFailed, match="not etcd's"):
        read(Answer("http://a:1", 200, Position(0), body=body.encode()))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (404, 100, NotFound),
        (412, 101, Conflict),
        (412, 105, Conflict),
        (400, 401, RelistNeeded),
        (400, 400, RelistNeeded),
        (403, 102, Retryable),
        (500, 300, ServerFailed),
    ],
)
def test_each_error_of_etcd_has_its_meaning(status: int, code: int, expected: type[Exception]) -> None:
    body = {"errorCode": code, "message": "m", "cause": "c", "index": 42}
    with pytest.raises(expected) as caught:
        read(answer(status, body))
    assert type(caught.value) is expected
    if isinstance(caught.value, NotFound):
        assert caught.value.at == Position(42, "cafe")


def test_history_goes_on_only_in_the_same_cluster_and_forwards() -> None:
    check_history(AT, AT)
    check_history(AT, Position(9, "cafe"))
    for now in (Position(6, "cafe"), Position(9, "beef")):
        with pytest.raises(RelistNeeded):
            check_history(AT, now)
    with pytest.raises(ServerFailed):
        check_history(AT, Position(0, "cafe"))
