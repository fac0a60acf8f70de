"""Packet filters of others, as the kernel and the programs that list them tell them."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.network.firewall import netlink
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import ACCEPT, DROP, MARK, Fate, Packet, Rule, Test
from flanneld.network.firewall.foreign import (
    BaseChain,
    PolicyChain,
    drops_the_rest,
    fates,
    forward_drops,
    has_firewalld,
    marked,
    read,
    text_of,
)
from tests.unit.network.firewall.stand_ins import GETCHAIN, INET, IPV4, IPV6, Answer, FakeKernel, base_chain

PREROUTING, INPUT, FORWARD, OUTPUT, POSTROUTING = range(5)
PACKET = Packet("eth0", "", ip_address("192.0.2.2"), ip_address("192.0.2.1"), "udp", 8472)
NETWORK = ip_network("10.5.0.0/16")
FILTER = ":INPUT ACCEPT [0:0]\n:FORWARD DROP [0:0]\n:own - [0:0]\n-A INPUT -j own\n-A own -p udp -j DROP\n"


def listing(chain: str, *rules: dict[str, Any]) -> str:
    items = [{"rule": {"chain": chain, "handle": n, "expr": [each]}} for n, each in enumerate(rules)]
    return json.dumps({"nftables": [{"metainfo": {}}, {"chain": {"name": chain}}, *items]})


def outlined(bases: Iterable[BaseChain]) -> list[tuple[str, str, str, str, bool, int]]:
    return [(each.place, each.table, each.chain, each.hook, each.drops, each.priority) for each in bases]


@pytest.fixture
def host(kernel: FakeKernel, answer: Answer) -> FakeKernel:
    """A host with rules of iptables and of nftables, flannel's among them."""
    kernel.objects = {
        (GETCHAIN, IPV4): [
            base_chain("filter", "FORWARD", FORWARD, policy=0),
            base_chain("filter", "INPUT", INPUT),
            base_chain("raw", "PREROUTING", PREROUTING, -300),
            base_chain("mangle", "OUTPUT", OUTPUT, -150, kind="route"),
            base_chain("nat", "POSTROUTING", POSTROUTING, 100, kind="nat"),
            base_chain("flannel-ipv4", "forward", FORWARD),
        ],
        (GETCHAIN, IPV6): [base_chain("security", "INPUT", INPUT, 50)],
        (GETCHAIN, INET): [
            base_chain("wall", "arrivals", INPUT, -10, policy=0),
            base_chain("wall", "marks", OUTPUT, kind="route"),
        ],
    }
    answer("iptables-nft-save -t filter", FILTER)
    answer("iptables-nft-save -t mangle", ":OUTPUT ACCEPT [0:0]\n")
    answer("iptables-nft-save -t raw", ":PREROUTING ACCEPT [0:0]\n")
    answer("iptables-nft-save -t nat", ":POSTROUTING ACCEPT [0:0]\n")
    answer("ip6tables-nft-save -t security", ":INPUT DROP [0:0]\n")
    answer("nft -j list table inet wall", listing("arrivals", {"drop": None}))
    return kernel


ARRIVALS = ("native", "inet wall", "arrivals", "input", True, -10)
MARKS = ("native", "inet wall", "marks", "output", False, 0)
OF_INPUT = ("nft", "ip filter", "INPUT", "input", False, 0)
OF_FORWARD = ("nft", "ip filter", "FORWARD", "forward", True, 0)
OF_OUTPUT = ("nft", "ip mangle", "OUTPUT", "output", False, -150)
OF_PREROUTING = ("nft", "ip raw", "PREROUTING", "prerouting", False, -300)


@pytest.mark.usefixtures("host")
def test_base_chains_are_read_with_their_rules_and_ours_are_left_out() -> None:
    found = list(read(4))
    assert outlined(found) == [ARRIVALS, MARKS, OF_INPUT, OF_FORWARD, OF_OUTPUT, OF_PREROUTING]
    assert [each.fate(PACKET) for each in found if each.hook == "input"] == [
        Fate(DROP, "0"),
        Fate(DROP, "-A own -p udp -j DROP"),
    ]
    assert outlined(read(6)) == [ARRIVALS, MARKS, ("nft", "ip6 security", "INPUT", "input", True, 50)]


@pytest.mark.usefixtures("host")
def test_only_tables_with_a_chain_at_the_hook_are_listed(tmp_path: Path) -> None:
    assert outlined(read(4, "forward")) == [OF_FORWARD]
    assert (tmp_path / "asked").read_text() == "iptables-nft-save -t filter\n"
    assert outlined(read(4, "prerouting")) == [OF_PREROUTING]
    assert outlined(read(4, "ingress")) == []


@pytest.mark.usefixtures("host")
def test_chains_that_change_addresses_are_read_apart() -> None:
    assert outlined(read(4, kind="nat")) == [
        ("nft", "ip nat", "POSTROUTING", "postrouting", False, 100),
    ]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("answers", ["no JSON", "[]", '{"nftables": [{"rule": {}}]}', ""])
def test_table_whose_listing_is_not_understood_is_left_out(answers: str, answer: Answer) -> None:
    answer("nft -j list table inet wall", answers)
    assert outlined(read(4)) == [OF_INPUT, OF_FORWARD, OF_OUTPUT, OF_PREROUTING]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("refused", "left"),
    [
        ("nft -j list table inet wall", [OF_INPUT, OF_FORWARD, OF_OUTPUT, OF_PREROUTING]),
        ("iptables-nft-save -t filter", [ARRIVALS, MARKS, OF_OUTPUT, OF_PREROUTING]),
    ],
)
def test_table_that_no_program_lists_is_left_out(
    refused: str, left: list[tuple[str, str, str, str, bool, int]], tmp_path: Path
) -> None:
    (tmp_path / refused).unlink()
    assert outlined(read(4)) == left


def test_kernel_that_tells_no_chains_has_none(host: FakeKernel) -> None:
    host.refusal = errno.EOPNOTSUPP
    assert list(read(4)) == []


@pytest.mark.parametrize(("table", "chain"), [("filter", "input"), ("mine", "INPUT")])
def test_table_that_only_resembles_one_of_iptables_is_listed_by_nft(
    table: str, chain: str, kernel: FakeKernel, answer: Answer
) -> None:
    kernel.objects = {(GETCHAIN, IPV4): [base_chain(table, chain, INPUT)]}
    answer(f"nft -j list table ip {table}", listing(chain, {"drop": None}))
    answer(f"iptables-nft-save -t {table}", f":{chain} ACCEPT [0:0]\n")
    assert outlined(read(4)) == [("native", f"ip {table}", chain, "input", False, 0)]


def test_rule_about_a_set_is_certain_if_ipset_tells_its_elements(kernel: FakeKernel, answer: Answer) -> None:
    rule = "-A INPUT -m set --match-set nodes src -j DROP"
    kernel.objects = {(GETCHAIN, IPV4): [base_chain("filter", "INPUT", INPUT)]}
    answer("iptables-nft-save -t filter", f":INPUT ACCEPT [0:0]\n{rule}\n")
    assert [each.fate(PACKET) for each in read(4)] == [Fate(doubt=rule, may_drop=True)]
    answer("ipset save", "create nodes hash:ip family inet\nadd nodes 192.0.2.2\n")
    assert [each.fate(PACKET) for each in read(4)] == [Fate(DROP, rule)]


class WithoutThatChain(FakeKernel):
    """It has base chains, and no others."""

    def ask(self, *_: object) -> tuple[bytes, int, int]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")


@pytest.mark.parametrize(
    ("kernel", "table", "is_there"),
    [
        (FakeKernel(), "wall", True),
        (WithoutThatChain(), "firewalld", True),
        (WithoutThatChain(), "wall", False),
    ],
    ids=["its chain of iptables", "its table of nftables", "neither"],
)
def test_firewalld_is_known_by_its_table_or_its_chain(
    kernel: FakeKernel, table: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(netlink, "NetlinkSocket", kernel)
    kernel.objects = {(GETCHAIN, INET): [base_chain(table, "filter_INPUT", INPUT)]}
    assert has_firewalld() is is_there


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("rules", "drops"),
    [
        ("", True),
        ("-A FORWARD -j DROP", True),
        ("-A FORWARD -j own\n-A own -j DROP", False),
        ("-A FORWARD -s 10.5.0.0/16 -j DROP", False),
        ("-A FORWARD -s 10.5.0.0/16 -j ACCEPT", False),
        ("-A FORWARD -s 10.5.0.2/32 -j ACCEPT", True),
        ("-A FORWARD -s 10.5.0.2/32 -j ACCEPT\n-A FORWARD -s 10.5.255.253/32 -j ACCEPT", False),
        ("-A FORWARD -d 10.5.0.2/32 -j ACCEPT\n-A FORWARD -d 10.5.255.253/32 -j ACCEPT", False),
        ("-A FORWARD -p tcp -m tcp --dport 20111 -j ACCEPT", False),
        ("-A FORWARD -p tcp -m tcp --sport 1024:65535 -j ACCEPT", False),
        ("-A FORWARD -j ACCEPT", False),
        ("-A FORWARD -p udp -j DROP\n-A FORWARD -d 192.0.2.1/32 -j DROP\n-A FORWARD -j DROP", True),
    ],
)
def test_chain_that_drops_what_it_does_not_accept_drops_packets_of_containers(
    rules: str, drops: bool, kernel: FakeKernel, answer: Answer
) -> None:
    kernel.objects = {
        (GETCHAIN, IPV4): [
            base_chain("filter", "FORWARD", FORWARD),
            base_chain("filter", "INPUT", INPUT),
        ]
    }
    answer("iptables-nft-save -t filter", f":INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n{rules}\n")
    assert outlined(forward_drops(NETWORK, IptablesRunner())) == ([OF_FORWARD] if drops else [])


def test_drop_of_all_packets_counts_in_chains_for_forwarded_ones_only() -> None:
    assert drops_the_rest(chain("c", "forward", drops=True), Fate(DROP))
    assert not drops_the_rest(chain("c", "input", drops=True), Fate(DROP))
    assert not drops_the_rest(chain("c", "postrouting", drops=True), Fate(DROP))


# ---- several chains ------------------------------------------------------------------------------


def chain(name: str, hook: str, *rules: Rule, priority: int = 0, drops: bool = False) -> BaseChain:
    return BaseChain("native", 4, "inet wall", name, hook, drops, {name: rules}, priority=priority)


def marks(mark: int) -> Rule:
    return Rule(MARK, new_mark=(mark, 0))


def test_chains_are_passed_in_the_order_of_their_hooks_and_priorities() -> None:
    bases = [
        chain("last", "input", priority=1),
        chain("never", "forward"),
        chain("first", "prerouting", priority=5),
        replace(chain("other", "input"), family=6),
        chain("bridge's", "bridge prerouting", priority=9),
        chain("next", "input", priority=-1),
    ]
    hooks = ("prerouting", "bridge prerouting", "input")
    assert [base.chain for base, _ in fates(bases, PACKET, hooks)] == ["first", "bridge's", "next", "last"]


def test_mark_that_one_chain_sets_is_seen_in_the_next() -> None:
    drops = Rule(DROP, (Test("mark", ((3, 0xFF),)),), text="drop")
    bases = [
        chain("three", "input", drops, priority=2),
        chain("two", "input", marks(2), priority=1),
        chain("one", "input", marks(1)),
    ]
    assert [decided for _, decided in fates(bases, PACKET, ("input",))][-1] == Fate(DROP, "drop")
    assert [decided for _, decided in fates(bases[:2], PACKET, ("input",))][-1] == Fate()


def test_mark_behind_a_hook_is_what_its_chains_make_of_it() -> None:
    clears = Rule(MARK, new_mark=(0, 0xFF))
    bases = [
        chain("late", "output", marks(8), priority=1),
        chain("early", "output", clears, priority=-1),
        chain("elsewhere", "input", marks(16)),
        replace(chain("other", "output", marks(32)), family=6),
    ]
    marked_before = replace(PACKET, mark=7)
    assert marked(bases, marked_before, ("output",)) == 8
    assert marked(bases, marked_before, ("forward",)) == 7
    assert marked([chain("unknown", "output", Rule(MARK))], marked_before, ("output",)) == 0


@pytest.mark.parametrize(
    ("base", "name", "spares"),
    [
        (
            chain("c", "input"),
            "chain c of table inet wall",
            "nft insert rule inet wall c ip saddr 10.5.0.0/16 ip daddr 10.5.0.0/16 return",
        ),
        (
            BaseChain("legacy", 4, "ip filter", "FORWARD", "forward", True, {}),
            "chain FORWARD of table ip filter (legacy)",
            "iptables-legacy -I FORWARD -s 10.5.0.0/16 -d 10.5.0.0/16 -j RETURN",
        ),
        (
            BaseChain("nft", 4, "ip nat", "POSTROUTING", "postrouting", False, {}),
            "chain POSTROUTING of table ip nat",
            "iptables-nft -t nat -I POSTROUTING -s 10.5.0.0/16 -d 10.5.0.0/16 -j RETURN",
        ),
        (
            PolicyChain("native", 4, "xfrm", "out", "output", False, {}),
            "the XFRM policies for output",
            "",
        ),
    ],
)
def test_chain_has_a_name_and_a_command_that_spares_a_network(
    base: BaseChain, name: str, spares: str
) -> None:
    assert str(base) == name
    if spares:
        assert " ".join(base.spare(NETWORK)) == spares


@pytest.mark.parametrize(
    ("base", "rule", "command"),
    [
        (
            BaseChain("nft", 4, "ip nat", "POSTROUTING", "postrouting", False, {}),
            "-A POSTROUTING -o eth0 -j ACCEPT",
            ["iptables-nft", "-t", "nat", "-D", "POSTROUTING", "-o", "eth0", "-j", "ACCEPT"],
        ),
        (
            BaseChain("legacy", 4, "ip filter", "FORWARD", "forward", True, {}),
            "-A own -s 10.5.0.0/16 -j DROP",
            ["iptables-legacy", "-D", "own", "-s", "10.5.0.0/16", "-j", "DROP"],
        ),
        (
            BaseChain("nft", 6, "ip6 nat", "POSTROUTING", "postrouting", False, {}),
            r'-A POSTROUTING -m comment --comment "no \"NAT\" here" -j ACCEPT',
            [
                *("ip6tables-nft", "-t", "nat", "-D", "POSTROUTING"),
                *("-m", "comment", "--comment", 'no "NAT" here', "-j", "ACCEPT"),
            ],
        ),
    ],
    ids=["nft", "legacy", "a comment"],
)
def test_rule_of_iptables_is_deleted_from_the_chain_that_has_it(
    base: BaseChain, rule: str, command: list[str]
) -> None:
    assert list(base.without(rule)) == command


def test_device_of_a_chain_is_that_by_which_packets_come_or_leave() -> None:
    accepts = Rule(ACCEPT, text="accept")
    early = replace(chain("early", "ingress", accepts), device="eth0")
    assert early.fate(PACKET) == Fate(ACCEPT, "accept")
    assert replace(early, hook="egress").fate(PACKET) == Fate()
    assert replace(early, hook="egress").fate(replace(PACKET, oif="eth0")) == Fate(ACCEPT, "accept")


LISTING = """\
table inet wall { # handle 7
\tchain c { # handle 7
\t\ttype filter hook input priority filter; policy drop;
\t\ttcp dport 22 accept # handle 5
\t\tudp dport 8472 drop # handle 7
\t\tudp dport 8473 drop # handle 77
\t}
}
"""


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("7", "udp dport 8472 drop # handle 7"),
        ("5", "tcp dport 22 accept # handle 5"),
        ("9", "rule # handle 9"),
        ("", ""),
    ],
)
def test_rule_of_nftables_is_told_as_nft_lists_it(rule: str, text: str, answer: Answer) -> None:
    base = chain("c", "input")
    answer("nft -a list table inet wall", LISTING)
    assert text_of(base, rule) == text
    iptables = replace(base, place="nft")
    assert text_of(iptables, "-A INPUT -j DROP") == "-A INPUT -j DROP"


@pytest.mark.usefixtures("answer")
def test_rule_that_nft_does_not_list_is_told_by_its_handle() -> None:
    assert text_of(chain("c", "input"), "7") == "rule # handle 7"
