"""Responses of etcd's v2 API, and of servers that are not etcd.

Source: etcd's ``v2/api.md`` and ``v2/errorcode.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.subnet.etcd import keys
from flanneld.subnet.etcd.keys import (
    NO_ACCESS,
    Conflict,
    KeyReply,
    NoSuchApi,
    NotFound,
    Position,
    StoredKey,
    remedy_for,
)
from flanneld.subnet.etcd.transport import Answer, json_object, not_etcd
from flanneld.subnet.failover import ServerFailed
from flanneld.subnet.list_watch import RelistNeeded

_NOT_FOUND = 100
_CONFLICTS = (101, 105)  # compare failed, node exists
_NO_PERMISSION = 110
_HISTORY_GONE = (400, 401)  # watcher cleared, event index cleared


def read(answer: Answer) -> KeyReply:
    """Return the reply in a response, or raise its error.

    Raises ``NotFound``, ``Conflict``, ``RelistNeeded``, ``Retryable`` or ``ServerFailed``.
    """
    if answer.body is None:
        return KeyReply("", None, (), answer.at)
    if answer.status == 200 and answer.at.index and (listed := _listed(answer.body, answer.at)):
        return listed
    body = _decode(answer)
    if answer.status >= 500:
        raise ServerFailed(f"HTTP {answer.status}, {_text(body)}", remedy_for(_text(body)))
    if answer.status not in (200, 201):
        raise _refusal(answer, body)
    try:
        return _reply(answer, body)
    except (KeyError, TypeError, AttributeError):
        raise ServerFailed("it answers with JSON that is not etcd's") from None


def changes(answer: Answer) -> list[KeyReply]:
    """Return the replies in the lines of a stream, or raise its error."""
    if answer.status != 200 or not answer.body:
        return [read(answer)]
    return [read(replace(answer, body=line)) for line in answer.body.splitlines()]


_LARGEST = (1 << 63) - 1


class _KeyEntry(
    Struct, gc=False, rename={"modified": "modifiedIndex", "created": "createdIndex", "is_dir": "dir"}
):
    """A key in a response, as etcd writes it."""

    key: str
    modified: int
    created: int = 0
    value: str = ""
    ttl: Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)] | None = None
    expiration: str = ""
    is_dir: bool = False
    nodes: list[_KeyEntry] | None = None

    def node(self) -> StoredKey:
        ttl = 0 if self.ttl is None and self.expiration else self.ttl
        return StoredKey(self.key, self.value, ttl, self.modified, self.is_dir, self.created)


class _Listed(Struct, gc=False):
    """A response with a key."""

    action: str
    node: _KeyEntry


_LISTED = msgspec.json.Decoder(_Listed)


def _listed(body: bytes, at: Position) -> KeyReply | None:
    """Return the reply if it is exactly as etcd writes it, else None.

    A list of all leases takes half the time and a third of the memory of decoded dictionaries.
    """
    try:
        found = _LISTED.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    node = found.node.node()
    children = tuple([each.node() for each in found.node.nodes or ()]) if node.is_dir else ()
    return KeyReply(found.action, node, children, at)


def check_history(after: Position, now: Position) -> None:
    """Check from the headers of a long poll that the changes after a position will follow.

    Raises ``RelistNeeded`` if not, and ``ServerFailed`` for a response that is not etcd's.
    """
    if not now.index:
        raise ServerFailed("it answers without X-Etcd-Index")
    keys.check_history(after, now)


def _decode(answer: Answer) -> dict[str, Any]:
    """Return the JSON object of a response; an empty one for errors known by their status alone."""
    body = json_object(answer)
    if body is not None:
        return body
    if answer.status in (401, 403) or answer.status >= 500:
        return {}
    if answer.status == 404:
        raise ServerFailed(
            "it has no v2 API", "is that etcd? v2 API off: start etcd with --enable-v2", kind=NoSuchApi
        )
    raise not_etcd(answer)


def _reply(answer: Answer, body: Mapping[str, Any]) -> KeyReply:
    raw = body["node"]
    node = _node(raw)
    children = tuple(map(_node, raw.get("nodes") or ())) if node.is_dir else ()
    if not answer.at.index:
        raise TypeError
    return KeyReply(str(body["action"]), node, children, answer.at)


def _node(raw: Mapping[str, Any]) -> StoredKey:
    """Return a node. etcd omits a TTL of 0, but never the expiration time."""
    key, value, modified = raw["key"], raw.get("value") or "", raw["modifiedIndex"]
    ttl = raw.get("ttl", 0 if raw.get("expiration") else None)
    created = raw.get("createdIndex") or 0
    if not (
        isinstance(key, str)
        and isinstance(value, str)
        and isinstance(modified, int)
        and isinstance(created, int)
    ):
        raise TypeError
    if not (ttl is None or (isinstance(ttl, int) and abs(ttl) < 1 << 63)):
        raise TypeError
    return StoredKey(key, value, ttl, modified, bool(raw.get("dir")), created)


def _refusal(answer: Answer, body: Mapping[str, Any]) -> Exception:
    code, index = body.get("errorCode"), body.get("index")
    if code == _NO_PERMISSION or (code is None and answer.status in (401, 403)):
        return Retryable(f"etcd at {answer.server} refuses access (HTTP {answer.status})", NO_ACCESS)
    if code == _NOT_FOUND and isinstance(index, int):
        return NotFound(Position(index, answer.at.cluster))
    if code in _CONFLICTS:
        return Conflict(_text(body))
    if code in _HISTORY_GONE:
        return RelistNeeded("etcd has compacted its history since")
    if isinstance(code, int):
        text = _text(body)
        return Retryable(f"etcd at {answer.server} refuses: {text} (error {code})", remedy_for(text))
    return ServerFailed(f"HTTP {answer.status}, {_text(body)}")


def _text(body: Mapping[str, Any]) -> str:
    texts = (body.get("message"), body.get("cause"))
    return ": ".join(text[:200] for text in texts if isinstance(text, str) and text) or "no reason given"
