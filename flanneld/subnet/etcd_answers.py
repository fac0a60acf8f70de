"""What the answers of etcd's v2 API mean, and those of servers that are not etcd (pure).

Source: etcd's ``v2/api.md`` and ``v2/errorcode.md``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from flanneld.errors import Retryable

_NO_ETCD = "is that etcd? check -etcd-endpoints"
_NO_ACCESS = "check -etcd-username, -etcd-password and the rights of that user"

_NOT_FOUND = 100
_CONFLICTS = (101, 105)  # compare failed, node exists
_NO_PERMISSION = 110
_HISTORY_GONE = (400, 401)  # watcher cleared, event index cleared


@dataclass(frozen=True, slots=True)
class Position:
    """A point in the history of one cluster of etcd."""

    index: int
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A key. ``ttl`` is in seconds, None if it stays; ``modified`` is the index of its last change."""

    key: str
    value: str
    ttl: int | None
    modified: int
    is_dir: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """What etcd said. A long poll without news has no ``node``; ``children`` are those of a directory.

    ``at`` is how far the history of the key is known now.
    """

    action: str
    node: Node | None
    children: tuple[Node, ...]
    at: Position


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; ``body`` is None for a long poll that brought no news."""

    server: str
    status: int
    at: Position
    content_type: str = ""
    location: str = ""
    body: bytes | None = field(default=None, repr=False)


class NotFound(Retryable):
    """There is no such key at ``at``.

    This and the next two are answers that the asker expects. Where it does not, they are ``Retryable``.
    """

    def __init__(self, at: Position) -> None:
        super().__init__(f"no such key at index {at.index}")
        self.at = at


class Conflict(Retryable):
    """The condition of a write was not met: somebody else was there first."""


class ListAgain(Retryable):
    """A watch cannot go on from where it was; the text says why."""


class Useless(Exception):
    """A server cannot answer, another one may. ``sent``: it may have the request nevertheless."""

    def __init__(self, problem: str, remedy: str = _NO_ETCD, *, sent: bool = True) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.sent = sent


def read(answer: Answer) -> Reply:
    """Understand an answer, or raise what it means: one of the above, or ``Retryable``."""
    if answer.body is None:
        return Reply("", None, (), answer.at)
    body = _decode(answer)
    if answer.status >= 500:
        raise Useless(f"HTTP {answer.status}, {_text(body)}", "see the log of etcd; it may have no leader")
    if answer.status not in (200, 201):
        raise _refusal(answer, body)
    try:
        return _reply(answer, body)
    except (KeyError, TypeError, AttributeError):
        raise Useless("it answers with JSON that is not etcd's") from None


def check_history(after: Position, now: Position) -> None:
    """See from the head of a long poll's answer whether the changes after a position will come.

    If the server's index is lower, etcd waits in silence until it has caught up. Raises ``ListAgain``.
    """
    if not now.index:
        raise Useless("it answers without X-Etcd-Index")
    if now.cluster != after.cluster:
        raise ListAgain("this is another cluster of etcd than before")
    if now.index < after.index:
        raise ListAgain("etcd is behind what it said before; was it restored?")


def _decode(answer: Answer) -> dict[str, Any]:
    """The JSON object of an answer; empty for an error that is known by its status alone."""
    if 300 <= answer.status < 400:
        raise Useless(f"it redirects to {_host(answer.location)}", "name etcd itself in -etcd-endpoints")
    try:
        body = json.loads(answer.body or b"")
    except (ValueError, RecursionError):
        body = None
    if isinstance(body, dict):
        return body
    if answer.status in (401, 403) or answer.status >= 500:
        return {}
    if answer.status == 404:
        raise Useless("it has no v2 API", "is that etcd? v2 API off: start etcd with --enable-v2")
    raise Useless(f"HTTP {answer.status} with {answer.content_type or 'something'} that is no JSON object")


def _host(location: str) -> str:
    try:
        return urlsplit(location).hostname or "another path"
    except ValueError:
        return "nowhere"


def _reply(answer: Answer, body: Mapping[str, Any]) -> Reply:
    raw = body["node"]
    node = _node(raw)
    children = tuple(map(_node, raw.get("nodes") or ())) if node.is_dir else ()
    if not answer.at.index:
        raise TypeError
    return Reply(str(body["action"]), node, children, answer.at)


def _node(raw: Mapping[str, Any]) -> Node:
    """etcd leaves out a TTL of 0, but never the time at which a key expires."""
    key, value, modified = raw["key"], raw.get("value") or "", raw["modifiedIndex"]
    ttl = raw.get("ttl", 0 if raw.get("expiration") else None)
    if not (isinstance(key, str) and isinstance(value, str) and isinstance(modified, int)):
        raise TypeError
    if not (ttl is None or isinstance(ttl, int)):
        raise TypeError
    return Node(key, value, ttl, modified, bool(raw.get("dir")))


def _refusal(answer: Answer, body: Mapping[str, Any]) -> Exception:
    code, index = body.get("errorCode"), body.get("index")
    if code == _NO_PERMISSION or (code is None and answer.status in (401, 403)):
        return Retryable(f"etcd at {answer.server} refuses access (HTTP {answer.status})", _NO_ACCESS)
    if code == _NOT_FOUND and isinstance(index, int):
        return NotFound(Position(index, answer.at.cluster))
    if code in _CONFLICTS:
        return Conflict(_text(body))
    if code in _HISTORY_GONE:
        return ListAgain("etcd has forgotten what happened since")
    if isinstance(code, int):
        return Retryable(f"etcd at {answer.server} refuses: {_text(body)} (error {code})", "see etcd's log")
    return Useless(f"HTTP {answer.status}, {_text(body)}")


def _text(body: Mapping[str, Any]) -> str:
    texts = (body.get("message"), body.get("cause"))
    return ": ".join(text[:200] for text in texts if isinstance(text, str) and text) or "no reason given"
