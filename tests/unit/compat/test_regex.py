"""Patterns mean what they mean in Go, or are refused."""

from __future__ import annotations

import pytest

from flanneld.compat.flags import compile_re2
from flanneld.errors import Fatal


@pytest.mark.parametrize(
    ("pattern", "hit", "miss"),
    [
        (r"(?P<net>10)\.0", "10.0.0.1", "10.1.0.1"),
        (r"(?<net>10)\.0", "10.0.0.1", "10.1.0.1"),
        (r"(?i)ETH\d", "eth0", "eth"),
        (r"^(?i:ETH)x$", "ethx", "ETHX"),
        (r"^eth0\z", "eth0", "eth01"),
        (r"^\Qa.b+\E$", "a.b+", "a1bb"),
        (r"\Qa.b", "a.b", "axb"),
        (r"^[[:alpha:]]+[[:digit:]_]$", "eth_", "eth-"),
        (r"^[^[:lower:]]$", "A", "a"),
        (r"^[]x]+$", "]x", "["),
        (r"^[*+?]+$", "*+", "e"),
        (r"^a\++$", "a++", "a"),
        (r"a{,2}", "a{,2}", "aa"),
        (r"^(a|b){2}$", "ab", "a"),
        (r"^\w+$", "eth0", "é"),
    ],
)
def test_re2_patterns_mean_what_they_mean_in_go(pattern: str, hit: str, miss: str) -> None:
    regex = compile_re2(pattern)
    assert regex.search(hit)
    assert not regex.search(miss)


@pytest.mark.parametrize(
    "pattern",
    [
        "eth(?=0)", "eth(?!0)", "(?<=e)th", "(?<!e)th", "(?>eth)", r"(e)\1", "(?P<a>e)(?P=a)", "(e)(?(1)t|h)",
        "(?#eth)", "e*+", "e++", "e?+", "e{2}+", "(?x)e", r"e\Z", r"\u0065", "[[:nosuch:]]",
        "[[:^alpha:]]", r"\pL", "(?U)e", "e(?i)t", "*", "(", ")", "[a", "[z-a]", "\\", "a**", "(" * 5000,
    ],
)  # fmt: skip
def test_a_pattern_that_re2_or_we_cannot_read_is_fatal(pattern: str) -> None:
    with pytest.raises(Fatal, match="is not RE2"):
        compile_re2(pattern)
