"""Messages of etcd on the wire: what protobuf makes of them, and what comes of anything else."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.subnet.etcd.protobuf import METHODS, Field, MalformedProtobuf, MessageType, decode, encode
from tests.unit.mutations import tampered_bytes

INNER = MessageType(name=Field(1, "string"))
SAMPLE = MessageType(
    flag=Field(1, "bool"),
    signed=Field(2, "int64"),
    unsigned=Field(3, "uint64"),
    data=Field(4, "bytes"),
    kind=Field(5, ("PUT", "DELETE")),
    inner=Field(6, INNER),
    many=Field(100, INNER, repeated=True),
)
#: What protobuf's own library makes of them.
WIRE: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"flag": True}, "0801"),
    ({"signed": "150"}, "109601"),
    ({"signed": "-1"}, "10ffffffffffffffffff01"),
    ({"unsigned": str(2**64 - 1)}, "18ffffffffffffffffff01"),
    ({"data": "AP8="}, "220200ff"),
    ({"kind": "DELETE"}, "2801"),
    ({"inner": {"name": "testing"}}, "32090a0774657374696e67"),
    ({"many": [{"name": "a"}, {"name": "b"}]}, "a206030a0161a206030a0162"),
]

RANGE = METHODS["/kv/range"].response
KEY_VALUE = {"key": "L2E=", "mod_revision": "7", "value": "eyJ9", "lease": "-9"}
ANSWERS: list[tuple[MessageType, dict[str, Any]]] = [
    (RANGE, {"header": {"cluster_id": "1", "revision": "5"}, "kvs": [KEY_VALUE, KEY_VALUE]}),
    (
        METHODS["/watch"].response,
        {
            "header": {"cluster_id": "1", "revision": "5"},
            "canceled": True,
            "compact_revision": "4",
            "cancel_reason": "why",
            "events": [{"type": "DELETE", "kv": KEY_VALUE}],
        },
    ),
]


@pytest.mark.parametrize(("body", "wire"), WIRE)
def test_a_message_is_on_the_wire_as_protobuf_has_it(body: dict[str, Any], wire: str) -> None:
    assert encode(SAMPLE, body).hex() == wire
    assert decode(SAMPLE, bytes.fromhex(wire)) == body


def test_explicit_zero_is_encoded() -> None:
    assert encode(SAMPLE, {"signed": "0", "inner": {}}).hex() == "10003200"


@pytest.mark.parametrize("strange", ["b806ac02", "b9060102030405060708", "ba0603616263", "bd0601020304"])
def test_fields_that_are_not_known_are_passed_over(strange: str) -> None:
    assert decode(SAMPLE, bytes.fromhex(f"{strange}0801{strange}")) == {"flag": True}


def test_an_enumeration_may_have_grown() -> None:
    assert decode(SAMPLE, bytes.fromhex("2807")) == {"kind": 7}


@pytest.mark.parametrize(
    "wire",
    ["08", "0880", "22ff01", "2202ff", "0a0101", "10" + "ff" * 11, "0b", "0f", "32030a0561", "b906010203"],
)
def test_invalid_message_is_refused(wire: str) -> None:
    with pytest.raises(MalformedProtobuf):
        decode(SAMPLE, bytes.fromhex(wire))


@pytest.mark.parametrize(("kind", "body"), ANSWERS)
def test_an_answer_survives_the_wire(kind: MessageType, body: dict[str, Any]) -> None:
    assert decode(kind, encode(kind, body)) == body


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300), st.text(max_size=20))
def test_any_value_survives_the_wire(number: int, data: bytes, text: str) -> None:
    body = {"signed": str(number), "data": b64encode(data).decode(), "inner": {"name": text}}
    assert decode(SAMPLE, encode(SAMPLE, body)) == body


@given(st.sampled_from([method.response for method in METHODS.values()]), st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(kind: MessageType, data: bytes) -> None:
    try:
        assert isinstance(decode(kind, data), dict)
    except MalformedProtobuf:
        return


@given(tampered_bytes([encode(kind, body) for kind, body in ANSWERS]))
def test_a_tampered_answer_is_a_message_or_refused(data: bytes) -> None:
    for kind, _ in ANSWERS:
        try:
            assert isinstance(decode(kind, data), dict)
        except MalformedProtobuf:
            continue
