"""Rules of nf_tables, from what the kernel sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import FAMILIES
from flanneld.network.firewall.kernel_rules import read_rule
from flanneld.network.firewall.rules import DROP, Rule
from flanneld.network.rtnetlink.netlink import attribute


def expression(name: bytes, data: bytes) -> bytes:
    return attribute(1, attribute(1, name + b"\0") + attribute(2, data))


#: ``drop``: an immediate that loads a verdict.
DROPS = expression(b"immediate", attribute(2, attribute(2, attribute(1, b"\0\0\0\0"))))


def test_what_only_counts_changes_nothing() -> None:
    assert read_rule(4, expression(b"counter", b"") + DROPS) == Rule(DROP)


def test_a_match_that_is_not_understood_is_kept_as_something_more() -> None:
    assert read_rule(4, expression(b"osf", b"") + DROPS) == Rule(DROP, extra="osf")


@given(
    st.sampled_from(FAMILIES),
    st.lists(
        st.tuples(
            st.sampled_from([b"meta", b"payload", b"bitwise", b"cmp", b"immediate", b"target", b"match"]),
            st.binary(max_size=40),
        )
    ),
    st.binary(max_size=40),
)
def test_whatever_the_kernel_sends_gives_a_rule(
    family: int, expressions: list[tuple[bytes, bytes]], noise: bytes
) -> None:
    data = b"".join(expression(name, data) for name, data in expressions)
    assert isinstance(read_rule(6 if family == 6 else 4, data + noise), Rule)
