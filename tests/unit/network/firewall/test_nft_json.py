"""Rules in libnftables' JSON: what is sent is what would be listed, and what is listed is understood."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

from flanneld.model import FAMILIES, Family
from flanneld.network.firewall.fate import ALL_BITS, NEVER, UNKNOWN, Rule, Test
from flanneld.network.firewall.nft_json import ListedRule, Sets, read_rules
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
            assert ours.is_plain


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


# ---- expressions ---------------------------------------------------------------------------------


def meta(key: str) -> dict[str, Any]:
    return {"meta": {"key": key}}


def ct(key: str) -> dict[str, Any]:
    return {"ct": {"key": key}}


def payload(protocol: str, field: str) -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": field}}


def fib(*flags: str) -> dict[str, Any]:
    return {"fib": {"result": "type", "flags": list(flags)}}


def conditions(
    left: Any, op: str, right: Any, family: Family = 4, sets: Sets | None = None
) -> tuple[Test, ...]:
    expr: list[dict[str, Any]] = [{"match": {"op": op, "left": left, "right": right}}, {"drop": None}]
    (found,) = read_rules(ListedRule("forward", 1, expr), family, sets or {})
    assert (found.verdict, found.text) == ("DROP", "1")
    return found.tests


UDP, TCP = Test("protocol", ("udp",)), Test("protocol", ("tcp",))
ALWAYS = replace(NEVER, negated=True)
NETWORK, HOST = ip_network("10.5.0.0/16"), ip_network("10.5.0.3/32")
DPORT, FLAGS, PROTOCOLS = payload("udp", "dport"), payload("tcp", "flags"), payload("ip", "protocol")


@pytest.mark.parametrize(
    ("left", "op", "right", "tests"),
    [
        (meta("iif"), "==", "eth0", [Test("iif", ("eth0",))]),
        (meta("iifname"), "==", "eth*", [Test("iif", ("eth*",))]),
        (meta("oif"), "!=", "lo", [Test("oif", ("lo",), negated=True)]),
        (meta("oifname"), "==", {"set": ["eth0", "eth1"]}, [Test("oif", ("eth0", "eth1"))]),
        (meta("mark"), "==", 7, [Test("mark", ((7, ALL_BITS),))]),
        (meta("pkttype"), "!=", "host", [Test("pkttype", ("unicast",), negated=True)]),
        (meta("l4proto"), "==", 17, [UDP]),
        (PROTOCOLS, "==", {"set": ["tcp", "udp"]}, [Test("protocol", ("tcp", "udp"))]),
        (payload("ip6", "nexthdr"), "==", 17, [NEVER]),
        (ct("state"), "in", ["new", "related"], [Test("state", ("new", "related"))]),
        (ct("state"), "!=", "invalid", [Test("state", ("invalid",), negated=True)]),
        (ct("state"), "<", "new", [UNKNOWN]),
        (ct("status"), "in", "dnat", [NEVER]),
        (ct("status"), "!=", "dnat", [ALWAYS]),
        (ct("direction"), "==", "original", [Test("state", ("new",))]),
        (ct("direction"), "!=", "original", [Test("state", ("new",), negated=True)]),
        (ct("direction"), "==", "reply", [NEVER]),
        (fib("daddr"), "==", "local", [Test("destination_type", ("local",))]),
        (fib("saddr", "iif"), "!=", "unicast", [Test("source_type", ("unicast",), negated=True)]),
        (fib("mark"), "==", "local", [UNKNOWN]),
        (payload("icmp", "type"), "==", 8, [Test("protocol", ("icmp",)), Test("icmp", ("echo-request",))]),
        (
            payload("icmpv6", "type"),
            "==",
            135,
            [Test("protocol", ("ipv6-icmp",)), Test("icmp", ("nd-neighbor-solicit",))],
        ),
        (SADDR, "==", NET, [Test("source", (NETWORK,))]),
        (SADDR, "!=", "10.5.0.3", [Test("source", (HOST,), negated=True)]),
        (
            payload("ip", "daddr"),
            "==",
            {"range": ["10.5.0.0", "10.5.255.255"]},
            [Test("destination", (NETWORK,))],
        ),
        (payload("ip6", "daddr"), "==", "fc00::1", [NEVER]),
        (payload("arp", "saddr ip"), "==", "10.5.0.3", [NEVER]),
        (DPORT, "==", 53, [UDP, Test("dport", ((53, 53),))]),
        (DPORT, "!=", {"range": [53, 67]}, [UDP, Test("dport", ((53, 67),), negated=True)]),
        (DPORT, "==", {"set": [53, {"elem": {"val": 67}}]}, [UDP, Test("dport", ((53, 53), (67, 67)))]),
        (DPORT, "==", {"set": 53}, [UDP, Test("dport", ((53, 53),))]),
        (DPORT, "==", "@ports", [UDP, Test("dport", ((53, 53), (80, 90)))]),
        (DPORT, "==", "@missing", [UDP, UNKNOWN]),
        (DPORT, "==", "domain", [UDP, UNKNOWN]),
        (DPORT, "==", True, [UDP, UNKNOWN]),
        (DPORT, "in", 53, [UDP, UNKNOWN]),
        (DPORT, "<", 53, [UDP, Test("dport", ((0, 52),))]),
        (DPORT, "<=", 53, [UDP, Test("dport", ((0, 53),))]),
        (payload("th", "sport"), ">", 53, [Test("sport", ((54, 65536),))]),
        (payload("th", "sport"), ">=", 53, [Test("sport", ((53, 65536),))]),
        (meta("mark"), "<", 53, [UNKNOWN]),
        (meta("mark"), "==", "53", [UNKNOWN]),
        (meta("cpu"), "==", 1, [UNKNOWN]),
        (meta("nfproto"), "==", "ipv4", [ALWAYS]),
        (meta("nfproto"), "==", "ipv6", [NEVER]),
        (meta("protocol"), "!=", {"set": ["ip", "arp"]}, [NEVER]),
        (payload("ether", "type"), "!=", "ip6", [ALWAYS]),
        ({"&": [meta("mark"), 255]}, "==", 1, [Test("mark", ((1, 255),))]),
        ({"&": [meta("mark"), 255]}, "!=", 1, [Test("mark", ((1, 255),), negated=True)]),
        ({"&": [meta("mark"), 255]}, "<", 1, [UNKNOWN]),
        ({"&": [meta("cpu"), 255]}, "==", 1, [UNKNOWN]),
        (FLAGS, "==", "syn", [TCP, Test("flags", ((2, 255),))]),
        (FLAGS, "!=", 16, [TCP, Test("flags", ((16, 255),), negated=True)]),
        (FLAGS, "in", ["syn", "ack"], [TCP, Test("flags", ((2, 2), (16, 16)))]),
        ({"&": [FLAGS, {"|": ["syn", "ack"]}]}, "==", "syn", [TCP, Test("flags", ((2, 18),))]),
        ({"&": [FLAGS, ["syn", "ack"]]}, "!=", 0, [TCP, Test("flags", ((0, 18),), negated=True)]),
        ({"&": [payload("ip", "frag-off"), 0x1FFF]}, "==", 0, [ALWAYS]),
        ({"&": [payload("ip", "frag-off"), 0x1FFF]}, "!=", 0, [NEVER]),
        ({"&": [payload("ip", "frag-off"), 0x1FFF]}, ">", 0, [NEVER]),
        ({"exthdr": {"name": "frag"}}, "==", True, [NEVER]),
        ({"exthdr": {"name": "frag"}}, "==", False, [ALWAYS]),
        ({"exthdr": {"name": "frag"}}, "!=", True, [ALWAYS]),
        ({"exthdr": {"name": "frag"}}, "!=", False, [NEVER]),
        (
            {"concat": [SADDR, DPORT]},
            "==",
            {"concat": ["10.5.0.3", 53]},
            [Test("any", ((Test("source", (HOST,)), UDP, Test("dport", ((53, 53),))),))],
        ),
        (
            {"concat": [meta("iif"), meta("oif")]},
            "!=",
            "@pairs",
            [Test("any", ((Test("iif", ("a",)), Test("oif", ("b",))),), negated=True)],
        ),
        ({"concat": [SADDR, DPORT]}, "==", "@missing", [UNKNOWN]),
    ],
)
def test_comparison_is_a_condition_of_packets(left: Any, op: str, right: Any, tests: list[Test]) -> None:
    sets = {"ports": Raw(b'[53, {"range": [80, 90]}]'), "pairs": Raw(b'[{"concat": ["a", "b"]}]')}
    assert conditions(left, op, right, sets=sets) == tuple(tests)


def test_flags_of_tcp_have_the_bits_of_their_order() -> None:
    for number, name in enumerate(("fin", "syn", "rst", "psh", "ack", "urg", "ecn", "cwr")):
        assert conditions(FLAGS, "==", name) == (TCP, Test("flags", ((1 << number, 255),)))


@pytest.mark.parametrize(
    ("field", "op", "several", "is_plain"),
    [
        ("daddr", "==", True, True),  # destinations that masquerading spares
        ("daddr", "!=", True, False),
        ("saddr", "==", True, False),
        ("daddr", "==", False, True),
        ("daddr", "!=", False, True),
        ("saddr", "!=", False, True),
    ],
)
def test_only_destinations_of_a_rule_of_ours_may_be_several(
    field: str, op: str, several: bool, is_plain: bool
) -> None:
    right = {"set": ["10.5.0.1", "10.5.0.2"]} if several else "10.5.0.1"
    found = rule({"match": {"op": op, "left": payload("ip", field), "right": right}}, {"return": None})
    assert found.is_plain is is_plain


@pytest.mark.parametrize(
    ("left", "right", "test"),
    [
        (payload("ip", "saddr"), "10.5.0.3", NEVER),
        (payload("ip6", "nexthdr"), 58, Test("protocol", ("ipv6-icmp",))),
        (meta("nfproto"), "ipv6", ALWAYS),
        (meta("nfproto"), "ipv4", NEVER),
        (meta("protocol"), "ip6", ALWAYS),
        (payload("ip6", "daddr"), "fc00::1", Test("destination", (ip_network("fc00::1/128"),))),
    ],
)
def test_comparison_of_the_other_family_never_holds(left: Any, right: Any, test: Test) -> None:
    assert conditions(left, "==", right, family=6) == (test,)


@pytest.mark.parametrize(
    ("statement", "verdict"),
    [
        ({"accept": None}, "ACCEPT"),
        ({"drop": None}, "DROP"),
        ({"reject": {"type": "icmpx"}}, "REJECT"),
        ({"return": None}, "RETURN"),
        ({"masquerade": None}, "MASQUERADE"),
        ({"snat": {"addr": "192.0.2.1"}}, "SNAT"),
        ({"dnat": {"addr": "192.0.2.1"}}, "DNAT"),
        ({"redirect": {"port": 53}}, "DNAT"),
        ({"notrack": None}, "NOTRACK"),
        ({"queue": {"num": 1}}, "unknown"),
        ({"jump": {"target": "own"}}, "own"),
        ({"goto": {"target": "own"}}, "own"),
        ({"jump": {"target": "DROP"}}, "unknown"),
        ({"xt": None}, "unknown"),
        ({"counter": None}, ""),
        ({"log": {"prefix": "x"}}, ""),
    ],
)
def test_statement_is_a_verdict_on_packets(statement: dict[str, Any], verdict: str) -> None:
    found, *_ = read_rules(ListedRule("forward", 1, [statement]), 4)
    assert (found.verdict, found.is_goto) == (verdict, "goto" in statement)


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
