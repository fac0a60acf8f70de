"""What recorded packet filters do with the network's packets.

Debian's examples, ufw, firewalld, Docker and iptables-legacy were recorded in a namespace where they had set
their rules; load_balancing and secmark are missing, which need parts of a kernel that was not at hand.
``docker-drops`` has the policy that Docker sets where nothing was forwarded before. The rules of
kube-proxy, Calico, Cilium, libvirt and ``ipset`` (kube-router and fail2ban) were written after their sources,
loaded there and recorded; so were ``server``, after the nftables wiki, and ``limited``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.paths import INWARDS, OUTWARDS, THROUGH
from flanneld.model import Family, family_of
from flanneld.network.firewall.fate import DROP, Fate, LazyChains, Packet
from flanneld.network.firewall.foreign import BaseChain, fates
from flanneld.network.firewall.iptables_text import read_ipsets, read_table
from flanneld.network.firewall.nft_json import read_chains

RECORDED = Path(__file__).parent / "recorded"
HERE, THERE = ip_address("192.0.2.1"), ip_address("192.0.2.2")
HERE6, THERE6 = ip_address("2001:db8::1"), ip_address("2001:db8::2")
OURS, THEIRS = ip_address("10.5.1.2"), ip_address("10.5.2.2")
SENDERS = (1024, 65535)
#: Families of tables that these packets pass.
KINDS = ("ip", "ip6", "inet", "netdev")
FLOWS = {
    "in": (Packet("eth0", "", THERE, HERE, "udp", 8472, SENDERS), INWARDS),
    "out": (Packet("", "eth0", HERE, THERE, "udp", 8472, SENDERS), OUTWARDS),
    "tcp from a pod": (Packet("cni0", "flannel.1", OURS, THEIRS, "tcp", 20111, SENDERS), THROUGH),
    "tcp to a pod": (Packet("flannel.1", "cni0", THEIRS, OURS, "tcp", 20111, SENDERS), THROUGH),
    "in, IPv6": (
        Packet("eth0", "", THERE6, HERE6, "udp", 8472, SENDERS),
        INWARDS,
    ),
    "icmp from a pod": (Packet("cni0", "flannel.1", OURS, THEIRS, "icmp"), THROUGH),
    "icmp to a pod": (Packet("flannel.1", "cni0", THEIRS, OURS, "icmp"), THROUGH),
}


#: Verdicts by recordings and flow, where they are not "accept".
NO_FORWARD = {flow: "drop FORWARD policy" for flow in FLOWS if "pod" in flow}
EXPECTED: dict[str, dict[str, str]] = {
    "calico.save": {},
    "cilium.save": NO_FORWARD,
    "debian-all-in-one.json": {},
    "debian-ct_helpers.json": {"in": "drop input policy", "in, IPv6": "drop input policy"},
    "debian-ipv4-filter.json": {},
    "debian-netdev-ingress.json": {},
    "debian-sets_and_maps.json": {},
    "debian-workstation.json": {"in": "drop input 8", "in, IPv6": "drop input 8"},
    "debian-arp-filter.json": {},
    "debian-bridge-filter.json": {},
    "debian-inet-filter.json": {},
    "debian-inet-nat.json": {},
    "debian-ipv4-mangle.json": {},
    "debian-ipv4-nat.json": {},
    "debian-ipv4-raw.json": {},
    "debian-ipv6-filter.json": {},
    "debian-ipv6-mangle.json": {},
    "debian-ipv6-nat.json": {},
    "debian-ipv6-raw.json": {},
    "debian-nat.json": {},
    "debian-overview.json": {},
    "docker-drops.save": NO_FORWARD,
    "docker.save": {},
    "firewalld.json": {
        "in": "drop filter_INPUT 72",
        "in, IPv6": "drop filter_INPUT 72",
        **{flow: "drop filter_FORWARD 101" for flow in FLOWS if "pod" in flow},
    },
    "ipset.save": {
        "icmp to a pod": "drop FORWARD -A KUBE-POD-FW-AAAAAAAAAAAAAAAA -m comment"
        ' --comment "rule to REJECT traffic destined for POD name:web namespace: default"'
        " -m mark ! --mark 0x10000/0x10000 -j REJECT --reject-with icmp-port-unreachable"
    },
    "kube-proxy-iptables.save": NO_FORWARD,
    "kube-proxy-nft.json": {},
    "legacy.save": {"in": "drop INPUT -A INPUT -p udp -m udp --dport 8472 -j DROP", **NO_FORWARD},
    "legacy.save docker.save": {"in": "drop INPUT -A INPUT -p udp -m udp --dport 8472 -j DROP", **NO_FORWARD},
    "libvirt.save": {},
    "limited.json": {"in": "drop input policy ? 3", "in, IPv6": "drop input policy ? 3"},
    "server.json": {
        "in": "drop inbound policy",
        "in, IPv6": "drop inbound policy",
        **{flow: "drop forward policy" for flow in FLOWS if flow.startswith("tcp")},
    },
    "ufw.save": {
        "in": "drop INPUT policy",
        **{flow: "drop FORWARD policy" for flow in FLOWS if flow.startswith("tcp")},
    },
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("name", sorted({*EXPECTED, *(path.name for path in RECORDED.iterdir())}))
def test_verdict_on_a_packet_is_that_of_the_recorded_packet_filter(name: str, flow: str) -> None:
    assert verdict(name, flow) == EXPECTED[name].get(flow, "accept")


def test_reading_thousands_of_rules_parses_only_those_that_a_packet_meets() -> None:
    rules = [
        f"-A far-{n % 100} -s 10.7.{n // 250}.{n % 250}/32 -p tcp -m tcp --dport 80 -j ACCEPT"
        for n in range(5000)
    ]
    text = "\n".join(("*filter", ":INPUT DROP [0:0]", "-A INPUT -s 10.7.0.0/16 -j far-0", *rules, "COMMIT"))
    chains, _ = read_table(text)
    base = BaseChain("nft", 4, "ip filter", "INPUT", "input", True, chains)
    assert base.fate(FLOWS["in"][0]) == Fate(DROP)
    assert isinstance(chains, LazyChains)
    assert chains.parsed == 1


def recorded(name: str, family: Family) -> Iterator[BaseChain]:
    for each in name.split():
        yield from chains_in(RECORDED / each, family)


def chains_in(path: Path, family: Family) -> Iterator[BaseChain]:
    if path.suffix == ".json":
        yield from native(json.loads(path.read_text())["nftables"], family)
        return
    sets, *tables = path.read_text().split("*")
    for text in tables:
        table = text.split("\n", 1)[0]
        chains, policies = read_table(text, read_ipsets(sets))
        for chain, policy in policies.items():
            if policy != "-" and table != "nat":
                yield BaseChain("nft", 4, f"ip {table}", chain, chain.lower(), policy == "DROP", chains)


def native(items: list[dict[str, Any]], family: Family) -> Iterator[BaseChain]:
    def table_of(item: dict[str, Any]) -> tuple[str, str]:
        (given,) = item.values()
        return given.get("family", ""), given.get("table", given.get("name", ""))

    for (kind, table), inside in groupby(sorted(items, key=table_of), key=table_of):
        listed = list(inside)
        chains = read_chains(json.dumps({"nftables": listed}), family)
        for item in listed:
            match item:
                case {"chain": {"hook": str(hook), "type": "filter"} as chain} if kind in (
                    "ip",
                    "inet",
                    "netdev",
                ):
                    rest = hook, chain["policy"] == "drop", chains, chain.get("dev", ""), chain["prio"]
                    yield BaseChain("native", family, f"{kind} {table}", chain["name"], *rest)


def verdict(name: str, flow: str) -> str:
    """Return ``accept``, or the first rule that drops; with a question mark and the rule that may differ."""
    packet, hooks = FLOWS[flow]
    found = [
        (base, decided) for base, decided in fates(recorded(name, family_of(packet.source)), packet, hooks)
    ]
    base, decided = next(((base, fate) for base, fate in found if fate.act == DROP), (None, None))
    if base is None or decided is None:
        doubt = next((f"{base.chain} {fate.doubt}" for base, fate in found if fate.doubt), "")
        return f"accept ? {doubt}" if doubt else "accept"
    return f"drop {base.chain} {decided.by or 'policy'}" + (f" ? {decided.doubt}" if decided.doubt else "")
