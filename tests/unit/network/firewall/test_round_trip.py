"""Rules that are written, read back: as text and as JSON, as our rules and as steps of a packet's walk."""

from __future__ import annotations

from ipaddress import IPv4Network, ip_address

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.model import IPAddress
from flanneld.network.firewall import nft_json
from flanneld.network.firewall.fate import ACCEPT, ALL_BITS, MASQUERADE, RETURN, Packet, Rule, Test
from flanneld.network.firewall.iptables_text import read_rules, read_table, rule_text
from flanneld.network.firewall.nft_json import ListedRule
from flanneld.network.firewall.nftables import read_rule, rule_json

NETWORKS = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False),
    st.integers(0, ALL_BITS),
    st.integers(0, 32),
)
SOURCES, DESTINATIONS = (
    st.lists(st.builds(Test, st.just(side), st.tuples(NETWORKS), st.booleans()), max_size=1)
    for side in ("source", "destination")
)
BITS = st.integers(0, ALL_BITS)
MARKS = st.lists(st.builds(lambda mark, mask: Test("mark", ((mark, mask),)), BITS, BITS), max_size=1)
RULES = st.builds(
    Rule,
    st.sampled_from([ACCEPT, RETURN, MASQUERADE]),
    st.builds(lambda *sides: tuple(test for side in sides for test in side), SOURCES, DESTINATIONS, MARKS),
    st.sampled_from(["", "-j", "!", "! -s"]) | st.text(st.characters(exclude_characters='\n"\\')),
    st.booleans(),
).filter(lambda rule: rule.verdict == MASQUERADE or not rule.random)
ADDRESSES = st.integers(0, ALL_BITS).map(ip_address)


def both(rule: Rule) -> tuple[Rule, Rule]:
    """Write a rule in both forms, and read each."""
    chains, _ = read_table(f"-A FORWARD {rule_text(rule)}\n")
    return chains["FORWARD"][0], next(nft_json.read_rules(listed(rule), 4))


def listed(rule: Rule) -> ListedRule:
    return ListedRule("forward", 1, **rule_json(4, rule))


@given(st.lists(RULES, max_size=4))
def test_rules_are_read_as_they_were_written(rules: list[Rule]) -> None:
    assert read_rules("".join(f"-A FORWARD {rule_text(rule)}\n" for rule in rules)) == tuple(rules)
    assert [read_rule(listed(rule), 4) for rule in rules] == rules


@given(RULES)
def test_both_forms_of_a_rule_are_the_same_rule(rule: Rule) -> None:
    of_iptables, of_nftables = both(rule)
    assert of_iptables.without_text() == of_nftables.without_text() == rule


@given(RULES, ADDRESSES, ADDRESSES)
def test_rule_matches_the_packets_that_its_tests_are_about(
    rule: Rule, source: IPAddress, destination: IPAddress
) -> None:
    packet = Packet("eth0", "cni0", source, destination, mark=None)
    sides = [test for test in rule.tests if test.field != "mark"]
    is_met = all((getattr(packet, test.field) in test.values[0]) != test.negated for test in sides)
    marks = [test.values[0] for test in rule.tests if test.field == "mark"]
    of_any = None if is_met and marks else is_met
    assert [each.matches(packet) for each in both(rule)] == [of_any, of_any]
    unmarked = is_met and all(value[0] == 0 for value in marks if isinstance(value, tuple))
    assert [each.matches(replace(packet, mark=0)) for each in both(rule)] == [unmarked, unmarked]
