"""Keys of WireGuard, with the vectors of RFC 7748."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.backends.wireguard import keys
from flanneld.errors import Refused
from flanneld.model import Secret

BASE_POINT = bytes([9]) + bytes(31)


# RFC 7748, section 5.2: scalar, point, result.
@pytest.mark.parametrize(
    ("scalar", "point", "result"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_multiplication_agrees_with_the_rfc(scalar: str, point: str, result: str) -> None:
    assert keys.x25519(bytes.fromhex(scalar), bytes.fromhex(point)).hex() == result


# RFC 7748, section 5.2: the base point as scalar and point, and then each result as the next scalar.
@pytest.mark.parametrize(
    ("times", "result"),
    [
        (1, "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"),
        (1000, "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"),
    ],
)
def test_repeated_multiplication_agrees_with_the_rfc(times: int, result: str) -> None:
    scalar = point = BASE_POINT
    for _ in range(times):
        scalar, point = keys.x25519(scalar, point), scalar
    assert scalar.hex() == result


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_two_ends_agree_on_a_shared_secret(one: bytes, other: bytes) -> None:
    ours, theirs = keys.private_key(one), keys.private_key(other)
    shared = keys.x25519(ours.value, keys.public_key(theirs))
    assert shared == keys.x25519(theirs.value, keys.public_key(ours))


@given(st.binary(min_size=32, max_size=32))
def test_a_private_key_is_clamped(random: bytes) -> None:
    raw = keys.private_key(random).value
    assert raw[0] & 7 == 0
    assert raw[31] & 0xC0 == 0x40
    assert raw[1:31] == random[1:31]


@given(st.binary(min_size=32, max_size=32))
def test_the_text_of_a_key_is_read_again(key: bytes) -> None:
    text = keys.text_of(key)
    assert (keys.parse(text), keys.parse(f"{text[:20]}\r\n{text[20:]}\n")) == (key, key)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has 0 bytes, not 32"),
        ("AAAA", "has 3 bytes, not 32"),
        ("A" * 43, "no base64"),
        ("*" * 44, "no base64"),
        ("A" * 43 + " =", "no base64"),
        ("\u00e4" * 44, "no base64"),
        (keys.text_of(bytes(33)), "has 33 bytes, not 32"),
    ],
)
def test_invalid_key_is_refused_without_being_shown(text: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        keys.parse(text)
    assert not text or text not in str(refused.value)


def test_a_secret_is_never_shown() -> None:
    secret = Secret(b"k" * 32)
    assert {repr(secret), str(secret), f"{secret}", repr([secret])} == {"Secret(...)", "[Secret(...)]"}
