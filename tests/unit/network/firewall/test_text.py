"""Rules as iptables prints them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.model import FAMILIES, Family
from flanneld.network.firewall.fate import ALL_BITS, NEVER, UNKNOWN, Rule, Test
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


EDGE = ip_network("192.0.2.0/30")


@pytest.mark.parametrize(
    ("option", "test"),
    [
        ("-i eth+", Test("iif", ("eth*",))),
        ("-i eth0", Test("iif", ("eth0",))),
        ("! -o docker0", Test("oif", ("docker0",), negated=True)),
        ("-p 17", Test("protocol", ("udp",))),
        ("-p 4", Test("protocol", ("ipencap",))),
        ("-p ipip", Test("protocol", ("ipip",))),  # 94
        ("-s 192.0.2.0/30", Test("source", (EDGE,))),
        ("! -d 192.0.2.0/30", Test("destination", (EDGE,), negated=True)),
        ("-m iprange --src-range 192.0.2.0-192.0.2.3", Test("source", (EDGE,))),
        ("-m iprange ! --dst-range 192.0.2.0-192.0.2.3", Test("destination", (EDGE,), negated=True)),
        ("-m tcp --dport 80", Test("dport", ((80, 80),))),
        ("-m tcp ! --sport 1024:2048", Test("sport", ((1024, 2048),), negated=True)),
        ("-m udp --dport :1023", Test("dport", ((0, 1023),))),
        ("-m udp --sport 1024:", Test("sport", ((1024, 65535),))),
        ("-m multiport --dports 53,8000:8080", Test("dport", ((53, 53), (8000, 8080)))),
        ("-m multiport --sports 53", Test("sport", ((53, 53),))),
        ("-m multiport ! --ports 53", Test("port", ((53, 53),), negated=True)),
        ("-m conntrack --ctstate NEW,RELATED", Test("state", ("new", "related"))),
        ("-m state ! --state INVALID", Test("state", ("invalid",), negated=True)),
        ("-m addrtype --dst-type LOCAL", Test("destination_type", ("local",))),
        ("-m addrtype ! --src-type LOCAL", Test("source_type", ("local",), negated=True)),
        ("-m pkttype --pkt-type host", Test("pkttype", ("unicast",))),
        ("-m pkttype ! --pkt-type multicast", Test("pkttype", ("multicast",), negated=True)),
        ("-m icmp --icmp-type 8/0", Test("icmp", ("echo-request",))),
        ("-m icmp6 ! --icmpv6-type 135", Test("icmp", ("nd-neighbor-solicit",), negated=True)),
        ("-m mark ! --mark 0x1/0xff", Test("mark", ((1, 0xFF),), negated=True)),
        ("-m tcp --tcp-flags FIN,SYN,RST,ACK SYN", Test("flags", ((0x02, 0x17),))),
        ("-m tcp ! --tcp-flags ALL NONE", Test("flags", ((0, 0x3F),), negated=True)),
        ("-f", NEVER),
        ("! -f", replace(NEVER, negated=True)),
        ("-m physdev ! --physdev-is-bridged", replace(NEVER, negated=True)),
        ("-m tcp --tcp-flags SYN", UNKNOWN),
        ("-m tcp --tcp-option 4", UNKNOWN),
        ("-m u32", UNKNOWN),
    ],
)
def test_option_is_a_condition_of_packets(option: str, test: Test) -> None:
    assert read_rule(f"{option} -j DROP") == Rule("DROP", (test,))


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("-j RETURN", Rule("RETURN")),
        ("-g own", Rule("own", is_goto=True)),
        ("-j MASQUERADE --random-fully", Rule("MASQUERADE", random=True)),
        ("-j HMARK --hmark-mod 1", Rule("MARK", extra="--hmark-mod")),
        ("-j MARK --set-xmark 0x1/0xff", Rule("MARK", extra="--set-xmark", new_mark=(1, 0xFF))),
        ("-j MARK --set-xmark 0x1", Rule("MARK", extra="--set-xmark", new_mark=(1, ALL_BITS))),
        ("-j CT --notrack", Rule("NOTRACK", extra="--notrack")),
        ("-j CT --zone 1", Rule("CT", extra="--zone")),
        (
            "-j CONNMARK --restore-mark --nfmask 0xff --ctmask 0xff",
            Rule("MARK", extra="--restore-mark --nfmask --ctmask"),
        ),
        ("-j TTL --ttl-set 0", Rule("DROP", extra="--ttl-set")),
        ("-j TTL --ttl-set 2", Rule("TTL", extra="--ttl-set")),
        ("-j HL --hl-set 1", Rule("DROP", extra="--hl-set")),
        ("-j TTL --ttl-dec 1", Rule("TTL", extra="--ttl-dec")),
        ("-j LOG --log-prefix -j --log-level 4", Rule("LOG", extra="--log-prefix --log-level")),
    ],
)
def test_target_is_a_verdict_on_packets(target: str, rule: Rule) -> None:
    assert read_rule(target) == rule


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
