"""Protobuf encoding of etcd's messages, from and to the objects of etcd's JSON gateway (pure).

So gRPC and gateway share one parser. The mapping is proto3's JSON: bytes are base64, 64-bit numbers are
strings, zero values are omitted. Only used messages and fields are listed; others are skipped, as protobuf
demands. Source: etcd's ``rpc.proto`` and ``kv.proto``.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

#: Wire types of a field.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WORD = (1 << 64) - 1
#: Bytes of a 64-bit number, at most.
_LONGEST_VARINT = 10


class MalformedProtobuf(ValueError):
    """Error for bytes that are not a valid message."""


class Field(Struct, frozen=True, gc=False):
    """A field. ``kind`` is a scalar type of protobuf, a message, or the names of an enumeration."""

    number: int
    kind: str | MessageType | tuple[str, ...]
    repeated: bool = False


class MessageType:
    """A message type: its fields by name, and by number for decoding."""

    __slots__ = ("fields", "numbers")

    def __init__(self, **fields: Field) -> None:
        self.fields = fields
        self.numbers = {field.number: (name, field) for name, field in fields.items()}


class Method(Struct, frozen=True, gc=False):
    """A call. ``name`` is its path in gRPC."""

    name: str
    request: MessageType
    response: MessageType


def encode(message: MessageType, body: Mapping[str, Any]) -> bytes:
    """Encode a message. Each given field is sent, even if it is zero."""
    parts = []
    for name, value in body.items():
        field = message.fields[name]
        parts += [_encoded(field, each) for each in (value if field.repeated else (value,))]
    return b"".join(parts)


def decode(message: MessageType, data: bytes) -> dict[str, Any]:
    """Decode a message. Raises ``MalformedProtobuf``."""
    found: dict[str, Any] = {}
    try:
        at = 0
        while at < len(data):
            number, wire, raw, at = _next_field(data, at)
            name, field = message.numbers.get(number, ("", None))
            if field is None:
                continue
            value = _understood(field.kind, wire, raw)
            if field.repeated:
                found.setdefault(name, []).append(value)
            else:
                found[name] = value
    except IndexError:
        raise MalformedProtobuf("the message breaks off") from None
    return found


def _encoded(field: Field, value: Any) -> bytes:
    match field.kind:
        case MessageType() as message:
            data = encode(message, value)
        case "bytes":
            data = b64decode(value)
        case "string":
            data = value.encode()
        case "bool" | "int64" | "uint64":
            return _varint(field.number << 3 | _VARINT) + _varint(int(value))
        case names:
            return _varint(field.number << 3 | _VARINT) + _varint(names.index(value))
    return _varint(field.number << 3 | _BYTES) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    """Encode a number: seven bits per byte, lowest first; negative numbers as 64-bit two's complement."""
    number &= _WORD
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _next_field(data: bytes, at: int) -> tuple[int, int, int | bytes, int]:
    """Return number, wire type and content of the field at an offset, and the offset of the next field."""
    tag, at = _read_varint(data, at)
    wire = tag & 7
    if wire == _VARINT:
        number, at = _read_varint(data, at)
        return tag >> 3, wire, number, at
    if wire == _BYTES:
        size, at = _read_varint(data, at)
    else:
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
    end = at + size
    if not size and wire != _BYTES:
        raise MalformedProtobuf(f"nothing of etcd's begins with {wire}")
    if end > len(data):
        raise IndexError
    return tag >> 3, wire, data[at:end], end


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift, begin = byte & 0x7F, 7, at
    while byte >= 0x80:
        at += 1
        byte = data[at]
        number |= (byte & 0x7F) << shift
        shift += 7
        if at - begin >= _LONGEST_VARINT:
            raise MalformedProtobuf("a number does not end")
    return number & _WORD, at + 1


def _understood(kind: str | MessageType | tuple[str, ...], wire: int, raw: int | bytes) -> Any:
    is_text = kind in ("bytes", "string") or isinstance(kind, MessageType)
    if wire != (_BYTES if is_text else _VARINT):
        raise MalformedProtobuf(f"a field begins with {wire}")
    if isinstance(raw, int):
        return _number(kind, raw)
    if isinstance(kind, MessageType):
        return decode(kind, raw)
    return b64encode(raw).decode() if kind == "bytes" else raw.decode("utf-8", "replace")


def _number(kind: str | MessageType | tuple[str, ...], raw: int) -> Any:
    if kind == "bool":
        return bool(raw)
    if isinstance(kind, tuple):
        return kind[raw] if raw < len(kind) else raw
    return str(raw - (1 << 64) if kind == "int64" and raw >> 63 else raw)


# ---- etcd's messages -----------------------------------------------------------------------------

_HEADER = MessageType(cluster_id=Field(1, "uint64"), revision=Field(3, "int64"))
_KEY_VALUE = MessageType(
    key=Field(1, "bytes"),
    create_revision=Field(2, "int64"),
    mod_revision=Field(3, "int64"),
    value=Field(5, "bytes"),
    lease=Field(6, "int64"),
)
_EVENT = MessageType(type=Field(1, ("PUT", "DELETE")), kv=Field(2, _KEY_VALUE))
_HEADER_ONLY = MessageType(header=Field(1, _HEADER))

_RANGE = MessageType(
    key=Field(1, "bytes"), range_end=Field(2, "bytes"), limit=Field(3, "int64"), revision=Field(4, "int64")
)
_RANGE_ANSWER = MessageType(
    header=Field(1, _HEADER), kvs=Field(2, _KEY_VALUE, repeated=True), more=Field(3, "bool")
)
_DELETE = MessageType(key=Field(1, "bytes"))
_PUT = MessageType(key=Field(1, "bytes"), value=Field(2, "bytes"), lease=Field(3, "int64"))

_COMPARE = MessageType(
    result=Field(1, ("EQUAL",)),
    target=Field(2, ("VERSION", "CREATE", "MOD")),
    key=Field(3, "bytes"),
    create_revision=Field(5, "int64"),
    mod_revision=Field(6, "int64"),
)
_OPERATION = MessageType(
    request_range=Field(1, _RANGE), request_put=Field(2, _PUT), request_delete_range=Field(3, _DELETE)
)
_TRANSACTION = MessageType(
    compare=Field(1, _COMPARE, repeated=True),
    success=Field(2, _OPERATION, repeated=True),
    failure=Field(3, _OPERATION, repeated=True),
)
_TRANSACTION_ANSWER = MessageType(
    header=Field(1, _HEADER),
    succeeded=Field(2, "bool"),
    responses=Field(3, MessageType(response_range=Field(1, _RANGE_ANSWER)), repeated=True),
)

_LEASE = MessageType(ID=Field(1, "int64"))
_LEASE_ANSWER = MessageType(header=Field(1, _HEADER), ID=Field(2, "int64"), TTL=Field(3, "int64"))
_LOGIN = MessageType(name=Field(1, "string"), password=Field(2, "string"))

_WATCH = MessageType(
    create_request=Field(
        1,
        MessageType(
            key=Field(1, "bytes"),
            range_end=Field(2, "bytes"),
            start_revision=Field(3, "int64"),
            progress_notify=Field(4, "bool"),
        ),
    )
)
_WATCH_ANSWER = MessageType(
    header=Field(1, _HEADER),
    created=Field(3, "bool"),
    canceled=Field(4, "bool"),
    compact_revision=Field(5, "int64"),
    cancel_reason=Field(6, "string"),
    events=Field(11, _EVENT, repeated=True),
)

#: Calls by their path in the gateway.
METHODS: Mapping[str, Method] = {
    "/kv/range": Method("/etcdserverpb.KV/Range", _RANGE, _RANGE_ANSWER),
    "/kv/txn": Method("/etcdserverpb.KV/Txn", _TRANSACTION, _TRANSACTION_ANSWER),
    "/lease/grant": Method(
        "/etcdserverpb.Lease/LeaseGrant", MessageType(TTL=Field(1, "int64")), _LEASE_ANSWER
    ),
    "/lease/keepalive": Method("/etcdserverpb.Lease/LeaseKeepAlive", _LEASE, _LEASE_ANSWER),
    "/kv/lease/timetolive": Method("/etcdserverpb.Lease/LeaseTimeToLive", _LEASE, _LEASE_ANSWER),
    "/kv/lease/revoke": Method("/etcdserverpb.Lease/LeaseRevoke", _LEASE, _HEADER_ONLY),
    "/auth/authenticate": Method(
        "/etcdserverpb.Auth/Authenticate",
        _LOGIN,
        MessageType(header=Field(1, _HEADER), token=Field(2, "string")),
    ),
    "/watch": Method("/etcdserverpb.Watch/Watch", _WATCH, _WATCH_ANSWER),
}
