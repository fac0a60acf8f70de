"""What the rules say, word by word, as Go flannel's do."""

from __future__ import annotations

import json
from ipaddress import ip_network
from pathlib import Path
from typing import get_args

import pytest

from flanneld.model import FAMILIES, Family
from flanneld.network.firewall import nftables
from flanneld.network.firewall.fate import ALL_BITS
from flanneld.network.firewall.iptables_text import restore_text
from flanneld.network.firewall.nftables import NftablesListing
from flanneld.network.firewall.rules import (
    IPTABLES_CHAINS,
    OWN_CHAINS,
    POSTROUTING,
    Nets,
    Purpose,
    RuleOwnership,
    Style,
    desired_rules,
    edits_for,
    networks_of,
)

GOLDEN = Path(__file__).parents[2] / "golden/firewall"
NETS: dict[Family, Nets] = {
    4: Nets(ip_network("10.5.0.0/16"), ip_network("10.5.72.0/24")),
    6: Nets(ip_network("fc00:5::/48"), ip_network("fc00:5:0:72::/64")),
}
PURPOSES = {
    "both": Purpose(masquerade=True, forward=True),
    "masquerade": Purpose(masquerade=True),
    "forward": Purpose(forward=True),
    "not-random": Purpose(masquerade=True, random=False),
}
NOTHING_OURS = RuleOwnership(networks=())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("style", ["own-chains", "v0.12"])
def test_iptables_restore_gets_these_words(style: Style, purpose: str, family: Family) -> None:
    edits = edits_for(desired_rules(style, NETS[family], PURPOSES[purpose]), {}, NOTHING_OURS)
    assert restore_text(edits) == (GOLDEN / f"{style}-{purpose}-ipv{family}.txt").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_libnftables_gets_this_transaction(family: Family) -> None:
    edits = edits_for(desired_rules("native", NETS[family], PURPOSES["both"]), {}, NOTHING_OURS)
    lines = (GOLDEN / f"native-both-ipv{family}.json").read_text().splitlines()
    made = nftables.commands(family, edits, NftablesListing({}, {}, others=False))
    assert made == [json.loads(line) for line in lines]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", get_args(Style))
def test_no_purpose_wants_no_rule(style: Style, family: Family) -> None:
    assert not any(desired_rules(style, NETS[family], Purpose()).values())


def test_mark_has_thirty_two_bits() -> None:
    assert ALL_BITS == (1 << 32) - 1


def test_purpose_counts_as_false_if_it_wants_no_rule() -> None:
    assert not Purpose()
    assert not Purpose(random=False)
    assert Purpose(masquerade=True)
    assert Purpose(forward=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_rule_is_about_the_networks_on_both_sides_but_not_about_multicast(family: Family) -> None:
    nets = NETS[family]
    found = [networks_of(rule) for rule in desired_rules("v0.12", nets, PURPOSES["masquerade"])[POSTROUTING]]
    network = nets.network
    assert found == [(network, network), (network,), (network, nets.subnet), (network, network)]


@pytest.mark.parametrize("family", FAMILIES)
def test_native_table_holds_only_the_rules_of_its_purpose(family: Family) -> None:
    table = f"flannel-ipv{family}"
    both = desired_rules("native", NETS[family], PURPOSES["both"])
    assert [len(rules) for rules in both.values()] == [2, 6]
    assert desired_rules("native", NETS[family], PURPOSES["forward"]) == {**both, (table, "postrtg"): ()}
    assert desired_rules("native", NETS[family], PURPOSES["masquerade"]) == {**both, (table, "forward"): ()}
    assert {rule.random for rule in both[table, "postrtg"] if rule.verdict == "MASQUERADE"} == {True}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_is_in_a_chain_that_is_read(family: Family) -> None:
    for style in get_args(Style):
        chains = set(desired_rules(style, NETS[family], PURPOSES["both"]))
        assert chains <= (OWN_CHAINS if style == "native" else set(IPTABLES_CHAINS))


@pytest.mark.parametrize("family", FAMILIES)
def test_nftables_gets_the_rules_of_the_chains_of_our_own(family: Family) -> None:
    ours = desired_rules("own-chains", NETS[family], PURPOSES["both"])
    native = desired_rules("native", NETS[family], PURPOSES["both"])
    assert sorted(native.values(), key=len) == sorted(
        (rules for chain, rules in ours.items() if chain in OWN_CHAINS), key=len
    )
