"""The stream of a watch: put together from any pieces, and understood or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.errors import Retryable
from flanneld.runtime.sockets.http_connection import Lines
from flanneld.subnet.kube.api import Expired
from flanneld.subnet.kube.nodes import NodeReader
from flanneld.subnet.kube.watch import InvalidWatchData, decode
from tests.local_kube import parse_reply

GOLDEN = Path(__file__).parents[2] / "golden"


@given(
    st.lists(st.binary(min_size=1, max_size=20).filter(lambda line: b"\n" not in line and line.strip())),
    st.randoms(),
)
def test_lines_come_out_whole_however_they_were_cut(lines: list[bytes], chance: random.Random) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    reader, found, place = Lines(), list[bytes](), 0
    while place < len(stream):
        size = chance.randint(1, 7)
        found += reader.feed(stream[place : place + size])
        place += size
    assert found == lines


def test_a_line_without_end_is_not_collected_for_ever() -> None:
    reader = Lines()
    assert [reader.feed(b"x" * (1 << 20)) for _ in range(64)] == [[]] * 64
    with pytest.raises(Retryable, match="without end"):
        reader.feed(b"x")


def test_a_bookmark_is_an_event() -> None:
    line = b'{"type":"BOOKMARK","object":{"kind":"Node","metadata":{"resourceVersion":"300"},"spec":{}}}'
    kind, obj = decode(line)
    assert (kind, obj["metadata"]) == ("BOOKMARK", {"resourceVersion": "300"})


@pytest.mark.parametrize(
    "line", [b"{no", b"[]", b"null", b"\xff\xfe", b'{"type":"ADDED"}', b'{"type":5,"object":{}}']
)
def test_invalid_watch_event_calls_for_a_relist(line: bytes) -> None:
    with pytest.raises(InvalidWatchData, match="no event"):
        decode(line)


def test_an_error_event_calls_for_a_list() -> None:
    gone = {
        "kind": "Status",
        "message": "too old resource version: 5 (411)",
        "reason": "Expired",
        "code": 410,
    }
    with pytest.raises(Expired, match="too old resource version"):
        decode(json.dumps({"type": "ERROR", "object": gone}).encode())
    with pytest.raises(InvalidWatchData, match="boom"):
        decode(json.dumps({"type": "ERROR", "object": {"code": 500, "message": "boom"}}).encode())


def recorded(name: str) -> bytes:
    """The body of an answer of a real API server, out of its chunks."""
    golden = json.loads((GOLDEN / "kube-apiserver-1.36.2.json").read_text())
    answer = next(item["answer"] for item in golden if item["name"] == name)
    return parse_reply(answer.encode()).body


@given(st.integers(1, 5000))
def test_recorded_watch_is_parsed_in_any_pieces(size: int) -> None:
    stream = recorded("watch-events-bookmarks")
    lines, reader = Lines(), NodeReader("flannel.alpha.coreos.com/")
    events = [decode(line) for i in range(0, len(stream), size) for line in lines.feed(stream[i : i + size])]
    kinds = [kind for kind, _ in events]
    assert kinds[-1] == "BOOKMARK"
    assert {"ADDED", "MODIFIED", "DELETED"} >= set(kinds) - {"BOOKMARK"}
    nodes = [reader.read(obj) for kind, obj in events if kind != "BOOKMARK"]
    assert nodes[0].notes["backend-type"] == "vxlan"


def test_a_real_servers_word_that_history_is_lost_is_understood() -> None:
    (line,) = Lines().feed(recorded("watch-410"))
    with pytest.raises(Expired, match="too old resource version"):
        decode(line)
