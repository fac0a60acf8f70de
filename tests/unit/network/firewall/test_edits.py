"""What to change in tables as they may be found."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.network.firewall.fate import ACCEPT, RETURN, Rule, Test
from flanneld.network.firewall.iptables_text import restore_text
from flanneld.network.firewall.rules import (
    FLANNEL_FWD,
    FLANNEL_POSTRTG,
    FORWARD,
    FORWARDING,
    JUMPS,
    MASQ,
    OWN_CHAINS,
    POSTROUTING,
    Chain,
    Edit,
    Nets,
    Purpose,
    RuleOwnership,
    Rules,
    claim,
    desired_rules,
    destination,
    edits_for,
    lost,
    source,
)

Tables = dict[Chain, tuple[Rule, ...]]

NETS = Nets(ip_network("10.5.0.0/16"), ip_network("10.5.72.0/24"))
MOVED = Nets(ip_network("10.5.0.0/16"), ip_network("10.5.9.0/24"))
FORMER = Nets(ip_network("10.9.0.0/16"), ip_network("10.9.3.0/24"))
NEIGHBOUR = Nets(ip_network("10.6.0.0/16"), ip_network("10.6.1.0/24"))

BOTH = Purpose(masquerade=True, forward=True)
OWN = desired_rules("own-chains", NETS, BOTH)
V012 = desired_rules("v0.12", NETS, BOTH)
NATIVE = desired_rules("native", NETS, BOTH)
OURS = claim([NETS], None, masquerade=True, forward=True)

#: An operator's: the same words as a rule of ours, or nearly.
LOOK_ALIKES = {
    POSTROUTING: (
        Rule(
            "MASQUERADE",
            (source(NETS.network), destination(ip_network("224.0.0.0/4"), inside=False)),
            random=True,
        ),
        Rule("FLANNEL-POSTRTG", (source(ip_network("192.0.2.0/24")),), comment=MASQ),
        Rule("FLANNEL-POSTRTG"),
    ),
    FORWARDING: (
        Rule(ACCEPT, (source(NETS.network),)),
        Rule(ACCEPT, (source(NETS.network),), extra="-i eth1"),
    ),
}


def simulate(found: Rules, edits: tuple[Edit, ...]) -> Tables:
    """What iptables-restore makes of it."""
    tables = dict(found)
    for edit in edits:
        rules = [] if edit.flush else list(tables.get(edit.chain, ()))
        for rule in edit.delete:
            rules.remove(rule)
        for rule in edit.insert:
            rules.insert(0, rule)
        tables[edit.chain] = (*rules, *edit.append)
        if edit.drop:
            del tables[edit.chain]
            jumps = [rule for rules in tables.values() for rule in rules if rule.verdict == edit.chain[1]]
            assert JUMPS.get(edit.chain) not in jumps, "a chain cannot go before the jump to it"
    return tables


def settled(rules: Rules, found: Rules, ours: RuleOwnership = OURS) -> Tables:
    """The tables after a plan, which must leave nothing to be done."""
    after = simulate(found, edits_for(rules, found, ours))
    assert edits_for(rules, after, ours) == ()
    return after


def with_rules(
    found: Rules, chain: Chain, *, before: tuple[Rule, ...] = (), after: tuple[Rule, ...] = ()
) -> Tables:
    return {**found, chain: (*before, *found.get(chain, ()), *after)}


@pytest.mark.parametrize("rules", [OWN, V012, NATIVE])
def test_what_is_right_is_left_alone(rules: Rules) -> None:
    assert edits_for(rules, rules, OURS) == ()


@pytest.mark.parametrize("rules", [OWN, V012, NATIVE])
def test_all_is_made_where_nothing_is(rules: Rules) -> None:
    assert settled(rules, {}) == rules


def test_chain_that_is_missing_is_made() -> None:
    found = {chain: rules for chain, rules in OWN.items() if chain != FLANNEL_FWD}
    assert edits_for(OWN, found, OURS) == (Edit(FLANNEL_FWD, flush=True, append=OWN[FLANNEL_FWD]),)


def test_a_chain_that_lost_a_rule_is_filled_anew_in_one_step() -> None:
    found = {**OWN, FLANNEL_POSTRTG: OWN[FLANNEL_POSTRTG][1:]}
    assert edits_for(OWN, found, OURS) == (Edit(FLANNEL_POSTRTG, flush=True, append=OWN[FLANNEL_POSTRTG]),)


def test_a_chain_in_another_order_is_filled_anew() -> None:
    found = {**OWN, FLANNEL_POSTRTG: OWN[FLANNEL_POSTRTG][::-1]}
    assert settled(OWN, found) == OWN


def test_a_lost_jump_is_all_that_is_made_again() -> None:
    found = {**OWN, FORWARDING: ()}
    assert restore_text(edits_for(OWN, found, OURS)) == (
        '*filter\n-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD\nCOMMIT\n'
    )


def test_a_jump_stays_where_others_have_put_it() -> None:
    found = with_rules(OWN, POSTROUTING, after=(Rule("KUBE-POSTROUTING"),))
    assert edits_for(OWN, found, OURS) == ()


def test_a_rule_that_two_programs_appended_at_once_does_no_harm_twice() -> None:
    found = with_rules(OWN, POSTROUTING, after=OWN[POSTROUTING])
    assert edits_for(OWN, found, OURS) == ()


def test_a_v012_rule_that_is_lost_comes_back_in_its_place_in_one_step() -> None:
    rules = V012[POSTROUTING]
    found = {**V012, POSTROUTING: rules[1:]}
    assert edits_for(V012, found, OURS) == (Edit(POSTROUTING, delete=rules[1:], append=rules),)
    assert settled(V012, found) == V012


def test_others_rules_stay_between_v012_rules() -> None:
    first, *rest = V012[FORWARDING]
    foreign = Rule("DOCKER-USER")
    assert edits_for(V012, {**V012, FORWARDING: (first, foreign, *rest)}, OURS) == ()


@pytest.mark.parametrize("rules", [OWN, {}])
def test_look_alikes_of_an_operator_stay(rules: Rules) -> None:
    found = {**OWN}
    for chain, foreign in LOOK_ALIKES.items():
        found = with_rules(found, chain, before=foreign)
    ours = claim([NETS], NETS, masquerade=True, forward=True)
    after = settled(rules, found, ours)
    for chain, foreign in LOOK_ALIKES.items():
        assert after[chain][: len(foreign)] == foreign


@pytest.mark.parametrize(
    "foreign",
    [
        Rule("DROP", (source(ip_network("10.5.3.0/24")),)),
        Rule("DROP", (source(ip_network("10.5.3.0/24")),), comment=FORWARD, extra="-p tcp"),
    ],
)
def test_a_rule_of_an_operator_in_our_chain_stays(foreign: Rule) -> None:
    found = {**OWN, FLANNEL_FWD: (foreign,)}
    assert settled(OWN, found)[FLANNEL_FWD] == (foreign, *OWN[FLANNEL_FWD])


def test_rules_about_no_network_come_before_others_rules_in_their_order() -> None:
    shared = tuple(Rule(RETURN, (Test("mark", ((bit, bit),)),), comment=MASQ) for bit in (1, 2, 4))
    ours = OWN[FLANNEL_POSTRTG][1:]
    foreign = Rule("DROP", (source(ip_network("10.6.3.0/24")),))
    after = settled({FLANNEL_POSTRTG: (*shared, *ours)}, {FLANNEL_POSTRTG: (foreign,)})
    assert after[FLANNEL_POSTRTG] == (*shared, foreign, *ours)


# ---- another flanneld on the same host ----------------------------------------------------------


def test_two_daemons_share_the_chains_in_peace() -> None:
    theirs = desired_rules("own-chains", NEIGHBOUR, BOTH)
    both = settled(OWN, theirs)
    assert edits_for(theirs, both, claim([NEIGHBOUR], None, masquerade=True, forward=True)) == ()
    assert both[FLANNEL_POSTRTG][0] == OWN[FLANNEL_POSTRTG][0], "what serves both comes first"
    assert [rule for rule in both[FLANNEL_FWD] if rule in theirs[FLANNEL_FWD]] == list(theirs[FLANNEL_FWD])


@pytest.mark.parametrize("gone", range(7))
def test_two_daemons_agree_on_a_repair(gone: int) -> None:
    theirs = desired_rules("own-chains", NEIGHBOUR, BOTH)
    their_claim = claim([NEIGHBOUR], None, masquerade=True, forward=True)
    both = settled(OWN, theirs)
    rules = both[FLANNEL_POSTRTG]
    damaged = {**both, FLANNEL_POSTRTG: rules[:gone] + rules[gone + 1 :]}
    after = simulate(damaged, edits_for(OWN, damaged, OURS))
    after = simulate(after, edits_for(theirs, after, their_claim))
    assert edits_for(OWN, after, OURS) == ()
    assert edits_for(theirs, after, their_claim) == ()
    assert sorted(map(str, after[FLANNEL_POSTRTG])) == sorted(map(str, rules))


def test_the_last_daemon_to_go_takes_the_chains_along() -> None:
    theirs = desired_rules("own-chains", NEIGHBOUR, BOTH)
    alone = settled({}, settled(OWN, theirs))
    assert alone == settled(theirs, alone, claim([NEIGHBOUR], None, masquerade=True, forward=True))
    gone = settled({}, alone, claim([NEIGHBOUR], None, masquerade=True, forward=True))
    assert gone == {POSTROUTING: (), FORWARDING: ()}


# ---- what an earlier run left -------------------------------------------------------------------


def test_rules_about_a_former_subnet_go() -> None:
    assert settled(desired_rules("own-chains", MOVED, BOTH), OWN) == desired_rules("own-chains", MOVED, BOTH)


def test_rules_about_a_former_network_go_when_it_is_known() -> None:
    found = desired_rules("own-chains", FORMER, BOTH)
    known = claim([NETS], FORMER, masquerade=True, forward=True)
    assert settled(OWN, found, known) == OWN
    assert settled(OWN, found, OURS)[FLANNEL_FWD] == (*found[FLANNEL_FWD], *OWN[FLANNEL_FWD])


@pytest.mark.parametrize("former", [NETS, MOVED, FORMER])
@pytest.mark.parametrize("random", [True, False])
def test_v012_rules_give_way_to_chains_of_our_own(former: Nets, random: bool) -> None:
    found = desired_rules("v0.12", former, replace(BOTH, random=random))
    known = claim([NETS], former, masquerade=True, forward=True)
    assert settled(OWN, found, known) == OWN


@pytest.mark.parametrize("former", [MOVED, FORMER])
def test_v012_rules_give_way_to_those_of_the_new_lease(former: Nets) -> None:
    found = desired_rules("v0.12", former, BOTH)
    known = claim([NETS], former, masquerade=True, forward=True)
    assert settled(V012, found, known) == V012


def test_chains_of_our_own_give_way_to_v012_rules() -> None:
    edits = edits_for(V012, OWN, OURS)
    assert restore_text(edits).endswith(
        '-D FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD\n'
        "-A FORWARD -s 10.5.0.0/16 -j ACCEPT\n"
        "-A FORWARD -d 10.5.0.0/16 -j ACCEPT\n"
        "-F FLANNEL-FWD\n-X FLANNEL-FWD\nCOMMIT\n"
    )
    assert simulate(OWN, edits) == V012


def test_v012_rules_stay_when_no_former_network_is_known() -> None:
    assert settled(OWN, V012)[POSTROUTING] == (*V012[POSTROUTING], *OWN[POSTROUTING])


def test_v012_rules_stay_when_nothing_takes_their_place() -> None:
    neither = claim([NETS], NETS, masquerade=False, forward=False)
    assert edits_for({}, V012, neither) == ()


def test_a_v012_rule_without_the_others_stays() -> None:
    found = {POSTROUTING: V012[POSTROUTING][1:]}
    known = claim([NETS], NETS, masquerade=True, forward=True)
    assert settled(OWN, found, known)[POSTROUTING] == (*V012[POSTROUTING][1:], *OWN[POSTROUTING])


@pytest.mark.parametrize("chain", [POSTROUTING, FORWARDING])
def test_v012_rules_in_another_order_are_an_operators(chain: Chain) -> None:
    found = {chain: V012[chain][::-1]}
    known = claim([NETS], NETS, masquerade=True, forward=True)
    assert known.left(chain, found[chain]) == set()
    assert settled(OWN, found, known)[chain] == (*found[chain], *OWN[chain])


def test_v012_rules_count_only_in_the_chain_where_they_were_made() -> None:
    known = claim([NETS], NETS, masquerade=True, forward=True)
    assert known.left(POSTROUTING, V012[POSTROUTING]) == set(V012[POSTROUTING])
    assert known.left(FORWARDING, V012[FORWARDING]) == set(V012[FORWARDING])
    assert known.left(FORWARDING, V012[POSTROUTING]) == set()
    assert known.left(POSTROUTING, V012[FORWARDING]) == set()


def test_the_rules_of_gos_nftables_give_way() -> None:
    chain = ("flannel-ipv4", "postrtg")
    go = (
        Rule(RETURN, (Test("mark", ((0x4000, 0xFFFF_FFFF),)),)),
        *(replace(rule, comment="") for rule in NATIVE[chain][1:3]),
        Rule(RETURN, (source(NETS.subnet, inside=False), destination(NETS.network))),
        *(replace(rule, comment="") for rule in NATIVE[chain][4:]),
    )
    assert settled(NATIVE, {**NATIVE, chain: go}) == NATIVE


def test_all_goes_that_flannel_made_for_whatever_network() -> None:
    everything = replace(claim([], FORMER, masquerade=True, forward=True), networks=None)
    found = settled(OWN, desired_rules("own-chains", NEIGHBOUR, BOTH))
    for chain, rules in desired_rules("v0.12", FORMER, BOTH).items():
        found = with_rules(found, chain, after=rules)
    assert settled({}, found, everything) == {POSTROUTING: (), FORWARDING: ()}


def test_only_what_was_not_there_is_called_lost() -> None:
    found = {**OWN, FLANNEL_FWD: OWN[FLANNEL_FWD][:1]}
    assert list(lost(edits_for(OWN, found, OURS), found)) == [(FLANNEL_FWD, OWN[FLANNEL_FWD][1])]


# ---- whatever may be there ------------------------------------------------------------------------

FOREIGN = [Rule("KUBE-POSTROUTING"), Rule("DROP", extra="-i eth1"), *sum(LOOK_ALIKES.values(), ())]
SOURCES = [OWN, V012, desired_rules("own-chains", NEIGHBOUR, BOTH), desired_rules("own-chains", FORMER, BOTH)]


@st.composite
def tables(draw: st.DrawFn) -> Tables:
    """Rules of ours, of other daemons and of others, shuffled, doubled and left out."""
    found: Tables = {}
    for chain in (POSTROUTING, FORWARDING, FLANNEL_POSTRTG, FLANNEL_FWD):
        known = [rule for source in SOURCES for rule in source.get(chain, ())]
        if chain in OWN_CHAINS and draw(st.booleans()):
            known = list(OWN[chain])
        found[chain] = tuple(draw(st.lists(st.sampled_from(known + FOREIGN), max_size=12)))
    for chain, jump in JUMPS.items():
        if draw(st.booleans()):
            # What does not exist has no rules, and nothing leads there.
            del found[chain]
            built_in = POSTROUTING if chain == FLANNEL_POSTRTG else FORWARDING
            leading = [rule for rule in found[built_in] if rule.verdict != jump.verdict]
            found[built_in] = tuple(leading)
    return found


@given(tables(), st.sampled_from([OWN, V012, {}]), st.sampled_from([None, NETS, FORMER]))
def test_one_plan_is_enough_and_keeps_what_others_have(
    found: Tables, rules: Rules, former: Nets | None
) -> None:
    ours = claim([NETS], former, masquerade=True, forward=True)
    after = simulate(found, edits_for(rules, found, ours))
    assert edits_for(rules, after, ours) == ()
    for chain, there in found.items():
        foreign = [rule for rule in there if rule in FOREIGN and rule not in rules.get(chain, ())]
        unclaimed = [rule for rule in foreign if rule not in ours.left(chain, there)]
        assert [rule for rule in after.get(chain, ()) if rule in unclaimed] == unclaimed
    for chain, want in rules.items():
        there = after.get(chain, ())
        assert tuple(dict.fromkeys(rule for rule in there if rule in want)) == want
