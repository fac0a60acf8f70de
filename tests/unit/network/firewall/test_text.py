"""Rules as iptables prints them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.model import FAMILIES, Family
from flanneld.network.firewall.fate import ALL_BITS, Rule, Test
from flanneld.network.firewall.iptables_text import read_rules, rule_text
from flanneld.network.firewall.rules import JUMPS, Purpose, Style, desired_rules, source
from tests.unit.network.firewall.test_rules import NETS

#: As ``iptables-nft -t nat -S POSTROUTING`` prints it.
LISTING = """\
-P POSTROUTING ACCEPT
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A POSTROUTING
"""


def read_rule(text: str) -> Rule:
    [rule] = read_rules(f"-A FORWARD {text}")
    return rule


def test_a_listing_gives_the_rules_in_their_order() -> None:
    tests = source(ip_network("172.17.0.0/16")), Test("oif", ("docker0",), negated=True)
    docker = Rule("MASQUERADE", tests)
    kubernetes = Rule("KUBE-POSTROUTING", comment="kubernetes postrouting rules")
    assert read_rules(LISTING) == (kubernetes, docker, JUMPS["nat", "FLANNEL-POSTRTG"], Rule(""))


def test_an_empty_chain_has_no_rules() -> None:
    assert read_rules("-N FLANNEL-FWD\n") == ()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", ["own-chains", "v0.12"])
@pytest.mark.parametrize("random", [True, False])
def test_our_own_rules_are_understood(style: Style, family: Family, random: bool) -> None:
    purpose = Purpose(masquerade=True, forward=True, random=random)
    for rules in desired_rules(style, NETS[family], purpose).values():
        for rule in rules:
            assert read_rule(rule_text(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "-s 10.5.0.0/16 -o eth0 -j ACCEPT",
        "-s 10.5.0.0/16 -p tcp -m tcp --dport 80 -j ACCEPT",
        "-s 10.5.0.0/16 -m mark ! --mark 0x4000/0x4000 -j ACCEPT",
        "-s 10.5.0.0/16 -g ACCEPT",
        "-s 10.0.5.0/255.0.255.0 -j ACCEPT",
        "-s 10.5.0.0/16 -j MASQUERADE --to-ports 1000-2000",
        "-s 10.5.0.0/16 -m comment --comment",
        '-s 10.5.0.0/16 -m comment --comment "',
    ],
)
def test_what_has_more_to_it_is_not_taken_for_ours(text: str) -> None:
    assert not read_rule(text).is_plain


def test_a_mark_without_a_mask_is_the_whole_mark() -> None:
    assert read_rule("-m mark --mark 0x4000 -j RETURN").tests == (Test("mark", ((0x4000, ALL_BITS),)),)


def test_quotes_in_a_comment_are_read() -> None:
    assert read_rule('-m comment --comment "say \\"hi\\"" -j RETURN').comment == 'say "hi"'


@pytest.mark.parametrize("comment", ["-j", "!", "! -s 10.5.0.0/16", "--comment", "a\u2028b", ""])
def test_comment_may_look_like_an_option(comment: str) -> None:
    rule = Rule("RETURN", (source(ip_network("10.5.0.0/16"), inside=False),), comment=comment)
    assert read_rule(f'! -s 10.5.0.0/16 -m comment --comment "{comment}" -j RETURN') == rule


@given(st.text(st.characters(exclude_characters="\n")))
def test_any_line_gives_a_rule(text: str) -> None:
    assert isinstance(read_rule(text), Rule)
