"""Rules that are written, read back: as text and as JSON, as our rules and as steps of a packet's walk."""

from __future__ import annotations

from ipaddress import IPv4Network, ip_address

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.model import IPAddress
from flanneld.network.firewall.fate import Packet, Step
from flanneld.network.firewall.iptables_text import read_rules, read_table, rule_text
from flanneld.network.firewall.nft_json import ListedRule, read_rule, read_steps, rule_json
from flanneld.network.firewall.rules import ACCEPT, ALL_BITS, MASQUERADE, RETURN, Match, Rule

NETWORKS = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False),
    st.integers(0, ALL_BITS),
    st.integers(0, 32),
)
SIDES = st.none() | st.builds(Match, NETWORKS, st.booleans())
BITS = st.integers(0, ALL_BITS)
RULES = st.builds(
    Rule,
    st.sampled_from([ACCEPT, RETURN, MASQUERADE]),
    SIDES,
    SIDES,
    st.none() | st.tuples(BITS, BITS),
    st.sampled_from(["", "-j", "!", "! -s"]) | st.text(st.characters(exclude_characters='\n"\\')),
    st.booleans(),
).filter(lambda rule: rule.verdict == MASQUERADE or not rule.random)
ADDRESSES = st.integers(0, ALL_BITS).map(ip_address)


def steps(rule: Rule) -> tuple[Step, Step]:
    """Write a rule in both forms, and read it as a step of each."""
    chains, _ = read_table(f"-A FORWARD {rule_text(rule)}\n")
    return chains["FORWARD"][0], next(read_steps(listed(rule), 4))


def listed(rule: Rule) -> ListedRule:
    return ListedRule("forward", 1, **rule_json(4, rule))


@given(st.lists(RULES, max_size=4))
def test_rules_are_read_as_they_were_written(rules: list[Rule]) -> None:
    assert read_rules("".join(f"-A FORWARD {rule_text(rule)}\n" for rule in rules)) == tuple(rules)
    assert [read_rule(listed(rule), 4) for rule in rules] == rules


@given(RULES)
def test_both_forms_of_a_rule_are_the_same_step(rule: Rule) -> None:
    of_iptables, of_nftables = steps(rule)
    assert of_iptables.tests == of_nftables.tests
    assert of_iptables.act == of_nftables.act


@given(RULES, ADDRESSES, ADDRESSES)
def test_step_matches_the_packets_of_its_rule(rule: Rule, source: IPAddress, destination: IPAddress) -> None:
    sides = ((rule.source, source), (rule.destination, destination))
    is_met = all((address in side.net) == side.inside for side, address in sides if side)
    packet = Packet("eth0", "cni0", source, destination)
    expected = is_met and (rule.mark is None or rule.mark[0] == 0)  # no packet has a mark at first
    assert [step.matches(packet) for step in steps(rule)] == [expected, expected]
    expected_of_any = None if is_met and rule.mark else is_met
    packet = replace(packet, mark=None)
    assert [step.matches(packet) for step in steps(rule)] == [expected_of_any, expected_of_any]
