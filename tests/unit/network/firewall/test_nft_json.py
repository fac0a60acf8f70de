"""Rules in libnftables' JSON: what is sent is what would be listed, and what is listed is understood."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

from flanneld.model import FAMILIES, Family
from flanneld.network.firewall.fate import ALL_BITS, Rule, Test
from flanneld.network.firewall.nft_json import ListedRule, read_rules
from flanneld.network.firewall.nftables import (
    NftablesListing,
    commands,
    read_listing,
    read_rule,
    rule_json,
)
from flanneld.network.firewall.rules import Edit, Purpose, desired_rules, source
from tests.unit.network.firewall.test_rules import NETS

POSTRTG = ("flannel-ipv4", "postrtg")
FORWARD = ("flannel-ipv4", "forward")
SADDR = {"payload": {"protocol": "ip", "field": "saddr"}}
NET = {"prefix": {"addr": "10.5.0.0", "len": 16}}


def rule(*statements: dict[str, Any], **given: Any) -> Rule:
    return read_rule(ListedRule("forward", 1, list(statements), **given), 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("random", [True, False])
def test_our_own_rules_are_understood(family: Family, random: bool) -> None:
    for rules in desired_rules("native", NETS[family], Purpose(True, True, random)).values():
        for ours in rules:
            assert read_rule(ListedRule("forward", 1, **rule_json(family, ours)), family) == ours


def test_a_single_address_is_listed_without_a_length() -> None:
    found = rule({"match": {"op": "!=", "left": SADDR, "right": "10.5.0.3"}}, {"accept": None})
    assert found.tests == (source(ip_network("10.5.0.3/32"), inside=False),)


def test_a_counter_changes_nothing() -> None:
    assert rule({"counter": {"packets": 1, "bytes": 60}}) == Rule("")
    assert rule({"counter": {"packets": 1, "bytes": 60}}, {"accept": None}) == Rule("ACCEPT")


def test_go_compares_the_whole_mark() -> None:
    found = rule({"match": {"op": "==", "left": {"meta": {"key": "mark"}}, "right": 16384}}, {"return": None})
    assert found == Rule("RETURN", (Test("mark", ((0x4000, ALL_BITS),)),))


MARK_OF_PACKET = {"meta": {"key": "mark"}}


@pytest.mark.parametrize(
    ("value", "new_mark"),
    [
        (16384, (0x4000, ALL_BITS)),
        ({"|": [MARK_OF_PACKET, 1]}, (1, 1)),
        ({"&": [MARK_OF_PACKET, 1]}, (0, ALL_BITS ^ 1)),
        ({"^": [{"&": [MARK_OF_PACKET, 0xFF00]}, 2]}, (2, ALL_BITS ^ 0xFF00)),
        ({"meta": {"key": "cpu"}}, None),
    ],
)
def test_new_mark_is_understood_where_it_is_simple(value: Any, new_mark: tuple[int, int] | None) -> None:
    marking = ListedRule("forward", 1, [{"mangle": {"key": MARK_OF_PACKET, "value": value}}])
    assert next(iter(read_rules(marking, 4))).new_mark == new_mark


def test_flags_may_be_listed_as_an_array() -> None:
    assert rule({"masquerade": {"flags": ["fully-random"]}}) == Rule("MASQUERADE", random=True)


@pytest.mark.parametrize(
    "statement",
    [
        {"match": {"op": "in", "left": SADDR, "right": NET}},
        {"match": {"op": "==", "left": SADDR, "right": {"set": ["10.5.0.1", "10.5.0.2"]}}},
        {"match": {"op": "==", "left": SADDR, "right": {"prefix": {"addr": "10.5.0.1", "len": 16}}}},
        {
            "match": {
                "op": "==",
                "left": {"payload": {"protocol": "tcp", "field": "dport"}},
                "right": "10.5.0.3",
            }
        },
        {"match": {"op": "!=", "left": {"meta": {"key": "mark"}}, "right": 1}},
        {"match": {"op": "==", "left": {"meta": {"key": "iifname"}}, "right": 1}},
        {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "flags"}}, "right": "@mine"}},
        {"vmap": {"key": SADDR, "data": {"set": ["10.5.0.1"]}}},
        {"masquerade": {"flags": "random"}},
        {"drop": None},
        {"jump": {"target": "postrtg"}},
    ],
)
def test_what_has_more_to_it_is_not_taken_for_ours(statement: dict[str, Any]) -> None:
    assert not rule(statement, {"accept": None}).is_plain


ANSWER = {
    "nftables": [
        {"metainfo": {"json_schema_version": 1}},
        {"table": {"family": "ip", "name": "flannel-ipv4", "handle": 2}},
        {"chain": {"family": "ip", "table": "flannel-ipv4", "name": "forward", "handle": 1}},
        {"chain": {"family": "ip", "table": "flannel-ipv4", "name": "postrtg", "handle": 4}},
        {"rule": {"family": "ip", "chain": "forward", "handle": 2, "expr": [{"accept": None}]}},
        {"rule": {"family": "ip", "chain": "forward", "handle": 3, "expr": [{"accept": None}]}},
    ]
}


def test_a_listing_gives_rules_and_their_handles() -> None:
    accept = Rule("ACCEPT")
    listing = read_listing(4, ANSWER)
    assert listing == NftablesListing(
        {FORWARD: (accept, accept), POSTRTG: ()}, {(FORWARD, accept): [2, 3]}, others=False
    )


def test_each_copy_of_a_rule_is_deleted_once() -> None:
    accept = Rule("ACCEPT")
    made = commands(4, [Edit(FORWARD, delete=(accept, accept))], read_listing(4, ANSWER))
    assert [each["delete"]["rule"]["handle"] for each in made[1:]] == [2, 3]


def test_a_table_goes_as_a_whole_when_nothing_else_is_in_it() -> None:
    drops = [Edit(POSTRTG, drop=True), Edit(FORWARD, drop=True)]
    assert commands(4, drops, read_listing(4, ANSWER)) == [
        {"delete": {"table": {"family": "ip", "name": "flannel-ipv4"}}}
    ]


def test_one_chain_goes_without_the_table() -> None:
    made = commands(4, [Edit(POSTRTG, drop=True)], read_listing(4, ANSWER))
    assert [next(iter(each)) for each in made] == ["add", "flush", "delete"]
    assert made[-1] == {"delete": {"chain": {"family": "ip", "table": "flannel-ipv4", "name": "postrtg"}}}


@pytest.mark.parametrize("other", ["chain", "set", "map", "flowtable"])
def test_a_table_stays_when_an_operator_uses_it(other: str) -> None:
    answer = {"nftables": [*ANSWER["nftables"], {other: {"family": "ip", "name": "mine"}}]}
    drops = [Edit(POSTRTG, drop=True), Edit(FORWARD, drop=True)]
    made = commands(4, drops, read_listing(4, answer))
    assert [next(iter(each)) for each in made] == ["add", "flush", "delete", "flush", "delete"]
    assert [each["delete"]["chain"]["name"] for each in made if "delete" in each] == ["postrtg", "forward"]
