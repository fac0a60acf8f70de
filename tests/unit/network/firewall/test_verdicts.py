"""What the chains of others do to a packet."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.model import Family
from flanneld.network.firewall.fate import (
    ACCEPT,
    DNAT,
    DROP,
    RETURN,
    UNKNOWN,
    Fate,
    Packet,
    Rule,
    Test,
    fate,
    walked,
)
from flanneld.network.firewall.foreign import BaseChain, Opening, of_network
from flanneld.network.firewall.iptables_text import _MOST_ELEMENTS, read_ipsets, read_table
from flanneld.network.firewall.nft_json import read_chains

PACKET = Packet("eth0", "", ip_address("192.0.2.2"), ip_address("192.0.2.1"), "udp", 8472)
INNER = Packet("cni0", "flannel.1", ip_address("10.5.1.2"), ip_address("10.5.2.2"))


def iptables(*rules: str, packet: Packet = PACKET) -> Fate:
    text = "\n".join(["*filter", ":INPUT ACCEPT [0:0]", ":own - [0:0]", *rules, "COMMIT"])
    chains, policies = read_table(text)
    assert policies == {"INPUT": "ACCEPT", "own": "-"}
    return fate(chains, "INPUT", packet)


@pytest.mark.parametrize(
    ("rule", "is_dropped"),
    [
        ("-p udp -m udp --dport 8472 -j DROP", True),
        ("-p udp -m udp --dport 8000:9000 -j REJECT --reject-with icmp-port-unreachable", True),
        ("-p udp -m multiport --dports 53,8472 -m comment --comment 'no overlay' -j DROP", True),
        ("-p 17 -j DROP", True),
        ("-s 192.0.2.0/24 -i eth+ -j DROP", True),
        ("-s 192.0.2.9/255.255.255.0 -j DROP", True),
        ("! -i lo -j DROP", True),
        ("-m conntrack --ctstate NEW -j DROP", True),
        ("-m state ! --state RELATED,ESTABLISHED -j DROP", True),
        ("-j DROP", True),
        ("-p udp -m udp --dport 4789 -j DROP", False),
        ("-p udp -m udp --dport 8000:8400 -j DROP", False),
        ("-p udp -m udp --dport 8500:9000 -j DROP", False),
        ("-p udp -m multiport ! --dports 8472 -j DROP", False),
        ("-p tcp -j DROP", False),
        ("-s 198.51.100.0/24 -j DROP", False),
        ("-i eth1 -j DROP", False),
        ("-i etx+ -j DROP", False),
        ("-o eth0 -j DROP", False),
        ("-m conntrack --ctstate INVALID -j DROP", False),
        ("-m limit --limit 5/sec -j DROP", False),
        ("-p udp -m u32 --u32 0x0=0x0 -j DROP", False),
        ("-p udp -j LOG --log-prefix DROP", False),
        ("-p udp -j MARK --set-xmark 0x1/0x1", False),
        ("-j TTL --ttl-set 1", True),
        ("-j TTL --ttl-set 64", False),
        ("-m physdev --physdev-out veth1 -j DROP", False),
        ("-m mark --mark 0x1 -j DROP", False),
        ("", False),
    ],
)
def test_rule_of_iptables_drops_what_it_matches_for_sure(rule: str, is_dropped: bool) -> None:
    line = f"-A INPUT {rule}".strip()
    decided = iptables(line)
    assert (decided == Fate(DROP, line)) == is_dropped
    assert decided.act == (DROP if is_dropped else "")
    assert decided.doubt == (line if "limit" in rule or "u32" in rule else "")


def test_rule_that_may_accept_makes_a_later_drop_uncertain() -> None:
    drop = "-A INPUT -p udp -j DROP"
    accept = "-A INPUT -m set --match-set nodes src -j ACCEPT"
    assert iptables(accept, drop) == Fate(DROP, drop, accept)
    assert iptables("-A INPUT -m limit --limit 5/sec -j own", "-A own -j ACCEPT", drop).certain is False
    assert iptables("-A INPUT -m limit --limit 5/sec -j DROP", drop) == Fate(DROP, drop)
    assert iptables("-A INPUT --unknown 'unbalanced", drop).certain is False


def test_first_of_several_rules_that_may_drop_is_told() -> None:
    first, second = (f"-A INPUT -m limit --limit {rate}/sec -j DROP" for rate in (5, 6))
    assert iptables(first, second) == Fate(doubt=first, may_drop=True)
    assert iptables(second, first) == Fate(doubt=second, may_drop=True)
    last = "-A INPUT -j DROP"
    assert iptables(first, last, second) == Fate(DROP, last)


SETS = """
create nets hash:net family inet hashsize 1024
add nets 192.0.2.0/24 comment "peers"
add nets 198.51.100.0/24
create but hash:net family inet
add but 192.0.2.0/24
add but 192.0.2.2 nomatch
create pairs hash:net,port,net family inet
add pairs 192.0.2.0/24,udp:8472,192.0.2.1
create ports bitmap:port range 0-65535
add ports 8472
create tcp hash:ip,port family inet
add tcp 192.0.2.1,tcp:8472
create links hash:net,iface family inet
add links 192.0.2.0/24,eth0
add links 192.0.2.0/24,physdev:eth1
create macs hash:mac hashsize 1024
add macs 02:00:00:00:00:01
create all list:set size 8
add all but
add all nets
create six hash:net family inet6
add six 2001:db8::/32
create empty hash:ip family inet
create masked hash:ip family inet hashsize 1024 netmask 24
add masked 192.0.2.0
"""


@pytest.mark.parametrize(
    ("test", "is_dropped"),
    [
        ("--match-set nets src", True),
        ("! --match-set nets dst", False),
        ("--match-set ports dst", True),
        ("--match-set ports src", None),
        ("--match-set pairs src,dst,dst", True),
        ("--match-set pairs dst,dst,src", False),
        ("--match-set tcp dst,dst", False),
        ("--match-set links src,src", True),
        ("--match-set links src,dst", False),
        ("--match-set all src", True),
        ("--match-set six src", False),
        ("--match-set empty src", False),
        ("! --match-set empty src", True),
        ("--match-set but src", None),
        ("--match-set masked src", None),
        ("--match-set macs src", None),
        ("--match-set missing src", None),
        ("--match-set nets src --return-nomatch", None),
    ],
)
def test_rule_about_a_set_of_ipset_is_certain_if_its_elements_are_known(
    test: str, is_dropped: bool | None
) -> None:
    line = f"-A INPUT -m set {test} -j DROP"
    chains, _ = read_table(f":INPUT ACCEPT [0:0]\n{line}", read_ipsets(SETS))
    decided = fate(chains, "INPUT", PACKET)
    assert (
        decided == {True: Fate(DROP, line), False: Fate(), None: Fate(doubt=line, may_drop=True)}[is_dropped]
    )


def test_elements_of_a_very_large_set_are_not_kept() -> None:
    added = (f"add hostile 192.0.2.{number % 256}" for number in range(3 * _MOST_ELEMENTS))
    sets = read_ipsets("\n".join(("create hostile hash:ip family inet", *added)))
    assert len(sets["hostile"][1]) == _MOST_ELEMENTS + 1
    line = "-A INPUT -m set ! --match-set hostile src -j DROP"
    dimensions, elements = sets["hostile"]
    for kept, expected in ((elements, Fate(doubt=line, may_drop=True)), (elements[:-1], Fate())):
        chains, _ = read_table(f":INPUT ACCEPT [0:0]\n{line}", {"hostile": (dimensions, kept)})
        assert fate(chains, "INPUT", PACKET) == expected


@pytest.mark.parametrize("prefix", ["-s", "-j", '"-j DROP"', "!"])
def test_prefix_of_a_log_target_may_look_like_an_option(prefix: str) -> None:
    log, drop = f"-A INPUT -p udp -j LOG --log-prefix {prefix} --log-level 4", "-A INPUT -j DROP"
    assert iptables(log, drop) == Fate(DROP, drop)


def test_target_of_another_kind_may_decide_anything() -> None:
    drop = "-A INPUT -j DROP"
    assert iptables("-A INPUT -j NFQUEUE --queue-num 1", drop) == Fate(
        DROP, drop, "-A INPUT -j NFQUEUE --queue-num 1"
    )
    assert nft([{"queue": {"num": 1}}], [DROPS]) == Fate(DROP, "1", "0")


SOME = "-m set --match-set nodes src"
MARKS, UNTRACKS = "-j MARK --set-xmark 0x1/0x1", "-j CT --notrack"


@pytest.mark.parametrize(
    "rules",
    [
        (f"-A INPUT {SOME} {MARKS}", "-A INPUT -m mark --mark 0x1/0x1 -j DROP"),
        (f"-A INPUT {SOME} {UNTRACKS}", "-A INPUT -m conntrack --ctstate UNTRACKED -j DROP"),
        (f"-A INPUT {SOME} -j own", f"-A own {UNTRACKS}", "-A INPUT -m conntrack --ctstate NEW -j DROP"),
        (
            "-A INPUT -j own",
            f"-A own {SOME} -j RETURN",
            f"-A own {MARKS}",
            "-A INPUT -m mark --mark 0x1 -j DROP",
        ),
    ],
)
def test_rule_that_may_change_a_packet_makes_a_later_drop_uncertain(rules: tuple[str, ...]) -> None:
    assert iptables(*rules).doubt == rules[-1]


def test_open_state_of_a_connection_leaves_tests_of_other_packets_certain() -> None:
    untracks: list[dict[str, Any]] = [{"limit": {"rate": 5}}, {"notrack": None}]
    assert nft(untracks, [match(meta("nfproto"), "ipv4"), DROPS]) == Fate(DROP, "1")
    assert nft(untracks, [match({"ct": {"key": "status"}}, "dnat", "in"), DROPS]) == Fate()
    assert nft(untracks, [match({"ct": {"key": "direction"}}, "original"), DROPS]) == Fate(
        doubt="1", may_drop=True
    )
    drop = "-A INPUT -m physdev ! --physdev-is-bridged -j DROP"
    assert iptables(f"-A INPUT {SOME} {UNTRACKS}", drop) == Fate(DROP, drop)


def test_packet_that_may_have_been_accepted_before_its_mark_has_an_open_one() -> None:
    chains, _ = read_table(f":INPUT ACCEPT [0:0]\n-A INPUT {SOME} -j ACCEPT\n-A INPUT {MARKS}")
    assert walked(chains, "INPUT", PACKET) == (
        Fate(doubt=f"-A INPUT {SOME} -j ACCEPT"),
        replace(PACKET, mark=None),
    )


@pytest.mark.parametrize(
    ("given", "mark"),
    [("0x2/0xff", 0x102), ("0x2/0x2", 0x107), ("0x2/0x0", 0x105), ("0x0/0x7", 0x100), ("0x200", 0x200)],
)
def test_new_mark_clears_some_bits_and_toggles_others(given: str, mark: int) -> None:
    chains, _ = read_table(f":INPUT ACCEPT [0:0]\n-A INPUT -j MARK --set-xmark {given}")
    assert walked(chains, "INPUT", replace(PACKET, mark=0x107))[1].mark == mark


def test_walk_follows_jumps_returns_and_gotos() -> None:
    drop = "-A INPUT -j DROP"
    assert iptables("-A INPUT -j own", "-A own -p udp -j ACCEPT", drop).act == ACCEPT
    assert iptables("-A INPUT -j own", "-A own -p tcp -j ACCEPT", drop) == Fate(DROP, drop)
    assert iptables("-A INPUT -j own", "-A own -j RETURN", "-A own -j ACCEPT", drop) == Fate(DROP, drop)
    assert iptables("-A INPUT -g own", "-A own -p tcp -j ACCEPT", drop) == Fate()
    loop = {"one": (Rule("two", text="to two"),), "two": (Rule("one", is_goto=True, text="to one"),)}
    assert fate(loop, "one", PACKET) == Fate(doubt="to one", may_drop=True)
    back = {"one": (Rule(RETURN, (UNKNOWN,), text="back"), Rule(DROP, text="drop"))}
    assert fate(back, "one", PACKET) == Fate(DROP, "drop", "back")
    assert fate(back, "none", PACKET) == Fate(doubt="none")


def test_walk_is_as_deep_as_a_packet_filter_may_be() -> None:
    jumps = {str(depth): (Rule(str(depth + 1), text=f"to {depth + 1}"),) for depth in range(16)}
    drop = (Rule(DROP, text="drop"),)
    assert fate(jumps | {"15": drop}, "0", PACKET) == Fate(DROP, "drop")
    assert fate(jumps | {"16": drop}, "0", PACKET) == Fate(doubt="to 16", may_drop=True)


def test_rule_about_a_protocol_does_not_decide_on_packets_of_any() -> None:
    rules = ("-A INPUT -p tcp -j ACCEPT", "-A INPUT -i cni0 -j DROP")
    assert iptables(*rules, packet=INNER) == Fate(DROP, rules[1], rules[0])
    assert iptables(rules[0].replace("ACCEPT", "DROP"), packet=INNER).act == ""
    somewhere = replace(INNER, oif=None)
    assert iptables("-A INPUT -o veth9 -j DROP", packet=somewhere).act == ""
    unicast = "-A INPUT -m addrtype --dst-type UNICAST -j DROP"
    assert iptables(unicast, packet=somewhere) == Fate(DROP, unicast)


def test_rules_of_ufw_drop_what_is_not_let_in() -> None:
    rules = [
        "-A INPUT -j own",
        "-A own -i lo -j ACCEPT",
        "-A own -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-A own -p udp -m udp --sport 67 --dport 68 -j ACCEPT",
        "-A own -m addrtype --dst-type MULTICAST -j RETURN",
        "-A own -m limit --limit 3/min -j LOG",
        "-A own -j DROP",
    ]
    assert iptables(*rules) == Fate(DROP, rules[-1])
    local = "-A own -m addrtype --dst-type LOCAL -j RETURN"
    assert iptables(rules[0], local, rules[-1]) == Fate()
    assert iptables(rules[0], local, rules[-1], packet=INNER) == Fate(DROP, rules[-1])


PORTS, MARKED, ETH = Test("dport", ((8000, 9000),)), Test("mark", ((1, 1),)), Test("iif", ("eth*",))


@pytest.mark.parametrize(
    ("test", "properties", "holds"),
    [
        (PORTS, [{"dport": each} for each in (8000, 9000, (8000, 9000))], True),
        (PORTS, [{"dport": each} for each in (7999, 9001, (1, 7999), (9001, 9500))], False),
        (PORTS, [{"dport": each} for each in (None, (7999, 8000), (8000, 9001), (9000, 9500))], None),
        (MARKED, [{"mark": each} for each in (1, 3, 0x101)], True),
        (MARKED, [{"mark": each} for each in (0, 2)], False),
        (Test("mark", ((0, 0xFF),)), [{"mark": 0x100}, {"mark": 0}], True),
        (MARKED, [{"mark": None}], None),
        (Test("flags", ((2, 0x17),)), [{"flags": 2}, {"flags": 0x42}], True),
        (Test("flags", ((2, 0x17),)), [{"flags": 0x12}, {"flags": 0}], False),
        (Test("source_type", ("local",)), [{"iif": ""}], True),
        (Test("source_type", ("local",)), [{"iif": "eth0"}, {"iif": None}], False),
        (Test("destination_type", ("local",)), [{"oif": ""}], True),
        (Test("destination_type", ("local",)), [{"oif": "eth0"}, {"oif": None}], False),
        (ETH, [{"iif": "eth0"}, {"iif": "eth"}], True),
        (ETH, [{"iif": "veth0"}, {"iif": ""}], False),
        (Test("port", ((53, 53),)), [{"sport": 53, "dport": 9}, {"sport": 9, "dport": 53}], True),
        (Test("port", ((53, 53),)), [{"sport": 9, "dport": 9}], False),
        (Test("port", ((53, 53),)), [{"sport": None, "dport": 9}], None),
        (Test("any", ((PORTS, ETH), (MARKED,))), [{"dport": 1, "mark": 1}, {"dport": 8000}], True),
        (Test("any", ((PORTS, ETH), (MARKED,))), [{"dport": 8000, "iif": "lo"}], False),
        (Test("any", ((PORTS, ETH),)), [{"dport": None}], None),
        (Test("any", ((PORTS, ETH),)), [{"dport": None, "iif": "lo"}], False),
        (Test("protocol"), [{}], False),
        (UNKNOWN, [{}], None),
    ],
)
def test_condition_holds_or_not_or_is_open(
    test: Test, properties: list[dict[str, Any]], holds: bool | None
) -> None:
    found = {test.holds(replace(PACKET, **each)) for each in properties}
    assert found == {holds}
    inverted = {replace(test, negated=True).holds(replace(PACKET, **each)) for each in properties}
    assert inverted == {None if holds is None else not holds}


# ---- nftables -----------------------------------------------------------------------------------


def match(left: dict[str, Any], right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


def payload(protocol: str, field: str) -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": field}}


def meta(key: str) -> dict[str, Any]:
    return {"meta": {"key": key}}


STATE = {"ct": {"key": "state"}}
DPORT = payload("udp", "dport")
DROPS = {"drop": None}


def nft(*rules: list[dict[str, Any]], packet: Packet = PACKET, family: Family = 4) -> Fate:
    items: list[dict[str, Any]] = [{"metainfo": {}}, {"chain": {"name": "c"}}]
    items += [{"rule": {"chain": "c", "handle": n, "expr": expr}} for n, expr in enumerate(rules)]
    return fate(read_chains(json.dumps({"nftables": items}), family), "c", packet)


@pytest.mark.parametrize(
    ("expressions", "is_dropped"),
    [
        ([match(DPORT, 8472), {"counter": {}}, DROPS], True),
        ([match(DPORT, {"set": [53, {"range": [8000, 9000]}]}), {"reject": {"type": "icmpx"}}], True),
        ([match(payload("th", "dport"), 53, "!="), DROPS], True),
        ([match(meta("l4proto"), {"set": ["tcp", "udp"]}), DROPS], True),
        ([match(meta("l4proto"), 17), DROPS], True),
        ([match(meta("iifname"), "eth*"), match(meta("nfproto"), "ipv4"), DROPS], True),
        ([match(payload("ip", "saddr"), {"prefix": {"addr": "192.0.2.0", "len": 24}}), DROPS], True),
        ([match(payload("ip", "protocol"), "udp"), match(STATE, ["new"], "in"), DROPS], True),
        ([match(STATE, ["established", "related"], "!="), DROPS], True),
        ([match(meta("protocol"), "ip"), DROPS], True),
        ([{"vmap": {"key": DPORT, "data": {"set": [[53, {"accept": None}], [8472, DROPS]]}}}], True),
        ([match(DPORT, {"set": [{"elem": {"val": 8472}}]}), DROPS], True),
        ([match(payload("ip6", "saddr"), "2001:db8::1"), DROPS], False),
        ([match(meta("nfproto"), "ipv6"), DROPS], False),
        ([match(DPORT, "@ports"), DROPS], False),
        ([match({"&": [meta("mark"), 255]}, 1), DROPS], False),
        ([match(DPORT, 9000, "<"), DROPS], True),
        ([match(DPORT, 9000, ">="), DROPS], False),
        ([match(DPORT, True), DROPS], False),
        ([{"limit": {"rate": 5}}, DROPS], False),
        ([{"set": {"op": "update", "set": "@seen", "stmt": [{"limit": {"rate": 5}}]}}, DROPS], False),
        ([{"vmap": {"key": DPORT, "data": "@decisions"}}], False),
        ([match(DPORT, {"set": [{"elem": {"val": 8473}}]}), DROPS], False),
        ([{"counter": {}}], False),
    ],
)
def test_rule_of_nftables_drops_what_it_matches_for_sure(
    expressions: list[dict[str, Any]], is_dropped: bool
) -> None:
    found = nft(expressions)
    assert (found == Fate(DROP, "0")) == is_dropped
    assert (found.act == DROP) == is_dropped


@pytest.mark.parametrize(
    ("field", "value", "act"),
    [
        (("ip", "daddr"), "203.0.113.1", DNAT),
        (("ip", "saddr"), "203.0.113.1", DNAT),
        (("udp", "dport"), 9999, DNAT),
        (("ip", "ttl"), 1, DROP),
        (("ip", "ttl"), 64, ""),
        (("ip", "dscp"), 46, ""),
    ],
)
def test_packet_with_another_receiver_or_no_hop_left_does_not_get_there(
    field: tuple[str, str], value: str | int, act: str
) -> None:
    assert nft([{"mangle": {"key": payload(*field), "value": value}}]).act == act


def test_port_of_a_bridge_by_which_a_routed_packet_came_is_not_known() -> None:
    drop = "-A INPUT -m physdev --physdev-in veth1 -j DROP"
    assert iptables(drop) == Fate(doubt=drop, may_drop=True)


def test_rules_of_firewalld_reject_what_no_zone_lets_in() -> None:
    accept = {"accept": None}
    first = [
        [match(STATE, ["established", "related"], "in"), accept],
        [match({"ct": {"key": "status"}}, "dnat", "in"), accept],
        [match(meta("iifname"), "lo"), accept],
        [match(STATE, "invalid", "in"), DROPS],
        [match({"fib": {"result": "type", "flags": ["daddr"]}}, "broadcast"), accept],
    ]
    let_in = [match(payload("tcp", "dport"), 22), match(meta("l4proto"), "tcp"), accept]
    assert nft(*first, let_in, [{"reject": {"type": "icmpx"}}]) == Fate(DROP, "6")
    assert nft(*first, [match(DPORT, 8472), accept], [DROPS]).act == ACCEPT


def test_a_named_map_may_decide_anything() -> None:
    assert nft([{"vmap": {"key": DPORT, "data": "@decisions"}}], [DROPS]) == Fate(DROP, "1", "0")


@pytest.mark.parametrize("name", ["LOG", "ACCEPT", "MARK"])
def test_chain_of_nftables_with_the_name_of_a_target_may_decide_anything(name: str) -> None:
    items: list[dict[str, Any]] = [{"chain": {"name": each}} for each in ("c", name)]
    for chain, verdict in (("c", {"jump": {"target": name}}), (name, DROPS)):
        items.append({"rule": {"chain": chain, "handle": len(items), "expr": [verdict]}})
    assert fate(read_chains(json.dumps({"nftables": items}), 4), "c", PACKET).doubt == "2"


@pytest.mark.parametrize("text", ['{"nftables": [{"rule": {}}]}', "{}", "[]", "no JSON"])
def test_listing_that_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_chains(text, 4)


# ---- base chains --------------------------------------------------------------------------------

NATIVE = BaseChain("native", 4, "inet wall", "c", "input", True, {"c": ()})
LEGACY = BaseChain("legacy", 4, "ip filter", "INPUT", "input", True, {})
UDP = Opening("udp", 8472)
NETWORK = Opening(side="saddr", network=ip_network("10.5.0.0/16"))


def test_policy_drops_what_no_rule_decides() -> None:
    assert NATIVE.fate(PACKET) == Fate(DROP)
    assert replace(NATIVE, drops=False).fate(PACKET) == Fate()
    assert replace(NATIVE, device="eth1").fate(PACKET) == Fate()
    steps = (Rule(ACCEPT, (Test("iif", ("eth0",)),), text="own"),)
    assert replace(NATIVE, chains={"c": steps}).fate(PACKET).act == ACCEPT


@pytest.mark.parametrize(
    ("base", "opening", "command"),
    [
        (NATIVE, UDP, "nft insert rule inet wall c udp dport 8472 accept"),
        (NATIVE, NETWORK, "nft insert rule inet wall c ip saddr 10.5.0.0/16 accept"),
        (NATIVE, Opening("ipencap"), "nft insert rule inet wall c meta l4proto ipencap accept"),
        (LEGACY, UDP, "iptables-legacy -I INPUT -p udp --dport 8472 -j ACCEPT"),
        (LEGACY, NETWORK, "iptables-legacy -I INPUT -s 10.5.0.0/16 -j ACCEPT"),
        (
            replace(LEGACY, place="nft", table="ip6 raw", chain="PREROUTING", family=6),
            UDP,
            "ip6tables-nft -t raw -I PREROUTING -p udp --dport 8472 -j ACCEPT",
        ),
    ],
)
def test_commands_that_accept_go_before_the_first_rule(
    base: BaseChain, opening: Opening, command: str
) -> None:
    assert [" ".join(each) for each in base.accept(opening)] == [command]


def test_firewalld_is_asked_to_accept() -> None:
    base = replace(NATIVE, table="inet firewalld")
    network = ip_network("10.5.0.0/16")
    assert [" ".join(each) for each in base.accept(*of_network(network), UDP, Opening("esp"))] == [
        "firewall-cmd --permanent --zone=trusted --add-source=10.5.0.0/16",
        "firewall-cmd --permanent --add-port=8472/udp",
        "firewall-cmd --permanent --add-protocol=esp",
        "firewall-cmd --reload",
    ]
