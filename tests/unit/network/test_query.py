"""Queries and their answers as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.network.query import TOKEN_LENGTH, Query, answer, decode, decode_answer, token_of

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
