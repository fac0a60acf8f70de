"""What packet filters do to the network's packets: the rule, and what spares them."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from msgspec.structs import replace

from flanneld.ctl.drops import (
    FROM_STORE,
    TO_STORE,
    Drop,
    drops_towards,
    exempting_rules,
    masquerading_rules,
    read_drops,
    rules_about,
)
from flanneld.ctl.paths import FROM_CONTAINERS, TO_CONTAINERS
from flanneld.diagnostics.status import Status
from flanneld.network.firewall.fate import ACCEPT, DNAT, DROP, MASQUERADE, Rule, Test
from flanneld.network.firewall.foreign import BaseChain, PolicyChain
from tests.unit.ctl.documents import status_of
from tests.unit.ctl.test_evidence import document, peer

DEVICES: Any = {4: "cni0"}
TOLD = status_of(document(2))
FROM_PEERS, TO_PEERS = "UDP 8472 from its peers", "UDP 8472 to its peers"
NETWORK = "10.0.0.0/8"


def chain(
    hook: str, *rules: Rule, table: str = "ip filter", drops: bool = False, **changes: Any
) -> BaseChain:
    return replace(BaseChain("nft", 4, table, hook.upper(), hook, drops, {hook.upper(): rules}), **changes)


def found(*bases: BaseChain, told: Status = TOLD) -> list[Drop]:
    return read_drops(told, DEVICES, bases, {})


def about(field: str, *values: Any) -> tuple[Test, ...]:
    return (Test(field, values),)


def shell(drop: Drop) -> list[str]:
    return [" ".join(each) for each in drop.commands]


SPARED = [f"iptables-nft -I FORWARD {side} 10.0.0.0/8 -j ACCEPT" for side in ("-s", "-d")]


@pytest.mark.parametrize(
    ("base", "flows", "commands"),
    [
        (
            chain("input", Rule(DROP, about("protocol", "udp"), text="-p udp -j DROP")),
            [FROM_PEERS],
            ["iptables-nft -I INPUT -p udp --dport 8472 -j ACCEPT"],
        ),
        (
            chain("output", Rule(DROP, text="-j DROP")),
            [TO_PEERS],
            ["iptables-nft -I OUTPUT -p udp --dport 8472 -j ACCEPT"],
        ),
        (chain("forward", Rule(DROP, text="-j DROP")), [FROM_CONTAINERS], SPARED),
        (
            chain("forward", Rule(DROP, about("protocol", "tcp"), text="-p tcp -j DROP")),
            [f"TCP {FROM_CONTAINERS}"],
            SPARED,
        ),
        (
            chain("forward", Rule(DROP, about("protocol", "icmp"), text="-p icmp -j DROP")),
            [f"ICMP {FROM_CONTAINERS}"],
            SPARED,
        ),
        (chain("forward", Rule(DROP, about("iif", "flannel.1"), text="x")), [TO_CONTAINERS], SPARED),
        (chain("forward", Rule(DROP, about("protocol", "sctp"), text="x")), [], []),
        (chain("forward"), [], []),
    ],
    ids=["in", "out", "all forwarded", "TCP", "ICMP", "inwards", "another protocol", "no rule"],
)
def test_rule_that_drops_is_told_once_with_the_packets_and_what_accepts_them(
    base: BaseChain, flows: list[str], commands: list[str]
) -> None:
    drops = found(base)
    assert [each.flow for each in drops] == flows
    for each in drops:
        assert (each.chain, each.verb) == (f"chain {base.chain} of table ip filter", "drops")
        assert (each.rule, each.doubt, each.families) == (base.chains[base.chain][0].text, "", frozenset({4}))
        assert shell(each) == commands


@pytest.mark.parametrize(
    ("rule", "drops", "the_rest"),
    [
        (Rule(DROP, text="-j DROP"), False, True),
        (Rule("ACCEPT", about("protocol", "sctp"), text="x"), True, True),
        (Rule(DROP, about("protocol", "tcp"), text="-p tcp -j DROP"), False, False),
    ],
)
def test_forward_chain_that_drops_all_it_does_not_accept_is_known(
    rule: Rule, drops: bool, the_rest: bool
) -> None:
    (drop,) = found(chain("forward", rule, drops=drops))
    assert drop.drops_the_rest is the_rest
    assert drop.rule == (rule.text if not drops else "")
    assert drop.note.startswith(f"drops {drop.flow}: {rule.text if not drops else 'its policy'}")


def test_rule_that_may_match_or_not_is_a_doubt() -> None:
    rule = "-m x -j DROP"
    (drop,) = found(chain("input", Rule(DROP, about("unknown"), text=rule)))
    assert (drop.verb, drop.doubt, drop.rule, drop.state) == ("may drop", rule, rule, "unknown")
    assert drop.families == frozenset({4})
    (drop,) = found(chain("input", Rule("ACCEPT", about("unknown"), text="-m x"), drops=True))
    assert drop.note == f"drops {FROM_PEERS}: its policy; unless this rule passes them: -m x"


@pytest.mark.parametrize(
    ("base", "verb", "state", "families", "commands"),
    [
        (
            chain("postrouting", Rule(MASQUERADE, text="-j MASQUERADE"), table="ip nat"),
            "masquerades",
            "hint",
            frozenset(),
            ["iptables-nft -t nat -I POSTROUTING -s 10.0.0.0/8 -d 10.0.0.0/8 -j RETURN"],
        ),
        (
            chain("prerouting", Rule(DNAT, about("protocol", "tcp"), text="-j DNAT"), table="ip nat"),
            "redirects",
            "PROBLEM",
            frozenset({4}),
            ["iptables-nft -t nat -I PREROUTING -s 10.0.0.0/8 -d 10.0.0.0/8 -j RETURN"],
        ),
        (
            chain("prerouting", Rule(DNAT, about("protocol", "udp"), text="-j DNAT"), table="ip nat"),
            "redirects",
            "PROBLEM",
            frozenset({4}),
            ["iptables-nft -t nat -I PREROUTING -p udp --dport 8472 -j ACCEPT"],
        ),
    ],
    ids=["masquerades", "redirects containers", "redirects the tunnel"],
)
def test_rule_that_changes_packets_is_told_with_what_it_does(
    base: BaseChain, verb: str, state: str, families: frozenset[int], commands: list[str]
) -> None:
    (drop,) = found(base)
    assert (drop.verb, drop.state, drop.families) == (verb, state, families)
    assert shell(drop) == commands


def masquerading(**changes: Any) -> Status:
    """A node of both families whose rules masquerade packets to other networks."""
    lease = {"subnets": ["10.5.1.0/24", "fc00:5:1::/64"]}
    return status_of(
        document(2) | {"lease": lease, "firewall": {"place": "nft", "masquerade": True} | changes}
    )


OUTWARDS, OURS = about("oif", "eth0"), Rule(MASQUERADE, about("oif", "eth0"), text="-A POSTROUTING -j OURS")
FIRST = Rule(ACCEPT, OUTWARDS, text="-A POSTROUTING -o eth0 -j ACCEPT")


def translating(*rules: Rule, **changes: Any) -> BaseChain:
    return replace(chain("postrouting", *rules, OURS, table="ip nat"), **changes)


@pytest.mark.parametrize(
    ("base", "place", "command"),
    [
        (translating(FIRST), "nft", "iptables-nft -t nat -D POSTROUTING -o eth0 -j ACCEPT"),
        (
            translating(FIRST, place="legacy"),
            "legacy",
            "iptables-legacy -t nat -D POSTROUTING -o eth0 -j ACCEPT",
        ),
        (
            translating(FIRST, family=6, table="ip6 nat"),
            "nft",
            "ip6tables-nft -t nat -D POSTROUTING -o eth0 -j ACCEPT",
        ),
        (
            translating(
                Rule(
                    ACCEPT,
                    (
                        *about("iif", "cni0"),
                        *OUTWARDS,
                        *about("source", ip_network("10.5.1.2/32")),
                        *about("destination", ip_network("203.0.113.1/32")),
                        *about("protocol", "tcp"),
                    ),
                    text='-A OWN -m comment --comment "no NAT" -j ACCEPT',
                )
            ),
            "nft",
            "iptables-nft -t nat -D OWN -m comment --comment no NAT -j ACCEPT",
        ),
    ],
    ids=["nft", "legacy", "IPv6", "each property of the packet"],
)
def test_rule_that_keeps_packets_to_other_networks_from_ours_is_told_with_what_deletes_it(
    base: BaseChain, place: str, command: str
) -> None:
    ((chain_name, rule, removal),) = exempting_rules(masquerading(place=place), DEVICES, [base])
    assert (chain_name, rule) == (str(base), base.chains["POSTROUTING"][0].text)
    assert " ".join(removal) == command


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (translating(FIRST), {"masquerade": False}),
        (translating(FIRST), {"place": "legacy"}),
        (translating(FIRST, place="legacy"), {}),
        (translating(FIRST, place="native"), {"place": "native"}),
        (translating(), {}),
        (replace(translating(), chains={"POSTROUTING": ()}), {}),
        (translating(Rule(ACCEPT, about("unknown"), text="-m x -j ACCEPT")), {}),
        (translating(Rule(MASQUERADE, (*OUTWARDS, *about("unknown")), text="-m x"), FIRST), {}),
        (translating(Rule(ACCEPT, about("destination", ip_network(NETWORK)), text="x")), {}),
        (translating(FIRST, table="ip mangle"), {}),
        (chain("prerouting", FIRST, table="ip nat"), {}),
    ],
    ids=[
        "masquerading is off",
        "our rules are elsewhere",
        "the rule is elsewhere",
        "tables of nftables do not keep each other from it",
        "ours is first",
        "no rule",
        "a rule that may match",
        "a rule that may masquerade before",
        "inside the network",
        "another table",
        "another hook",
    ],
)
def test_packets_to_other_networks_that_ours_masquerade_are_not_told(
    base: BaseChain, changes: dict[str, Any]
) -> None:
    assert [*exempting_rules(masquerading(**changes), DEVICES, [base])] == []


def test_without_a_place_of_our_rules_none_keeps_packets_from_them() -> None:
    assert [*exempting_rules(TOLD, DEVICES, [translating(FIRST)])] == []


@pytest.mark.parametrize(
    ("base", "address", "is_dropped"),
    [
        (
            chain("forward", Rule(DROP, about("source", ip_network("10.5.1.7/32")), text="x")),
            "10.5.1.7",
            True,
        ),
        (
            chain("forward", Rule(DROP, about("destination", ip_network("10.5.1.7/32")), text="x")),
            "10.5.1.7",
            True,
        ),
        (
            chain("forward", Rule(DROP, about("source", ip_network("10.5.1.7/32")), text="x")),
            "10.5.1.8",
            False,
        ),
        (chain("forward", Rule(DROP, about("unknown"), text="x")), "10.5.1.7", False),
        (chain("postrouting", Rule(MASQUERADE, text="x"), table="ip nat"), "10.5.1.7", False),
        (chain("prerouting", Rule(DNAT, text="x"), table="ip nat"), "10.5.1.7", False),
        (replace(chain("forward"), drops=True), "10.5.1.7", False),
        (chain("input", Rule(DROP, text="x")), "10.5.1.7", False),
        (chain("output", Rule(DROP, text="x")), "10.5.1.7", False),
        (chain("forward", Rule(DROP, text="x")), "fc00:5:1::7", False),
    ],
    ids=[
        "from it",
        "to it",
        "another",
        "a doubt",
        "masquerades",
        "redirects",
        "a policy, which is no rule",
        "to this host",
        "from this host",
        "no IPv6",
    ],
)
def test_rule_that_drops_the_packets_of_a_container_is_named_with_its_chain(
    base: BaseChain, address: str, is_dropped: bool
) -> None:
    named = (f"chain {base.chain} of table {base.table}: x",) * is_dropped
    assert rules_about(ip_address(address), TOLD, DEVICES, [base]) == named


def test_rules_of_firewalld_and_policies_take_a_decision() -> None:
    (drop,) = found(chain("input", Rule(DROP, about("protocol", "udp"), text="x"), table="inet firewalld"))
    assert drop.needs_decision
    assert not found(chain("input", Rule(DROP, text="x")))[0].needs_decision


@pytest.mark.parametrize(
    ("hook", "rule", "command"),
    [
        ("input", "src a action block index 8 dir in", "ip xfrm policy delete index 8 dir in"),
        ("forward", "", "ip xfrm policy setdefault fwd accept"),
        ("input", "", "ip xfrm policy setdefault in accept"),
        ("postrouting", "", "ip xfrm policy setdefault out accept"),
    ],
)
def test_policy_of_xfrm_is_deleted_or_its_default_is_reset(hook: str, rule: str, command: str) -> None:
    rules = (Rule(DROP, text=rule),) if rule else ()
    base = PolicyChain("nft", 4, "xfrm", hook, hook, not rule, {hook: rules})
    drop = found(base)[0]
    assert (shell(drop), drop.needs_decision) == ([command], True)
    assert drop.chain == f"the XFRM policies for {hook}"


def test_without_a_chain_nothing_is_dropped() -> None:
    assert read_drops(TOLD, DEVICES, [], {}) == []


def test_packets_of_containers_are_followed_without_a_peer() -> None:
    alone = status_of(document(0))
    (drop,) = found(chain("forward", Rule(DROP, text="-j DROP")), told=alone)
    assert (drop.flow, shell(drop)) == ("packets of containers", SPARED)
    assert found(chain("input", Rule(DROP, text="-j DROP")), told=alone) == []


@pytest.mark.parametrize(
    ("network", "number"),
    [("10.6.99.0/24", 1), ("198.18.0.100/32", 1), ("10.6.250.0/24", 0), ("203.0.113.0/24", 0)],
    ids=["its subnet", "its node", "no peer's", "elsewhere"],
)
def test_rule_about_one_of_many_peers_is_found_by_its_network(network: str, number: int) -> None:
    told = status_of(document(0) | {"peers": [peer(each) for each in range(100)]})
    rules = [Rule(DROP, about(end, ip_network(network)), text=end) for end in ("source", "destination")]
    bases = [chain("forward", *rules), chain("output", *rules)]
    assert len({each.chain for each in found(*bases, told=told)}) == number


def test_rules_about_the_networks_of_64_others_leave_room_for_no_more() -> None:
    told = status_of(document(0) | {"peers": [peer(each) for each in range(100)]})
    others = [ip_network(f"203.0.113.{each}/32") for each in range(63)]
    theirs = [ip_network("10.6.98.0/24"), ip_network("10.6.99.0/24")]
    around = about("source", ip_network("0.0.0.0/0"), ip_network(NETWORK))
    no_one = Rule("ACCEPT", (*around, *about("iif", "x")), text="all")
    rules = [Rule(DROP, about("destination", each), text=str(each)) for each in (*others, *theirs)]
    drops = found(chain("forward", no_one, *rules), told=told)
    assert [each.rule for each in drops] == ["10.6.98.0/24"]


def test_only_the_packets_of_the_named_peer_are_followed() -> None:
    nets = [ip_network(f"10.6.{each}.0/24") for each in (0, 1)]
    rules = [Rule(DROP, about("destination", net), text=str(each)) for each, net in enumerate(nets)]
    bases = [chain("forward", *rules)]

    def drops(address: str) -> list[str]:
        return [each.rule for each in drops_towards(ip_address(address), TOLD, DEVICES, lambda: bases)]

    assert (drops("10.6.0.7"), drops("10.6.1.7"), drops("10.6.2.7")) == (["0"], ["1"], [])


@pytest.mark.parametrize("firewall", [None, {"place": "none"}, {"place": "elsewhere"}])
def test_without_a_place_of_rules_no_masquerading_rules_are_known(firewall: dict[str, Any] | None) -> None:
    assert masquerading_rules(status_of({"firewall": firewall} if firewall else {}), 4) is None


#: A server at this host's own address: the way to it is known on every host.
SERVER = "etcd does not answer (http://127.0.0.1:2379: timed out)"


def without_store(problem: str) -> Status:
    store = {"name": "etcd", "answers": not problem, "problem": problem}
    return status_of(document(2) | {"store": store})


@pytest.mark.parametrize(
    ("base", "flows", "commands"),
    [
        (
            chain("output", Rule(DROP, about("dport", (2379, 2379)), text="--dport 2379 -j DROP")),
            ["packets to the store"],
            ["iptables-nft -I OUTPUT -d 127.0.0.1/32 -j ACCEPT"],
        ),
        (
            chain(
                "input",
                Rule(ACCEPT, about("state", "new")),
                Rule(DROP, about("protocol", "tcp"), text="-p tcp -j DROP"),
            ),
            ["answers of the store"],
            ["iptables-nft -I INPUT -s 127.0.0.1/32 -j ACCEPT"],
        ),
        (chain("input", Rule(DROP, about("state", "new"), text="x"), Rule(ACCEPT)), [FROM_PEERS], None),
        (
            chain("output", Rule(DROP, (*about("protocol", "tcp"), *about("flags", (2, 2))), text="x")),
            ["packets to the store"],
            None,
        ),
        (chain("input", Rule(DROP, (*about("protocol", "tcp"), *about("flags", (2, 18))), text="x")), [], []),
        (chain("output", Rule(DNAT, about("dport", (2379, 2379)), text="x"), table="ip nat"), [], []),
    ],
    ids=["packets", "answers", "no answers", "first packets", "no first packets", "a service"],
)
def test_rule_that_keeps_the_store_silent_is_told(
    base: BaseChain, flows: list[str], commands: list[str] | None
) -> None:
    drops = found(base, told=without_store(SERVER))
    assert [each.flow for each in drops] == flows
    assert commands is None or [line for each in drops for line in shell(each)] == commands
    assert not {each.flow for each in found(base, told=without_store(""))} & {TO_STORE, FROM_STORE}


@pytest.mark.parametrize(
    ("server", "versions"),
    [
        ("http://127.0.0.1:2379", [4]),
        ("https://[::1]:2379", [6]),
        ("https://store.example.org:2379", []),
        ("http://300.0.0.1:2379", []),
    ],
)
def test_packets_to_the_store_are_followed_to_addresses_of_any_family(
    server: str, versions: list[int]
) -> None:
    told = without_store(f"etcd does not answer ({server}: timed out)")
    rule = Rule(DROP, about("protocol", "tcp"), text="x")
    drops = found(*(chain("output", rule, family=each) for each in (4, 6)), told=told)
    assert [(each.flow, *each.families) for each in drops] == [(TO_STORE, each) for each in versions]
