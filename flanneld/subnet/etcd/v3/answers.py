"""What the JSON gateway of etcd's v3 API says and hears (pure).

Bytes are in base64, 64-bit numbers are text, and what is zero is left out. What no etcd says raises
``Useless``. Source: etcd's ``rpc.proto``, ``kv.proto`` and ``error.go``.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from flanneld.errors import Retryable
from flanneld.subnet.etcd.http import NO_ACCESS, Answer, Useless, json_object, nonsense, parsed_object
from flanneld.subnet.etcd.keys import ListAgain, Node, Position, check_history

_CANCELLED, _DEADLINE_EXCEEDED, _NOT_FOUND = 1, 4, 5
_PERMISSION_DENIED, _UNAVAILABLE, _UNAUTHENTICATED = 7, 14, 16
#: etcd has no code of their own for these. The Go client logs in again for the same.
_LOGIN_NEEDED = ("user name is empty", "revision of auth store is old", "invalid auth token")
_LOGIN_REFUSED = ("authentication failed", "permission denied", "permission is not given")
_CERTIFICATE_NAMES_USER = "CommonName of client"

_LARGEST = (1 << 63) - 1
_Int64 = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]


class KeyValue(Struct, frozen=True, gc=False, rename={"modified": "mod_revision"}):
    """A key as v3 has it; ``lease`` is the ID of the lease it ends with, 0 if it stays."""

    key: bytes
    modified: _Int64
    value: bytes = b""
    lease: _Int64 = 0

    def node(self, ttl: float = math.inf) -> Node:
        """What is no text cannot be a lease, and is only named in a complaint."""
        key, value = (each.decode("utf-8", "replace") for each in (self.key, self.value))
        return Node(key, value, ttl if self.lease else None, self.modified)


class Header(Struct, frozen=True, gc=False):
    """How far the history had come when a message was sent; inside of another one that is left out."""

    revision: _Int64 = 0
    cluster_id: int = 0


class Event(Struct, frozen=True, gc=False):
    """A change of a key."""

    kv: KeyValue
    type: str = "PUT"


class Message(Struct, frozen=True, gc=False):
    """What etcd says, of any kind, as far as it is used here. What is zero is left out."""

    header: Header | None = None
    kvs: list[KeyValue] | None = None
    deleted: _Int64 = 0
    ID: _Int64 = 0
    TTL: _Int64 = 0
    token: str = ""
    succeeded: bool = False
    #: Of a transaction.
    responses: list[Message] | None = None
    response_range: Message | None = None
    #: In a stream.
    result: Message | None = None
    created: bool = False
    canceled: bool = False
    cancel_reason: str | None = None
    compact_revision: _Int64 = 0
    events: list[Event] | None = None

    @property
    def at(self) -> Position:
        """Where the history stood. Raises ``Useless`` if the message does not say so."""
        if not (self.header and self.header.revision and self.header.cluster_id):
            raise _foreign()
        return Position(self.header.revision, str(self.header.cluster_id))


_DECODER = msgspec.json.Decoder(Message, strict=False)  # numbers may be text


class AccessRefused(Retryable):
    """What is asked for is not ours; of a watch some versions also say so when the login is outdated."""


class LoginNeeded(AccessRefused):
    """Who asks has to log in, or to log in again."""


class GatewayRefused(Retryable):
    """The JSON gateway is not for us; gRPC may be."""


class LeaseGone(Retryable):
    """There is no such lease."""


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def text64(text: str) -> str:
    return b64encode(encoded(text)).decode()


def directory(path: str) -> dict[str, str]:
    """The range of keys below a path."""
    return {"key": text64(f"{path}/"), "range_end": text64(f"{path}0")}  # 0 comes after the slash


def is_unknown_path(answer: Answer) -> bool:
    """Whether the server has nothing there: its gateway is off, or etcd is of another version."""
    return answer.status == 404 and json_object(answer) is None


def read(answer: Answer) -> Message:
    """The message that an answer is. Raises what it means otherwise."""
    if answer.status == 200:
        return _decoded(answer.body or b"", nonsense(answer))
    body = json_object(answer)
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


def understood(body: Mapping[str, Any]) -> Message:
    """The message that an object is. Raises ``Useless`` for what no etcd says."""
    try:
        return msgspec.convert(body, Message, strict=False)  # numbers may be text
    except msgspec.ValidationError:
        raise _foreign() from None


def other_branch(transaction: Message) -> KeyValue | None:
    """The key that a transaction has read whose condition did not hold."""
    ranges = [each.response_range for each in transaction.responses or () if each.response_range]
    return next((found for each in ranges for found in each.kvs or ()), None)


def stream_object(line: bytes, server: str) -> Message:
    """One object of a stream. Raises what it means if it is an error."""
    result = _decoded(line, Useless("it answers with something that is no JSON object")).result
    if result is None:
        raise refusal(server, json.loads(line), 500)
    return watch_object(result, server)


def watch_object(result: Message, server: str) -> Message:
    """What a watch tells. Raises what it means if that is the end."""
    if not result.canceled:
        return result
    if result.compact_revision:
        raise ListAgain("etcd has forgotten what happened since")
    raise refusal(server, {"message": result.cancel_reason}, 500)


def began(result: Message, after: Position) -> None:
    """See from the first object of a watch whether the changes after a position will come."""
    if not result.created:
        raise _foreign()
    check_history(after, result.at)


def changes(result: Message, begun: Position, after: Position) -> tuple[list[tuple[str, KeyValue]], Position]:
    """What an object of a watch tells: "put" or "delete", and the key; and up to where.

    What happened before the watch was ``begun`` is left out; ``after`` is how far it had come. Without
    events an object tells up to its header. With some it does not: while a watch catches up, the header is
    ahead of the events.
    """
    told = [("delete" if each.type == "DELETE" else "put", each.kv) for each in result.events or ()]
    reached = max((item.modified for _, item in told), default=result.at.index)
    news = [(action, item) for action, item in told if item.modified > begun.index]
    return news, Position(max(after.index, reached), result.at.cluster)


def _decoded(text: bytes, no_json: Useless) -> Message:
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise no_json if parsed_object(text) is None else _foreign() from None


def _foreign() -> Useless:
    return Useless("it answers with JSON that is not etcd's")
