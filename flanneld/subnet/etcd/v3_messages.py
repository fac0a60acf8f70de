"""Messages of the JSON gateway of etcd's v3 API.

Bytes are base64, 64-bit numbers are strings, and zero values are omitted. Messages that etcd never sends
raise ``ServerFailed``. Source: etcd's ``rpc.proto``, ``kv.proto`` and ``error.go``.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from flanneld.errors import Retryable
from flanneld.subnet.etcd.keys import NO_ACCESS, Position, StoredKey, check_history, remedy_for
from flanneld.subnet.etcd.transport import Answer, json_object, not_etcd, parsed_object
from flanneld.subnet.failover import ServerFailed
from flanneld.subnet.list_watch import RelistNeeded

_CANCELLED, _DEADLINE_EXCEEDED, _NOT_FOUND = 1, 4, 5
_PERMISSION_DENIED, _UNAVAILABLE, _UNAUTHENTICATED = 7, 14, 16
#: etcd has no separate codes for these errors. The Go client logs in again for the same texts.
_LOGIN_NEEDED = ("user name is empty", "revision of auth store is old", "invalid auth token")
_LOGIN_REFUSED = ("authentication failed", "permission denied", "permission is not given")
_CERTIFICATE_NAMES_USER = "CommonName of client"

_LARGEST = (1 << 63) - 1
_Int64 = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]


class KeyValue(
    Struct, frozen=True, gc=False, rename={"modified": "mod_revision", "created": "create_revision"}
):
    """A key of v3. ``lease`` is the ID of the lease it expires with, 0 for none."""

    key: bytes
    modified: _Int64
    value: bytes = b""
    lease: _Int64 = 0
    created: _Int64 = 0

    def node(self, ttl: float = math.inf) -> StoredKey:
        """Return the key as a node.

        Bytes that are not UTF-8 cannot be a lease and only appear in a log line.
        """
        key, value = (each.decode("utf-8", "replace") for each in (self.key, self.value))
        return StoredKey(key, value, ttl if self.lease else None, self.modified, created=self.created)


class Header(Struct, frozen=True, gc=False):
    """Revision and cluster at the time of a message. Nested messages have none."""

    revision: _Int64 = 0
    cluster_id: int = 0


class KeyEvent(Struct, frozen=True, gc=False):
    """A change of a key."""

    kv: KeyValue
    type: str = "PUT"


class GatewayMessage(Struct, frozen=True, gc=False):
    """The used fields of any of etcd's messages. Zero values are omitted."""

    header: Header | None = None
    kvs: list[KeyValue] | None = None
    more: bool = False
    ID: _Int64 = 0
    TTL: _Int64 = 0
    token: str = ""
    succeeded: bool = False
    #: Fields of a transaction's response.
    responses: list[GatewayMessage] | None = None
    response_range: GatewayMessage | None = None
    #: Fields of a message in a stream.
    result: GatewayMessage | None = None
    created: bool = False
    canceled: bool = False
    cancel_reason: str | None = None
    compact_revision: _Int64 = 0
    events: list[KeyEvent] | None = None

    @property
    def at(self) -> Position:
        """Position in the history. Raises ``ServerFailed`` if the message has none."""
        if not (self.header and self.header.revision and self.header.cluster_id):
            raise _foreign()
        return Position(self.header.revision, str(self.header.cluster_id))


#: Function that calls one server, given the gateway's path, the body, and a token or "".
#: Raises ``ServerFailed``.
CallServer = Callable[[str, Mapping[str, object], str], GatewayMessage]

_DECODER = msgspec.json.Decoder(GatewayMessage, strict=False)  # numbers may be strings


#: Messages of a watch that are read at once, at most.
BATCH = 1000


class AccessRefused(Retryable):
    """Error for a request that etcd does not permit.

    Some versions send it for a watch with an expired login.
    """


class LoginNeeded(AccessRefused):
    """Error for a missing or expired login."""


class GatewayRefused(Retryable):
    """Error for a JSON gateway that cannot serve us, where gRPC may."""


class LeaseGone(Retryable):
    """Error for an etcd lease that does not exist."""


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def text64(text: str) -> str:
    return b64encode(encoded(text)).decode()


def directory(path: str) -> dict[str, str]:
    """Return the key range below a path."""
    return {"key": text64(f"{path}/"), "range_end": text64(f"{path}0")}  # 0 follows the slash in ASCII


def is_unknown_path(answer: Answer) -> bool:
    """Return True if the server lacks this path: its gateway is off, or its version differs."""
    return answer.status == 404 and json_object(answer) is None


def read(answer: Answer) -> GatewayMessage:
    """Return the message of a response, or raise its error."""
    if answer.status == 200:
        return _decoded(answer.body or b"", partial(not_etcd, answer))
    body = json_object(answer)
    if body is not None:
        raise refusal(answer.server, body, answer.status)
    if _CERTIFICATE_NAMES_USER.encode() in (answer.body or b""):
        raise GatewayRefused(
            f"etcd at {answer.server} takes no login over JSON with a certificate that has a common name",
            "set -etcd-certfile to one without, as etcd's guide to role-based access says",
        )
    if answer.status >= 500:
        raise ServerFailed(f"HTTP {answer.status}", remedy_for(""))
    if answer.status in (401, 403):
        raise Retryable(f"etcd at {answer.server} refuses access (HTTP {answer.status})", NO_ACCESS)
    raise not_etcd(answer)


def refusal(server: str, body: Mapping[str, Any], status: int) -> Exception:
    """Return the exception for an error, sent as a response or within a stream."""
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
        return ServerFailed(text, remedy_for(text))
    if isinstance(code, int):
        return Retryable(f"etcd at {server} refuses: {text} (error {code})", remedy_for(text))
    return ServerFailed(f"HTTP {status}, {text}")


def understood(body: Mapping[str, Any]) -> GatewayMessage:
    """Return the message for a JSON object. Raises ``ServerFailed`` if it is not etcd's."""
    try:
        return msgspec.convert(body, GatewayMessage, strict=False)  # numbers may be strings
    except msgspec.ValidationError:
        raise _foreign() from None


def other_branch(transaction: GatewayMessage) -> KeyValue | None:
    """Return the key read by a transaction whose condition did not hold, or None."""
    ranges = [each.response_range for each in transaction.responses or () if each.response_range]
    return next((found for each in ranges for found in each.kvs or ()), None)


def stream_object(line: bytes, server: str) -> GatewayMessage:
    """Return the message in one line of a stream. Raises the error it stands for."""
    result = _decoded(line, _no_object).result
    if result is None:
        # What has no result was not decoded: it may be no text.
        raise refusal(server, parsed_object(line) or {}, 500)
    return watch_object(result, server)


def watch_object(result: GatewayMessage, server: str) -> GatewayMessage:
    """Return the message of a watch. Raises the error that ended the watch."""
    if not result.canceled:
        return result
    if result.compact_revision:
        raise RelistNeeded("etcd has compacted its history since")
    raise refusal(server, {"message": result.cancel_reason}, 500)


def began(result: GatewayMessage, after: Position) -> None:
    """Check from the first message of a watch that the changes after a position will follow."""
    if not result.created:
        raise _foreign()
    check_history(after, result.at)


def changes(
    result: GatewayMessage, begun: Position, after: Position
) -> tuple[list[tuple[str, KeyValue]], Position]:
    """Return the changes in a watch message, as pairs of "put" or "delete" and key, and the position reached.

    Changes before ``begun``, the start of the watch, are dropped. ``after`` is the position reached before. A
    message without events reaches the revision in its header. One with events does not: while a watch catches
    up, the header is ahead of the events.
    """
    told = [("delete" if each.type == "DELETE" else "put", each.kv) for each in result.events or ()]
    reached = max((item.modified for _, item in told), default=result.at.index)
    news = [(action, item) for action, item in told if item.modified > begun.index]
    return news, Position(max(after.index, reached), result.at.cluster)


def _decoded(text: bytes, no_object: Callable[[], ServerFailed]) -> GatewayMessage:
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise no_object() if parsed_object(text) is None else _foreign() from None


def _no_object() -> ServerFailed:
    return ServerFailed("it answers with something that is no JSON object")


def _foreign() -> ServerFailed:
    return ServerFailed("it answers with JSON that is not etcd's")
