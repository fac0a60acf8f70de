"""Go's flag syntax. The expected values were taken from Go's own ``flag`` package."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.compat.flags import (
    Flag,
    FlagError,
    FlagValue,
    HelpRequested,
    from_environment,
    parse,
    quoted,
    usage,
)

FLAGS = (
    Flag("b", "bool", False, "be `word` it"),
    Flag("ip-masq", "bool", True, "two\nlines"),
    Flag("n", "int", 60, "a number"),
    Flag("s", "string", 'd"é', "takes a `NAME` or `not"),
    Flag("q", "bool", False, "quick"),
    Flag("zero", "string", "", "nothing"),
    Flag("iface", "string", (), "many", repeatable=True),
)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["-s=x"], {"s": "x"}),
        (["--s=x"], {"s": "x"}),
        (["-s", "x"], {"s": "x"}),
        (["--s", "x"], {"s": "x"}),
        (["-s="], {"s": ""}),
        (["-s", ""], {"s": ""}),
        (["-s=a=b"], {"s": "a=b"}),
        (["-s", "-q"], {"s": "-q"}),
        (["-s", "--"], {"s": "--"}),
        (["-s=x", "-s=y"], {"s": "y"}),
        (["-iface=a", "-iface", "b"], {"iface": ("a", "b")}),
        (["-q"], {"q": True}),
        (["-q=false"], {"q": False}),
        (["-q", "-q=0"], {"q": False}),
    ],
)
def test_a_flag_is_written_in_any_of_gos_ways(argv: list[str], expected: dict[str, FlagValue]) -> None:
    assert parse(FLAGS, argv) == expected


@pytest.mark.parametrize("end", ["word", "--", "-", ""])
def test_the_first_word_that_is_no_flag_ends_the_flags(end: str) -> None:
    assert parse(FLAGS, ["-q", end, "-s=x", "-unknown"]) == {"q": True}


def test_a_boolean_never_takes_a_word_of_its_own() -> None:
    assert parse(FLAGS, ["-ip-masq", "false", "-s=x"]) == {"ip-masq": True}


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True"])
def test_these_words_are_true(text: str) -> None:
    assert parse(FLAGS, [f"-q={text}"]) == {"q": True}


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False"])
def test_these_words_are_false(text: str) -> None:
    assert parse(FLAGS, [f"-q={text}"]) == {"q": False}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-x"], "flag provided but not defined: -x"),
        (["--x=1"], "flag provided but not defined: -x"),
        (["-+x"], "flag provided but not defined: -+x"),
        (["---q"], "bad flag syntax: ---q"),
        (["-=q"], "bad flag syntax: -=q"),
        (["--=q"], "bad flag syntax: --=q"),
        (["-s"], "flag needs an argument: -s"),
        (["-q=maybe"], 'invalid boolean value "maybe" for -q: parse error'),
        (["-q="], 'invalid boolean value "" for -q: parse error'),
        (["-n=5m"], 'invalid value "5m" for flag -n: parse error'),
        (["-n", "-q"], 'invalid value "-q" for flag -n: parse error'),
        (["-n=9223372036854775808"], 'invalid value "9223372036854775808" for flag -n: value out of range'),
    ],
)
def test_a_mistake_is_told_in_gos_words(argv: list[str], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse(FLAGS, argv)
    assert str(caught.value) == message


@pytest.mark.parametrize("word", ["-h", "--h", "-help", "--help", "-help=1"])
def test_help_is_asked_for(word: str) -> None:
    with pytest.raises(HelpRequested):
        parse(FLAGS, ["-q", word, "-unknown"])


def test_a_mistake_before_help_comes_first() -> None:
    with pytest.raises(FlagError):
        parse(FLAGS, ["-unknown", "-help"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-0", 0),
        ("+7", 7),
        ("010", 8),
        ("0_10", 8),
        ("0o17", 15),
        ("0O17", 15),
        ("0x1F", 31),
        ("0X_1f", 31),
        ("-0b101", -5),
        ("1_000", 1000),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("-0b1" + "0" * 63, -(2**63)),
        ("0" * 200 + "7", 7),
    ],
)
def test_integers_are_gos_literals(text: str, number: int) -> None:
    assert parse(FLAGS, ["-n", text]) == {"n": number}


@pytest.mark.parametrize(
    "text", ["", "-", " 1", "1 ", "1.0", "1e3", "08", "0x", "0b2", "0_", "_1", "1__0", "1_", "--1", "\u0661"]
)
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(FlagError, match=r"parse error$"):
        parse(FLAGS, [f"-n={text}"])


@pytest.mark.parametrize("text", ["-9223372036854775809", "0x8000000000000000", "9" * 6000])
def test_numbers_beyond_64_bits_are_out_of_range(text: str) -> None:
    with pytest.raises(FlagError, match=r"value out of range$"):
        parse(FLAGS, ["-n", text])


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(["d", "_d", "#x", "#X", "#_x", "#b", "#o"]))
def test_every_64_bit_integer_is_read_in_every_base(number: int, form: str) -> None:
    assert parse(FLAGS, [f"-n={number:{form}}"]) == {"n": number}


@given(
    st.lists(
        st.text(max_size=8) | st.sampled_from(["-", "--", "-q", "-n", "-n=", "-s", "-iface", "-q=", "1"])
    )
)
def test_no_command_line_breaks_the_parser(argv: list[str]) -> None:
    names = {flag.name for flag in FLAGS}
    try:
        assert parse(FLAGS, argv).keys() <= names
    except (FlagError, HelpRequested):
        assert any(word.startswith("-") for word in argv)


def test_the_usage_text_has_gos_layout() -> None:
    assert usage(FLAGS) == (
        "  -b word\n"
        "    \tbe word it\n"
        "  -iface value\n"
        "    \tmany\n"
        "  -ip-masq\n"
        "    \ttwo\n"
        "    \tlines (default true)\n"
        "  -n int\n"
        "    \ta number (default 60)\n"
        "  -q\tquick\n"
        "  -s NAME\n"
        '    \ttakes a NAME or `not (default "d\\"é")\n'
        "  -zero string\n"
        "    \tnothing\n"
    )


def test_only_a_boolean_of_one_letter_has_its_text_on_the_same_line() -> None:
    assert usage([Flag("qq", "bool", False, "very quick")]) == "  -qq\n    \tvery quick\n"


def test_default_list_is_told_as_go_tells_it() -> None:
    flag = Flag("cidr", "string", ("10.0.0.0/8", "fd00::/8"), "many", repeatable=True)
    assert usage([flag]) == "  -cidr value\n    \tmany (default [10.0.0.0/8 fd00::/8])\n"


def test_only_the_first_back_quotes_name_the_value() -> None:
    assert usage([Flag("nn", "int", 0, "`N` of `N`")]) == "  -nn N\n    \tN of `N`\n"


def test_variables_are_named_after_the_flags() -> None:
    environ = {"P_N": "0x10", "P_IP_MASQ": "f", "P_S": "x", "N": "1", "P_OTHER": "2"}
    assert from_environment(FLAGS, environ, "P") == {"n": 16, "ip-masq": False, "s": "x"}


def test_an_empty_variable_counts_as_absent() -> None:
    assert from_environment(FLAGS, {"P_N": "", "P_S": ""}, "P") == {}


def test_a_variable_gives_a_repeatable_flag_one_element() -> None:
    assert from_environment(FLAGS, {"P_IFACE": "a,b"}, "P") == {"iface": ("a,b",)}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("P_N", "many", 'invalid value "many" for P_N: parse error'),
        ("P_IP_MASQ", "yes", 'invalid boolean value "yes" for P_IP_MASQ: parse error'),
    ],
)
def test_a_bad_variable_is_named(name: str, text: str, message: str) -> None:
    with pytest.raises(FlagError) as caught:
        from_environment(FLAGS, {name: text}, "P")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "go"),
    [
        ("plain é", '"plain é"'),
        ('a"b\\', r'"a\"b\\"'),
        ("\a\b\f\n\r\t\v", r'"\a\b\f\n\r\t\v"'),
        ("\x01\x7f", r'"\x01\x7f"'),
        ("\x80", r'"\u0080"'),
        ("\x85\ue000\U000e0001", r'"\u0085\ue000\U000e0001"'),
        ("\uffff\U0001ffff", r'"\uffff\U0001ffff"'),
        (b"\x80\xff".decode(errors="surrogateescape"), r'"\x80\xff"'),
    ],
)
def test_values_are_quoted_as_go_quotes_them(text: str, go: str) -> None:
    assert quoted(text) == go
