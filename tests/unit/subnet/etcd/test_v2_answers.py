"""What comes from a server is either understood or refused in a way that the callers expect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import NoAnswer, Retryable
from flanneld.subnet.etcd.keys import Conflict, KeyReply, NoSuchApi, NotFound, Position, StoredKey
from flanneld.subnet.etcd.transport import Answer
from flanneld.subnet.etcd.v2_messages import changes, check_history, read
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


ENTRY = b'{"action": "set", "node": {"key": "/k", "modifiedIndex": 5}}'
FOUND = KeyReply("set", StoredKey("/k", "", None, 5), (), AT)


def answer(status: int, body: Any) -> Answer:
    return Answer("http://a:1", status, AT, "application/json", body=json.dumps(body).encode())


def failure_of(refused: Answer) -> Retryable | ServerFailed:
    with pytest.raises((Retryable, ServerFailed)) as caught:
        read(refused)
    assert isinstance(caught.value, Retryable | ServerFailed)
    return caught.value


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


@pytest.mark.parametrize(
    ("status", "body", "expected", "words"),
    [
        (401, b"no JSON", Retryable, "etcd at http://a:1 refuses access (HTTP 401)"),
        (403, b"{}", Retryable, "etcd at http://a:1 refuses access (HTTP 403)"),
        (402, b"{}", ServerFailed, "HTTP 402, no reason given"),
        (402, b"no JSON", ServerFailed, "HTTP 402 with text/plain that is no JSON object"),
        (400, b'{"errorCode": 110}', Retryable, "etcd at http://a:1 refuses access (HTTP 400)"),
        (403, b'{"errorCode": 7}', Retryable, "etcd at http://a:1 refuses: no reason given (error 7)"),
        (404, b'{"errorCode": 100, "message": "m"}', Retryable, "etcd at http://a:1 refuses: m (error 100)"),
        (404, b"no JSON", ServerFailed, "it has no v2 API"),
        (412, b'{"errorCode": 101, "message": "m", "cause": "c"}', Conflict, "m: c"),
        (400, b'{"errorCode": "x", "cause": "c"}', ServerFailed, "HTTP 400, c"),
        (400, b'{"message": "%s", "cause": "c"}' % (b"x" * 201), ServerFailed, f"HTTP 400, {'x' * 200}: c"),
        (499, b'{"message": 5}', ServerFailed, "HTTP 499, no reason given"),
        (500, b"no JSON", ServerFailed, "HTTP 500, no reason given"),
        (500, b'{"errorCode": 101, "message": "no leader"}', ServerFailed, "HTTP 500, no leader"),
        (204, b"{}", ServerFailed, "HTTP 204, no reason given"),
        (299, ENTRY, ServerFailed, "HTTP 299, no reason given"),
        (400, ENTRY, ServerFailed, "HTTP 400, no reason given"),
        (201, b"{}", ServerFailed, "it answers with JSON that is not etcd's"),
        (200, b"no JSON", ServerFailed, "HTTP 200 with text/plain that is no JSON object"),
    ],
)
def test_refusal_is_told_in_the_words_of_etcd(
    status: int, body: bytes, expected: type[Exception], words: str
) -> None:
    failure = failure_of(Answer("http://a:1", status, AT, "text/plain", body=body))
    assert (type(failure), failure.problem) == (expected, words)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (403, b"{}", "-etcd-username"),
        (404, b"no JSON", "--enable-v2"),
        (400, b'{"errorCode": 300, "message": "no leader"}', "it has no quorum"),
        (503, b'{"errorCode": 300, "cause": "no leader"}', "it has no quorum"),
        (503, b'{"errorCode": 300}', "see the log of etcd"),
    ],
)
def test_refusal_has_the_remedy_of_its_cause(status: int, body: bytes, words: str) -> None:
    assert words in failure_of(Answer("http://a:1", status, AT, body=body)).remedy


@pytest.mark.parametrize(("body", "kind"), [(b"no JSON", NoSuchApi), (b"{}", NoAnswer)])
def test_server_without_the_api_is_told_from_one_that_does_not_answer(
    body: bytes, kind: type[Retryable]
) -> None:
    failure = failure_of(Answer("http://a:1", 404, AT, body=body))
    assert isinstance(failure, ServerFailed)
    assert failure.kind is kind


LARGEST = (1 << 63) - 1


@pytest.mark.parametrize(
    ("entry", "node"),
    [
        ({}, StoredKey("/k", "v", None, 5)),
        ({"value": None}, StoredKey("/k", "", None, 5)),
        ({"createdIndex": 4}, StoredKey("/k", "v", None, 5, created=4)),
        ({"createdIndex": None}, StoredKey("/k", "v", None, 5)),
        ({"ttl": 9}, StoredKey("/k", "v", 9, 5)),
        ({"ttl": None}, StoredKey("/k", "v", None, 5)),
        ({"ttl": -LARGEST}, StoredKey("/k", "v", -LARGEST, 5)),
        ({"ttl": LARGEST}, StoredKey("/k", "v", LARGEST, 5)),
        ({"value": None, "ttl": LARGEST}, StoredKey("/k", "", LARGEST, 5)),
        ({"value": None, "expiration": "2030-01-01T00:00:00Z"}, StoredKey("/k", "", 0, 5)),
        ({"value": None, "nodes": [{"key": "/k/a", "modifiedIndex": 1}]}, StoredKey("/k", "", None, 5)),
        ({"ttl": LARGEST + 1}, None),
        ({"ttl": -LARGEST - 1}, None),
        ({"ttl": 1.5}, None),
        ({"key": None}, None),
        ({"value": 5}, None),
        ({"modifiedIndex": None}, None),
        ({"modifiedIndex": 1.5}, None),
        ({"createdIndex": "4"}, None),
    ],
)
def test_key_is_read_as_etcd_and_its_proxies_write_it_and_in_no_other_form(
    entry: dict[str, Any], node: StoredKey | None
) -> None:
    body = {"action": "get", "node": {"key": "/k", "value": "v", "modifiedIndex": 5} | entry}
    if node is None:
        with pytest.raises(ServerFailed, match="not etcd's"):
            read(answer(200, body))
    else:
        assert read(answer(200, body)) == KeyReply("get", node, (), AT)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (ENTRY, [FOUND]),
        (ENTRY + b"\n" + ENTRY, [FOUND, FOUND]),
        (None, [KeyReply("", None, (), AT)]),
    ],
)
def test_stream_has_a_change_in_each_line(body: bytes | None, found: list[KeyReply]) -> None:
    assert changes(Answer("http://a:1", 200, AT, body=body)) == found


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"", "no JSON object"),
        (200, ENTRY + b"\n[]", "no JSON object"),
        (500, b'{\n"message": "no leader"\n}', "HTTP 500, no leader"),
        (199, ENTRY, "HTTP 199"),
    ],
)
def test_stream_that_is_none_is_refused_as_a_whole(status: int, body: bytes, words: str) -> None:
    with pytest.raises(ServerFailed, match=words):
        changes(Answer("http://a:1", status, AT, body=body))


def test_history_goes_on_only_in_the_same_cluster_and_forwards() -> None:
    check_history(AT, AT)
    check_history(AT, Position(9, "cafe"))
    for now in (Position(6, "cafe"), Position(9, "beef")):
        with pytest.raises(RelistNeeded):
            check_history(AT, now)
    with pytest.raises(ServerFailed):
        check_history(AT, Position(0, "cafe"))
