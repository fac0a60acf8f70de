"""Queries and their answers as bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import FAMILIES, Family
from flanneld.network.query import (
    TOKEN_LENGTH,
    Query,
    answer,
    decode,
    decode_answer,
    echo_request,
    echo_token,
    requested_token,
    token_of,
)

TOKEN = bytes(range(TOKEN_LENGTH))
FACTS = {"version": "1.0", "mtu": 1450}


@pytest.mark.parametrize("unsummed", [False, True])
def test_query_is_read_as_it_was_written(unsummed: bool) -> None:
    query = Query(TOKEN, 300, unsummed)
    assert decode(query.encode(400)) == query
    assert len(query.encode(400)) == 400
    assert token_of(query.encode(0)) == TOKEN


def test_answer_brings_token_and_facts_in_the_wanted_size() -> None:
    query = decode(Query(TOKEN, 300).encode(400))
    assert query is not None
    data = answer(query, FACTS)
    assert (len(data), decode_answer(data)) == (300, (TOKEN, FACTS))


@given(st.integers(0, 65535), st.integers(0, 2000), st.dictionaries(st.text(), st.text(), max_size=20))
def test_answer_is_never_larger_than_its_query(desired: int, size: int, facts: dict[str, str]) -> None:
    data = Query(TOKEN, desired).encode(size)
    query = decode(data)
    assert query is not None
    assert len(answer(query, facts)) <= len(data)


@given(st.binary(max_size=100))
def test_garbage_is_neither_query_nor_answer(data: bytes) -> None:
    for start in (b"", b"flannel?1"[:5], b"flannel!1" + TOKEN):
        assert decode(start + data) is None
    assert decode_answer(data) is None
    found = decode_answer(b"flannel!1" + TOKEN + data)
    assert found is None or isinstance(found[1], dict)


def test_deeply_nested_answer_is_refused() -> None:
    assert decode_answer(b"flannel!1" + TOKEN + b"[" * 60_000) is None


#: Bytes of an answer before its facts.
HEAD = len(b"flannel!1") + TOKEN_LENGTH


@pytest.mark.parametrize(("room", "fits"), [(len('{"mtu":1450}'), True), (len('{"mtu":1450}') - 1, False)])
def test_facts_that_do_not_fit_are_left_out(room: int, fits: bool) -> None:
    data = answer(Query(TOKEN, HEAD + room), {"mtu": 1450})
    assert (len(data), decode_answer(data)) == (HEAD + room, (TOKEN, {"mtu": 1450} if fits else {}))


def test_last_facts_are_left_out_until_all_fit() -> None:
    facts = {"mtu": 1450, "store": "file", "containers": ["10.5.1.2"]}
    room = len('{"mtu":1450,"store":"file"}')
    assert decode_answer(answer(Query(TOKEN, HEAD + room), facts)) == (TOKEN, {"mtu": 1450, "store": "file"})
    assert decode_answer(answer(Query(TOKEN, HEAD + room - 1), facts)) == (TOKEN, {"mtu": 1450})


def test_query_that_is_cut_off_is_none() -> None:
    whole = Query(TOKEN, 300).encode(0)
    assert decode(whole) == Query(TOKEN, len(whole))
    assert decode(whole[:-1]) is None
    assert token_of(whole[:-1]) == b""
    head = answer(Query(TOKEN, 0), {})[:HEAD]
    assert decode_answer(head) is None
    assert decode_answer(head + b"[]") is None
    assert decode_answer(head + b"{}") == (TOKEN, {})


# ---- ICMP echo (RFC 792, RFC 4443) ---------------------------------------------------------------

REQUEST = {4: 8, 6: 128}
REPLY = {4: 0, 6: 129}


@given(st.binary(max_size=40), st.integers(0, 0xFFFF))
def test_sum_of_an_echo_request_of_ipv4_is_that_of_its_words(token: bytes, identifier: int) -> None:
    data = echo_request(4, token, identifier)
    assert struct.unpack_from("!BBxxHH", data) == (8, 0, identifier, 0)
    assert data[8:] == token
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    assert total % 0xFFFF == 0  # RFC 1071: in ones' complement it is 0


def test_sum_of_an_echo_request_of_ipv6_is_the_kernels() -> None:
    assert echo_request(6, TOKEN, 7) == bytes((128, 0, 0, 0, 0, 7, 0, 0)) + TOKEN


@pytest.mark.parametrize("family", FAMILIES)
def test_token_of_an_echo_is_that_of_its_reply(family: Family) -> None:
    reply = bytes((REPLY[family],)) + bytes(7) + TOKEN
    request = bytes((REQUEST[family],)) + bytes(7) + TOKEN
    assert echo_token(family, reply, with_header=False) == TOKEN
    assert echo_token(family, request, with_header=False) == b""
    assert requested_token(family, request) == TOKEN
    assert requested_token(family, reply) == b""
    assert echo_token(family, b"", with_header=True) == b""


@pytest.mark.parametrize("words", [5, 6, 15])
def test_header_of_ipv4_is_skipped_in_its_whole_length(words: int) -> None:
    header = bytes((0x40 | words,)) + bytes(4 * words - 1)
    reply = bytes(8) + TOKEN
    assert echo_token(4, header + reply, with_header=True) == TOKEN
    of_ipv6 = bytes((129,)) + bytes(7) + TOKEN
    assert echo_token(6, of_ipv6, with_header=True) == TOKEN
