"""What Go accepts we accept with the same meaning; what Go refuses we refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flanneld.compat.json import Fields, GoJsonError, address_number, compact, parse

DEEPEST = 100
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def fields(text: str) -> Fields:
    return Fields(parse(text), "Backend")


# --- reading a value


@given(json_values)
def test_every_json_value_is_read(value: object) -> None:
    assert parse(json.dumps(value)) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.text() | st.binary() | st.text(alphabet='{}[]",:\\ud8c0-1.e "N'))
def test_any_input_is_a_value_or_a_documented_error(text: str | bytes) -> None:
    with suppress(GoJsonError):
        parse(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "{}x", "{} {}", "NaN", "Infinity", "[-Infinity]", "'a'", "{'a':1}", "{a:1}", '{"a":1,}',
     "[1,]",
     "01", "+1", "1.", ".5", "1e", "0x1", "1e999", "-1e999", "9" * 5000, '"a\nb"', '"\\x"', '"\\ud8"',
     "\ufeff1",
     "True", "// no\n1"],
)  # fmt: skip
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(GoJsonError):
        parse(text)


def test_every_bad_byte_reads_as_one_replacement_character() -> None:
    assert parse(b'"a\xff\xe2\x82z"') == "a\ufffd\ufffd\ufffdz"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"\ud83dx"', "\ufffdx"),
        (r'"\ude00\ud83d"', "\ufffd\ufffd"),
        (r'"\ud83d\ud83d"', "\ufffd\ufffd"),
        (r'"\ud83d\u0041"', "\ufffdA"),
        (r'"\\ud83d"', r"\ud83d"),
        ('"\ud83d"', "\ufffd"),
    ],
)
def test_half_a_surrogate_pair_reads_as_a_replacement_character(text: str, value: str) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_a_value_may_be_nested_a_hundred_levels_deep(left: str, right: str) -> None:
    deep = left * (DEEPEST - 1) + "1" + right * (DEEPEST - 1)
    assert parse(f"[{deep}]")
    assert parse(f"[[], [], {deep}]")


@pytest.mark.parametrize("depth", [DEEPEST + 1, 100_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_deeper_nesting_is_refused(left: str, right: str, depth: int) -> None:
    with pytest.raises(GoJsonError, match=f"more than {DEEPEST} levels"):
        parse(left * depth + "1" + right * depth)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert parse("[" + "[]," * 1000 + "{}]") == [[]] * 1000 + [{}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n  b}', "this is no JSON at line 2, column 3: "),
        ("1e999", "the number 1e999 is too large"),
        ("-1e999", "the number -1e999 is too large"),
        ("1" * 50 + "e999", f"the number {'1' * 40} is too large"),
        ("9" * 5000, "a number has too many digits"),
        ("NaN", "NaN is not a JSON value"),
        ("-Infinity", "-Infinity is not a JSON value"),
    ],
)
def test_error_tells_what_is_wrong_and_where(text: str, problem: str) -> None:
    with pytest.raises(GoJsonError) as caught:
        parse(text)
    assert str(caught.value).startswith(problem)


# --- reading an object


def test_keys_match_in_any_case() -> None:
    assert fields('{"directROUTING": true}').boolean("DirectRouting", False) is True


def test_keys_match_the_two_letters_that_go_folds_into_ascii() -> None:
    assert fields('{"P\u017f\u212a": "x"}').string("PSK", "") == "x"


@pytest.mark.parametrize(
    ("text", "vni"),
    [
        ('{"VNI": 1, "VNI": 2}', 2),
        ('{"VNI": 1, "vni": 2}', 2),
        ('{"vni": 2, "VNI": 1}', 1),
        ('{"VNI": 1, "vni": 2, "VNI": 3}', 3),
        ('{"VNI": 1, "VNI": null}', 1),
        ('{"VNI": null}', 7),
        ("{}", 7),
        ("null", 7),
    ],
)
def test_the_last_of_several_equal_keys_counts_and_null_changes_nothing(text: str, vni: int) -> None:
    assert fields(text).uint("VNI", 7) == vni


def test_all_of_several_equal_keys_must_have_the_right_type() -> None:
    with pytest.raises(GoJsonError):
        fields('{"VNI": "1", "VNI": 2}').uint("VNI", 7)


@pytest.mark.parametrize("text", ["[]", '"x"', "1", "true"])
def test_only_an_object_has_fields(text: str) -> None:
    with pytest.raises(GoJsonError, match="Backend must be an object, found a"):
        fields(text)


@given(st.integers())
@example(0)
@example(-1)
@example(2**63 - 1)
@example(2**63)
@example(2**64 - 1)
@example(2**64)
@example(-(2**63))
@example(-(2**63) - 1)
def test_integers_are_those_of_sixty_four_bits(number: int) -> None:
    given_number = fields(f'{{"N": {number}}}')
    for read, low, high in (
        (given_number.uint, 0, 2**64 - 1),
        (given_number.integer, -(2**63), 2**63 - 1),
    ):
        if low <= number <= high:
            assert read("N", 5) == number
        else:
            with pytest.raises(GoJsonError, match="N must be a whole number"):
                read("N", 5)


@pytest.mark.parametrize("value", ["1.0", "1e3", "1E0", "0.5", '"1"', "true", "false", "[1]", "{}"])
def test_nothing_but_a_whole_number_is_an_integer(value: str) -> None:
    for read in (fields(f'{{"N": {value}}}').uint, fields(f'{{"N": {value}}}').integer):
        with pytest.raises(GoJsonError, match=r"Backend\.N must be a whole number"):
            read("N", 5)


@pytest.mark.parametrize("value", ["1", "0", '"true"', "[]", "{}"])
def test_nothing_but_true_and_false_is_a_boolean(value: str) -> None:
    with pytest.raises(GoJsonError, match=r"Backend\.GBP must be true or false"):
        fields(f'{{"GBP": {value}}}').boolean("GBP", False)


@pytest.mark.parametrize("value", ["1", "true", '["x"]', "{}"])
def test_nothing_but_a_string_is_a_string(value: str) -> None:
    with pytest.raises(GoJsonError, match=r"Backend\.Type must be a string"):
        fields(f'{{"Type": {value}}}').string("Type", "")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"Also": ["a", "b"]}', ["a", "b"]),
        ('{"Also": ["a"], "also": []}', []),
        ('{"Also": null}', []),
        ("{}", []),
    ],
)
def test_array_of_strings_may_be_absent_or_null(text: str, read: list[str]) -> None:
    assert fields(text).strings("Also") == read


@pytest.mark.parametrize("value", ['"a"', '{"a":"b"}', '["a",1]', "[null]", "false", "0", '""'])
def test_nothing_but_strings_is_in_an_array_of_strings(value: str) -> None:
    with pytest.raises(GoJsonError) as caught:
        fields(f'{{"Also": {value}}}').strings("Also")
    assert str(caught.value) == f"Backend.Also must be an array of strings, found {value}"


def test_an_error_tells_a_number_that_was_found() -> None:
    with pytest.raises(GoJsonError, match=r"^Backend\.Port must be .*, found -8472$"):
        fields('{"port": -8472}').uint("Port", 0)


@pytest.mark.parametrize("secret", ['"hunter2"', "47110815", '["hunter2"]'])
def test_an_error_never_tells_what_may_be_a_password(secret: str) -> None:
    read = fields(f'{{"PSK": {secret}}}')
    readers: tuple[Callable[[], object], ...] = (lambda: read.boolean("PSK", False),)
    readers += (lambda: read.uint("PSK", 0),) if secret[0] == '"' else (lambda: read.string("PSK", ""),)
    for reader in readers:
        with pytest.raises(GoJsonError) as caught:
            reader()
        assert secret.strip('[]"') not in str(caught.value)


def test_a_raw_value_is_given_as_it_is() -> None:
    read = fields('{"a": {"b": [1, 2.5, "x"]}, "c": null}')
    assert read.raw("A") == {"b": [1, 2.5, "x"]}
    assert (read.raw("c"), read.raw("d")) == (None, None)
    assert (read.has("C"), read.has("d")) == (True, False)


def test_keys_that_nobody_asked_for_are_told_with_the_nearest_name_somebody_did() -> None:
    read = fields('{"Type": "vxlan", "DirectRoute": true, "VNI": 1, "zzzz": 1, "directroute": 2}')
    for name in ("type", "VNI", "DirectRouting", "Learning"):
        read.raw(name)
    assert read.unread() == [("DirectRoute", "DirectRouting"), ("zzzz", None)]


def test_only_the_first_ten_unknown_keys_are_told() -> None:
    read = Fields({f"key{number}": 1 for number in range(12)})
    assert read.unread() == [(f"key{number}", None) for number in range(10)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (True, "a boolean"),
        (-7, "-7"),
        (-1.5, "-1.5"),
        (10**50, f"1{'0' * 39}"),
        ("7", "a string"),
        ([7], "an array"),
        ({}, "an object"),
    ],
)
def test_error_tells_the_kind_of_what_was_found_and_the_beginning_of_a_number(
    value: object, found: str
) -> None:
    with pytest.raises(GoJsonError) as caught:
        Fields({"N": value}).uint("N", 5)
    assert str(caught.value) == f"N must be a whole number of at most 64 bits, not negative, found {found}"


def test_error_tells_only_the_beginning_of_an_address() -> None:
    read = Fields({"IP": "1" * 100})
    readers: tuple[Callable[[], object], ...] = (
        lambda: read.address("IP", IPv4Address),
        lambda: read.network("IP", IPv6Network),
    )
    for reader in readers:
        with pytest.raises(GoJsonError) as caught:
            reader()
        assert str(caught.value).endswith(f', found "{"1" * 59}')


def test_top_level_that_is_no_object_is_called_so() -> None:
    with pytest.raises(GoJsonError, match=r"^the top level must be an object, found an array$"):
        Fields([])


@given(st.dictionaries(st.sampled_from(["a", "A", "b"]), json_values, max_size=3))
def test_every_reader_returns_its_type_or_the_documented_error(obj: dict[str, object]) -> None:
    read = Fields(obj)
    readers: tuple[tuple[Callable[[], object], Any], ...] = (
        (lambda: read.uint("a", 1), int),
        (lambda: read.integer("a", 1), int),
        (lambda: read.boolean("a", True), bool),
        (lambda: read.string("a", ""), str),
        (lambda: read.address("a", IPv4Address), IPv4Address | None),
        (lambda: read.address("a", IPv6Address), IPv6Address | None),
        (lambda: read.network("a", IPv4Network), IPv4Network | None),
        (lambda: read.network("a", IPv6Network), IPv6Network | None),
    )
    for reader, kind in readers:
        with suppress(GoJsonError):
            assert isinstance(reader(), kind)


# --- addresses and networks


@pytest.mark.parametrize(
    ("value", "address"),
    [('"10.1.2.3"', IPv4Address("10.1.2.3")), ('"0.0.0.0"', None)],
)
def test_an_ipv4_address_of_zeros_is_none(value: str, address: IPv4Address | None) -> None:
    assert fields(f'{{"IP": {value}}}').address("IP", IPv4Address) == address


@pytest.mark.parametrize(
    ("value", "address"),
    [('"fd00::1"', IPv6Address("fd00::1")), ('"::"', None), ("null", None)],
)
def test_an_ipv6_address_may_be_null(value: str, address: IPv6Address | None) -> None:
    assert fields(f'{{"IP": {value}}}').address("IP", IPv6Address) == address


def test_last_of_several_addresses_counts() -> None:
    fields = Fields(parse('{"ip": null, "IP": "fd00::1", "other": "fd00::1", "Other": null}'))
    assert fields.address("ip", IPv6Address) == IPv6Address("fd00::1")
    assert fields.address("other", IPv6Address) is None


@pytest.mark.parametrize(
    "value", ["null", "5", "true", '""', '"fd00::1"', '"10.1.2"', '"10.1.2.256"', '"10.1.2.3/24"']
)
def test_invalid_ipv4_address_is_refused(value: str) -> None:
    with pytest.raises(GoJsonError, match=r"Backend\.IP must be an IPv4 address, found "):
        fields(f'{{"IP": {value}}}').address("IP", IPv4Address)


@pytest.mark.parametrize("value", ["5", '"10.1.2.3"', '"fe80::1%eth0"', '"fd00::1/64"', '"fd00:::"'])
def test_invalid_ipv6_address_is_refused(value: str) -> None:
    with pytest.raises(GoJsonError, match=r"Backend\.IP must be an IPv6 address, found "):
        fields(f'{{"IP": {value}}}').address("IP", IPv6Address)


def test_a_network_is_masked() -> None:
    read = fields('{"a": "10.5.72.1/24", "b": "fd00:5::1/48"}')
    assert read.network("a", IPv4Network) == IPv4Network("10.5.72.0/24")
    assert read.network("b", IPv6Network) == IPv6Network("fd00:5::/48")


def test_the_whole_address_space_is_no_network() -> None:
    assert fields('{"a": "10.5.72.1/0"}').network("a", IPv4Network) is None


@pytest.mark.parametrize(
    "value",
    ["null", "5", "167772160", '"10.5.0.0"', '"10.5.0.0/255.255.0.0"', '"10.5.0.0/33"', '"10.5.0.0/-1"',
     '"10.5/16"',
     '"10.5.0.0/16/16"', '"10.5.0.0/16\\n"', '"fd00::/48"', '"10.5.0.0/\u0661"'],
)  # fmt: skip
def test_invalid_ipv4_network_is_refused(value: str) -> None:
    with pytest.raises(GoJsonError, match=r"Backend\.Net must be an IPv4 network such as "):
        fields(f'{{"Net": {value}}}').network("Net", IPv4Network)


# --- writing


@given(json_values)
def test_what_is_written_reads_the_same(value: object) -> None:
    text = compact(value)
    assert parse(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "x y"]}, '{"b":1,"a":[true,null,"x y"]}'),
        ("<a href='b'>&\u2028\u2029", "\"\\u003ca href='b'\\u003e\\u0026\\u2028\\u2029\""),
        ("na\u00efve \U0001f600", '"na\u00efve \U0001f600"'),
        ("half \ud83d", r'"half \ufffd"'),
        ('"\\\n\x01/', '"\\"\\\\\\n\\u0001/"'),
    ],
)
def test_values_are_written_as_go_writes_them(value: object, text: str) -> None:
    assert compact(value) == text


def number_or_none(read: Callable[[], int]) -> int | None:
    try:
        return read()
    except ValueError:
        return None


@pytest.mark.parametrize("kind", [IPv4Address, IPv6Address])
@given(
    text=st.lists(
        st.sampled_from(["", "0", "00", "1", "01", "255", "256", "ffff", "12345", "1.2.3.4"]), max_size=9
    ).flatmap(lambda parts: st.sampled_from([".".join(parts), ":".join(parts)]))
    | st.ip_addresses().map(str)
    | st.text("0123456789abcdefABCDEF.:", max_size=20)
)
def test_an_address_is_read_as_ipaddress_reads_it(kind: type[IPv4Address | IPv6Address], text: str) -> None:
    assert number_or_none(lambda: address_number(text, kind)) == number_or_none(lambda: int(kind(text)))
