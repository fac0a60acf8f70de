"""What the gateway of etcd v3 says is either understood or refused in a way that the callers expect."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import Retryable
from flanneld.subnet.etcd import v3_messages
from flanneld.subnet.etcd.keys import Position, StoredKey
from flanneld.subnet.etcd.transport import Answer
from flanneld.subnet.etcd.v3_messages import AccessRefused, GatewayMessage, LeaseGone, LoginNeeded
from flanneld.subnet.failover import ServerFailed
from flanneld.subnet.list_watch import RelistNeeded

AT = Position(7, "9")
NAMES = [
    *(
        "header",
        "revision",
        "cluster_id",
        "kvs",
        "key",
        "value",
        "lease",
        "mod_revision",
        "events",
        "type",
        "kv",
    ),
    *(
        "created",
        "canceled",
        "cancel_reason",
        "compact_revision",
        "result",
        "error",
        "code",
        "message",
        "TTL",
    ),
    *("succeeded", "responses", "response_range", "ID"),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["7", "0", "Zm9v", "DELETE", "etcdserver: no leader", 5, 7, 11, 14, 16])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6)
BODIES = st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode())


@given(st.sampled_from([200, 301, 400, 401, 403, 404, 412, 500, 503]), BODIES)
def test_any_answer_is_an_object_or_an_error_with_a_meaning(status: int, body: bytes) -> None:
    with suppress(Retryable, ServerFailed):
        assert isinstance(
            v3_messages.read(Answer("http://a:1", status, Position(0), body=body)), GatewayMessage
        )


@given(OBJECTS)
def test_any_object_is_understood_or_of_no_use(body: dict[str, Any]) -> None:
    for read in (
        lambda said: said.at,
        v3_messages.other_branch,
        lambda said: [found.node() for found in said.kvs or ()],
        lambda said: v3_messages.began(said, AT),
        lambda said: v3_messages.changes(said, AT, AT),
    ):
        with suppress(Retryable, ServerFailed):
            read(v3_messages.understood(body))


@given(BODIES)
def test_any_line_of_a_stream_is_an_object_or_an_error_with_a_meaning(line: bytes) -> None:
    with suppress(Retryable, ServerFailed):
        assert isinstance(v3_messages.stream_object(line, "http://a:1"), GatewayMessage)


REFUSES = "etcd at http://a:1 refuses"
ERRORS: list[tuple[int, object, type[Exception], str]] = [
    (400, {"code": 16, "message": "m"}, LoginNeeded, f"{REFUSES} access (m)"),
    (
        400,
        {"error": "etcdserver: invalid auth token"},
        LoginNeeded,
        f"{REFUSES} access (etcdserver: invalid auth token)",
    ),
    (403, {"code": 7, "message": "m"}, AccessRefused, f"{REFUSES} access (m)"),
    (
        400,
        {"message": "permission denied"},
        AccessRefused,
        f"{REFUSES} access (permission denied)",
    ),
    (404, {"code": 5, "message": "m"}, LeaseGone, f"{REFUSES}: m"),
    (400, {"code": 1, "message": "m"}, ServerFailed, "m"),
    (400, {"code": 4, "message": "m"}, ServerFailed, "m"),
    (400, {"code": 14, "message": "m"}, ServerFailed, "m"),
    (400, {"code": 9, "message": "m"}, Retryable, f"{REFUSES}: m (error 9)"),
    (499, {"code": 9}, Retryable, f"{REFUSES}: no reason given (error 9)"),
    (500, {"code": 9}, ServerFailed, "no reason given"),
    (400, {"error": {"grpc_code": 9, "code": 14, "message": "m"}}, Retryable, f"{REFUSES}: m (error 9)"),
    (400, {"error": "e", "message": "m", "code": 9}, Retryable, f"{REFUSES}: m (error 9)"),
    (400, {"error": "e", "code": 9}, Retryable, f"{REFUSES}: e (error 9)"),
    (400, {"message": "x" * 201}, ServerFailed, f"HTTP 400, {'x' * 200}"),
    (400, {"message": 5, "code": "9"}, ServerFailed, "HTTP 400, no reason given"),
    (401, [], Retryable, f"{REFUSES} access (HTTP 401)"),
    (403, [], Retryable, f"{REFUSES} access (HTTP 403)"),
    (402, [], ServerFailed, "HTTP 402 with text/plain that is no JSON object"),
    (499, [], ServerFailed, "HTTP 499 with text/plain that is no JSON object"),
    (500, [], ServerFailed, "HTTP 500"),
    (199, {}, ServerFailed, "HTTP 199, no reason given"),
    (200, [], ServerFailed, "HTTP 200 with text/plain that is no JSON object"),
    (200, {"header": 5}, ServerFailed, "it answers with JSON that is not etcd's"),
]


@pytest.mark.parametrize(("status", "body", "expected", "words"), ERRORS)
def test_refusal_is_told_in_the_words_of_etcd(
    status: int, body: object, expected: type[Exception], words: str
) -> None:
    failure = failure_of(status, json.dumps(body).encode())
    assert (type(failure), failure.problem) == (expected, words)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, b'{"code": 16}', "-etcd-username"),
        (400, b'{"code": 7}', "-etcd-username"),
        (403, b"no JSON", "-etcd-username"),
        (400, b'{"code": 9, "message": "no leader"}', "it has no quorum"),
        (500, b'{"message": "no leader"}', "it has no quorum"),
        (500, b"no JSON", "see the log of etcd"),
        (400, b"CommonName of client sending a request against gateway", "set -etcd-certfile to one without"),
    ],
)
def test_refusal_has_the_remedy_of_its_cause(status: int, body: bytes, words: str) -> None:
    assert words in failure_of(status, body).remedy


def failure_of(status: int, body: bytes) -> Retryable | ServerFailed:
    with pytest.raises((Retryable, ServerFailed)) as caught:
        v3_messages.read(Answer("http://a:1", status, Position(0), "text/plain", body=body))
    assert isinstance(caught.value, Retryable | ServerFailed)
    return caught.value


@pytest.mark.parametrize(
    ("header", "at"),
    [
        ('{"revision": "7", "cluster_id": "9"}', AT),
        ('{"revision": "7"}', None),
        ('{"cluster_id": "9"}', None),
        ("null", None),
    ],
)
def test_message_without_revision_or_cluster_is_not_from_etcd(header: str, at: Position | None) -> None:
    message = v3_messages.read(Answer("a", 200, Position(0), body=f'{{"header": {header}}}'.encode()))
    if at is None:
        with pytest.raises(ServerFailed, match="not etcd's"):
            _ = message.at
    else:
        assert message.at == at


@pytest.mark.parametrize(
    ("status", "body", "is_unknown"),
    [
        (404, b"404 page not found", True),
        (404, b'{"code": 5}', False),
        (403, b"no JSON", False),
        (405, b"", False),
    ],
)
def test_path_that_a_server_lacks_is_told_from_a_key_that_it_lacks(
    status: int, body: bytes, is_unknown: bool
) -> None:
    assert v3_messages.is_unknown_path(Answer("a", status, Position(0), body=body)) is is_unknown


FOUND = [{"key": "L2E=", "mod_revision": revision} for revision in ("5", "6")]


@pytest.mark.parametrize(
    ("responses", "modified"),
    [
        ([], None),
        ([{}], None),
        ([{}, {"response_range": {}}], None),
        ([{}, {"response_range": {}}, {"response_range": {"kvs": FOUND}}], 5),
    ],
)
def test_key_that_the_other_branch_of_a_transaction_read_is_the_first_there_is(
    responses: list[object], modified: int | None
) -> None:
    key = v3_messages.other_branch(v3_messages.understood({"responses": responses}))
    assert (key and key.modified) == modified


@pytest.mark.parametrize(
    ("message", "expected", "words"),
    [
        ({"error": {"grpc_code": 14, "message": "m"}}, ServerFailed, "m"),
        ({"result": {"canceled": True, "cancel_reason": "m"}}, ServerFailed, "m"),
        ({"result": {"canceled": True}}, ServerFailed, "no reason given"),
        ({}, ServerFailed, "no reason given"),
        ([], ServerFailed, "it answers with something that is no JSON object"),
        ({"result": 5}, ServerFailed, "it answers with JSON that is not etcd's"),
    ],
)
def test_line_of_a_stream_that_ends_it_says_why(
    message: object, expected: type[Exception], words: str
) -> None:
    with pytest.raises(expected) as caught:
        v3_messages.stream_object(json.dumps(message).encode(), "http://a:1")
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("key", "node"),
    [
        ({}, StoredKey("/a", "", None, 5)),
        ({"value": "/w=="}, StoredKey("/a", "\ufffd", None, 5)),
        ({"lease": "3", "create_revision": "4"}, StoredKey("/a", "", math.inf, 5, created=4)),
    ],
)
def test_key_with_a_lease_ends_and_one_without_does_not(key: dict[str, str], node: StoredKey) -> None:
    said = v3_messages.understood({"kvs": [{"key": v3_messages.text64("/a"), "mod_revision": "5"} | key]})
    assert [found.node() for found in said.kvs or ()] == [node]
    assert [found.node(9.0).ttl for found in said.kvs or ()] == [9.0 if node.ttl else None]


def event(key: str, modified: int, **more: object) -> dict[str, object]:
    return {"kv": {"key": v3_messages.text64(key), "mod_revision": str(modified)}, **more}


def test_events_tell_only_up_to_the_last_of_them() -> None:
    header = {"revision": "99", "cluster_id": "9"}
    result = v3_messages.understood({"header": header, "events": [event("/a", 8), event("/b", 9)]})
    told, at = v3_messages.changes(result, AT, AT)
    assert [item.node().key for _, item in told] == ["/a", "/b"]
    assert at == Position(9, "9")
    assert v3_messages.changes(v3_messages.understood({"header": header}), AT, AT) == ([], Position(99, "9"))


def test_known_events_are_left_out() -> None:
    header = {"revision": "99", "cluster_id": "9"}
    result = v3_messages.understood({"header": header, "events": [event("/a", 7, type="DELETE")]})
    assert v3_messages.changes(result, AT, AT) == ([], AT)
    told, at = v3_messages.changes(result, Position(6, "9"), Position(8, "9"))
    assert [action for action, _ in told] == ["delete"]
    assert at == Position(8, "9")


def test_change_is_a_removal_only_if_it_says_so() -> None:
    events = [event("/a", 8, type="DELETE"), event("/a", 9, type="PUT"), event("/a", 10)]
    header = {"revision": "99", "cluster_id": "9"}
    line = json.dumps({"result": {"header": header, "events": events}}).encode()
    told, _ = v3_messages.changes(v3_messages.stream_object(line, "http://a:1"), AT, AT)
    assert [action for action, _ in told] == ["delete", "put", "put"]


@pytest.mark.parametrize(
    ("created", "revision", "cluster", "expected"),
    [
        (True, 7, 9, None),
        (True, 8, 9, None),
        (True, 6, 9, RelistNeeded),
        (True, 7, 8, RelistNeeded),
        (True, 0, 9, ServerFailed),
        (False, 7, 9, ServerFailed),
    ],
)
def test_watch_begins_with_a_message_that_says_so_and_no_earlier_than_it_was_asked(
    created: bool, revision: int, cluster: int, expected: type[Exception] | None
) -> None:
    header = {"revision": str(revision), "cluster_id": str(cluster)}
    first = v3_messages.understood({"header": header, "created": created})
    with pytest.raises(expected) if expected else nullcontext():
        v3_messages.began(first, AT)


def test_a_compacted_watch_has_to_read_everything_again() -> None:
    with pytest.raises(RelistNeeded):
        v3_messages.stream_object(b'{"result":{"canceled":true,"compact_revision":"3"}}', "http://a:1")


@pytest.mark.parametrize(
    "text", ["user name is empty", "invalid auth token", "revision of auth store is old"]
)
def test_a_watch_that_ends_for_want_of_a_login_says_so(text: str) -> None:
    reason = f"rpc error: code = InvalidArgument desc = etcdserver: {text}"
    line = json.dumps({"result": {"created": True, "canceled": True, "cancel_reason": reason}}).encode()
    with pytest.raises(LoginNeeded, match=text):
        v3_messages.stream_object(line, "http://a:1")


def test_a_directory_is_what_lies_below_its_slash() -> None:
    span = v3_messages.directory("/net/subnets")
    inside = [v3_messages.text64(f"/net/subnets/{name}") for name in ("0", "10.5.1.0-24", "~")]
    outside = [v3_messages.text64(name) for name in ("/net/subnets", "/net/subnets-2/x", "/net/subnets1")]
    low, high = raw(span["key"]), raw(span["range_end"])
    assert all(low <= raw(key) < high for key in inside)
    assert not any(low <= raw(key) < high for key in outside)


def raw(coded: str) -> bytes:
    return b64decode(coded)
