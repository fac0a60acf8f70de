"""What the JSON gateway of etcd's v3 API says and hears (pure).

Bytes are in base64, 64-bit numbers are text, and what is zero is left out. What no etcd says raises
``Useless``. Source: etcd's ``rpc.proto``, ``kv.proto`` and ``error.go``.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from flanneld.errors import Retryable
from flanneld.subnet.etcd.http import NO_ACCESS, Answer, Useless, json_object, nonsense
from flanneld.subnet.etcd.keys import ListAgain, Node, Position, check_history

_CANCELLED, _DEADLINE_EXCEEDED, _NOT_FOUND = 1, 4, 5
_PERMISSION_DENIED, _UNAVAILABLE, _UNAUTHENTICATED = 7, 14, 16
#: etcd has no code of their own for these. The Go client logs in again for the same.
_LOGIN_NEEDED = ("user name is empty", "revision of auth store is old", "invalid auth token")
_LOGIN_REFUSED = ("authentication failed", "permission denied", "permission is not given")
#: What comes of taking other JSON for etcd's.
_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_CERTIFICATE_NAMES_USER = "CommonName of client"


class KeyValue(Struct, frozen=True, gc=False):
    """A key as v3 has it; ``lease`` is the ID of the lease it ends with, "0" if it stays."""

    key: str
    value: str
    lease: str
    modified: int

    def node(self, ttl: float = math.inf) -> Node:
        return Node(self.key, self.value, None if self.lease == "0" else ttl, self.modified)


class AccessRefused(Retryable):
    """What is asked for is not ours; of a watch some versions also say so when the login is outdated."""


class LoginNeeded(AccessRefused):
    """Who asks has to log in, or to log in again."""


class GatewayRefused(Retryable):
    """The JSON gateway is not for us; gRPC may be."""


class LeaseGone(Retryable):
    """There is no such lease."""


def text64(text: str) -> str:
    return b64encode(text.encode("utf-8", "surrogateescape")).decode()


def directory(path: str) -> dict[str, str]:
    """The range of keys below a path."""
    return {"key": text64(f"{path}/"), "range_end": text64(f"{path}0")}  # 0 comes after the slash


def is_unknown_path(answer: Answer) -> bool:
    """Whether the server has nothing there: its gateway is off, or etcd is of another version."""
    return answer.status == 404 and json_object(answer) is None


def read(answer: Answer) -> dict[str, Any]:
    """The object that an answer is. Raises what it means otherwise."""
    body = json_object(answer)
    if answer.status == 200 and body is not None:
        return body
    if body is not None:
        raise refusal(answer.server, body, answer.status)
    if _CERTIFICATE_NAMES_USER.encode() in (answer.body or b""):
        raise GatewayRefused(
            f"etcd at {answer.server} takes no login over JSON with a certificate that has a common name",
            "set -etcd-certfile to one without, as etcd's guide to role-based access says",
        )
    if answer.status >= 500:
        raise Useless(f"HTTP {answer.status}", "see the log of etcd; it may have no leader")
    if answer.status in (401, 403):
        raise Retryable(f"etcd at {answer.server} refuses access (HTTP {answer.status})", NO_ACCESS)
    raise nonsense(answer)


def refusal(server: str, body: Mapping[str, Any], status: int) -> Exception:
    """What an error means, be it an answer of its own or part of a stream."""
    inner = body.get("error")
    error = inner if isinstance(inner, dict) else body
    code = error.get("grpc_code", error.get("code"))
    message = error.get("message") or inner
    text = message[:200] if isinstance(message, str) and message else "no reason given"
    if code == _UNAUTHENTICATED or any(words in text for words in _LOGIN_NEEDED):
        return LoginNeeded(f"etcd at {server} refuses access ({text})", NO_ACCESS)
    if code == _PERMISSION_DENIED or any(words in text for words in _LOGIN_REFUSED):
        return AccessRefused(f"etcd at {server} refuses access ({text})", NO_ACCESS)
    if code == _NOT_FOUND:
        return LeaseGone(f"etcd at {server} refuses: {text}")
    if code in (_CANCELLED, _DEADLINE_EXCEEDED, _UNAVAILABLE) or status >= 500:
        return Useless(text, "see the log of etcd; it may have no leader")
    if isinstance(code, int):
        return Retryable(f"etcd at {server} refuses: {text} (error {code})", "see etcd's log")
    return Useless(f"HTTP {status}, {text}")


def position(body: Mapping[str, Any]) -> Position:
    """Where the history stood, by the header of an answer. Raises ``Useless`` if it has none."""
    try:
        header = body["header"]
        at = Position(int(header["revision"]), str(header["cluster_id"]))
    except _WRONG:
        raise _foreign() from None
    return at


def key_values(body: Mapping[str, Any]) -> list[KeyValue]:
    """What a range found. Raises ``Useless`` for what no etcd says."""
    try:
        return [_key_value(raw) for raw in body.get("kvs") or ()]
    except _WRONG:
        raise _foreign() from None


def number(body: Mapping[str, Any], name: str) -> int:
    """A number that is left out if it is zero."""
    try:
        value = int(body.get(name) or 0)
    except _WRONG:
        raise _foreign() from None
    if abs(value) >= 1 << 63:
        raise _foreign()
    return value


def kept_alive(body: Mapping[str, Any]) -> int:
    """For how many seconds a lease is alive now, 0 if it is not. The gateway has this call for a stream."""
    inner = body.get("result")
    return number(inner if isinstance(inner, dict) else body, "TTL")


def transaction(body: Mapping[str, Any]) -> tuple[Position, bool, KeyValue | None]:
    """When it was made, whether its condition held, and if not, the key that its other branch has read."""
    try:
        ranges = [each["response_range"] for each in body.get("responses") or () if "response_range" in each]
    except _WRONG:
        raise _foreign() from None
    found = [item for each in ranges for item in key_values(each)]
    return position(body), bool(body.get("succeeded")), found[0] if found else None


def stream_object(line: bytes, server: str) -> dict[str, Any]:
    """One object of a stream. Raises what it means if it is an error."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Useless("it answers with something that is no JSON object")
    result = body.get("result")
    if not isinstance(result, dict):
        raise refusal(server, body, 500)
    return watch_object(result, server)


def watch_object(result: dict[str, Any], server: str) -> dict[str, Any]:
    """What a watch tells. Raises what it means if that is the end."""
    if result.get("canceled"):
        raise _end_of_watch(result, server)
    return result


def began(result: Mapping[str, Any], after: Position) -> None:
    """See from the first object of a watch whether the changes after a position will come."""
    if not result.get("created"):
        raise _foreign()
    check_history(after, position(result))


def changes(
    result: Mapping[str, Any], begun: Position, after: Position
) -> tuple[list[tuple[str, KeyValue]], Position]:
    """What an object of a watch tells: "put" or "delete", and the key; and up to where.

    What happened before the watch was ``begun`` is left out; ``after`` is how far it had come. Without
    events an object tells up to its header. With some it does not: while a watch catches up, the header is
    ahead of the events.
    """
    try:
        told = [_event(raw) for raw in result.get("events") or ()]
    except _WRONG:
        raise _foreign() from None
    at = position(result)
    reached = max((item.modified for _, item in told), default=at.index)
    news = [(action, item) for action, item in told if item.modified > begun.index]
    return news, Position(max(after.index, reached), at.cluster)


def _end_of_watch(result: Mapping[str, Any], server: str) -> Exception:
    if number(result, "compact_revision"):
        return ListAgain("etcd has forgotten what happened since")
    reason = result.get("cancel_reason")
    return refusal(server, {"message": reason}, 500)


def _key_value(raw: Mapping[str, Any]) -> KeyValue:
    return KeyValue(
        _text(raw["key"]),
        _text(raw.get("value", "")),
        str(int(raw.get("lease", 0))),
        int(raw["mod_revision"]),
    )


def _event(raw: Mapping[str, Any]) -> tuple[str, KeyValue]:
    return ("delete" if raw.get("type") == "DELETE" else "put"), _key_value(raw["kv"])


def _text(coded: str) -> str:
    """Bytes as text; what is no text cannot be a lease, and is only named in a complaint."""
    return b64decode(coded, validate=True).decode("utf-8", "replace")


def _foreign() -> Useless:
    return Useless("it answers with JSON that is not etcd's")
