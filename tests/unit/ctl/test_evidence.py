"""What the doctor looks up and sends on a node, however many peers it has."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from flanneld.ctl.evidence import flows
from flanneld.ctl.evidence.filters import dropped
from flanneld.ctl.evidence.lookups import chosen_of, questions
from flanneld.ctl.path_mtu import sample
from flanneld.diagnostics.status import describe
from flanneld.network.firewall.verdicts.packet import DROP, Step, Test
from flanneld.network.firewall.verdicts.ruleset import BaseChain
from flanneld.network.policy_rules import PolicyRule
from flanneld.state.resources import Address, Route, Vxlan

VXLAN = Vxlan("flannel.1", 1, 2, ip_address("192.0.2.1"), 8472, "02:00:00:00:00:01", 1450)


def peer(number: int) -> dict[str, Any]:
    subnet = ip_network(f"10.{number // 250 + 6}.{number % 250}.0/24")
    route = Route(subnet, "flannel.1", subnet[0], onlink=True)
    return {
        "subnets": [str(subnet)],
        "public_ips": [f"198.18.{number // 250}.{number % 250 + 1}"],
        "state": "in the kernel",
        "objects": [describe(route, {})],
    }


def document(peers: int) -> dict[str, Any]:
    return {
        "network": {"ranges": [{"network": "10.0.0.0/8", "subnet_len": 24}], "backend": "vxlan"},
        "lease": {"subnets": ["10.5.1.0/24"]},
        "uplink": {"name": "eth0", "mtu": 1500, "addresses": ["192.0.2.1"], "public_ips": ["192.0.2.1"]},
        "mtu": 1450,
        "local": [describe(each, {}) for each in (VXLAN, Address("flannel.1", ip_address("10.5.1.0")))],
        "peers": [peer(number) for number in range(peers)],
    }


LARGE = document(5000)


def test_with_5000_peers_few_routes_are_looked_up_and_few_packets_sent() -> None:
    assert len(list(questions(LARGE, chosen_of(LARGE), {4: "cni0"}))) == 4 * 64
    assert len(sample(LARGE, lambda targets: [None] * len(targets))) == 2 * 8
    assert len(flows.some(flows.peers(LARGE))) == 4


def test_lookups_are_spread_over_all_peers() -> None:
    subnets = [each.subnets[0] for each in chosen_of(LARGE)]
    assert len(subnets) == 64
    assert str(subnets[-1]) >= "10.25"


def test_rule_about_one_peer_of_5000_is_found() -> None:
    steps = (Step("no packets to 10.20.7.0/24", (Test("destination", (ip_network("10.20.7.0/24"),)),), DROP),)
    base = BaseChain("native", 4, "inet wall", "c", "forward", False, {"c": steps})
    chosen = flows.some(flows.peers(LARGE), [ip_network("10.20.7.0/24")])
    found = list(dropped([base], list(flows.flows(LARGE, chosen, {4: "cni0"}))))
    assert [(flow.name, decided.by) for _, flow, decided in found] == [
        ("packets of its containers to other nodes", "no packets to 10.20.7.0/24")
    ]


def test_flows_are_those_between_nodes_and_between_containers() -> None:
    small = document(1)
    found = {
        flow.name: flow.packet for flow in flows.flows(small, flows.some(flows.peers(small)), {4: "cni0"})
    }
    assert [(each.iif, each.oif, str(each.source), each.dport) for each in found.values()] == [
        ("eth0", "", "198.18.0.1", 8472),
        ("", "eth0", "192.0.2.1", 8472),
        ("cni0", "flannel.1", "10.5.1.2", None),
        ("flannel.1", "cni0", "10.6.0.2", None),
    ]


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (PolicyRule(4, 100, "from all"), True),
        (PolicyRule(4, 100, "from", source=ip_network("10.5.1.0/24")), True),
        (PolicyRule(4, 100, "from", source=ip_network("10.5.2.0/24")), False),
        (PolicyRule(4, 100, "to", destination=ip_network("10.6.0.0/16")), True),
        (PolicyRule(4, 100, "iif", iif="cni0"), True),
        (PolicyRule(4, 100, "iif", iif="eth0"), False),
        (PolicyRule(4, 100, "fwmark", is_narrow=True), False),
        (PolicyRule(6, 100, "from all"), False),
    ],
)
def test_policy_rule_matches_by_addresses_and_interface(rule: PolicyRule, matches: bool) -> None:
    assert rule.may_match(ip_address("10.6.0.2"), ip_address("10.5.1.2"), "cni0") == matches
    assert not rule.is_default
