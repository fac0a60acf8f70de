"""What the gateway of etcd v3 says is either understood or refused in a way that the callers expect."""

from __future__ import annotations

import json
from base64 import b64decode
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import Retryable
from flanneld.subnet.etcd import v3_messages
from flanneld.subnet.etcd.keys import Position
from flanneld.subnet.etcd.transport import Answer
from flanneld.subnet.etcd.v3_messages import GatewayMessage
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


def test_a_compacted_watch_has_to_read_everything_again() -> None:
    with pytest.raises(RelistNeeded):
        v3_messages.stream_object(b'{"result":{"canceled":true,"compact_revision":"3"}}', "http://a:1")


@pytest.mark.parametrize(
    "text", ["user name is empty", "invalid auth token", "revision of auth store is old"]
)
def test_a_watch_that_ends_for_want_of_a_login_says_so(text: str) -> None:
    reason = f"rpc error: code = InvalidArgument desc = etcdserver: {text}"
    line = json.dumps({"result": {"created": True, "canceled": True, "cancel_reason": reason}}).encode()
    with pytest.raises(v3_messages.LoginNeeded, match=text):
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
