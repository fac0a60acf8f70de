"""Chains of others whose rules let nothing through: they are found, and what helps is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.foreign import forward_drops, has_firewalld
from tests.lab import wait_for
from tests.netns.firewall_host import NETS, WAYS, Host, host

REFUSALS = ["REJECT --reject-with icmp-host-prohibited", "DROP -m comment --comment all"]

#: What firewalld 1.3 has at the FORWARD hook, as far as it matters.
FIREWALLD = """
nft -f - <<.
table inet firewalld {
    chain filter_FWD_trusted { accept; }
    chain filter_FORWARD_ZONES { }
    chain filter_FORWARD {
        type filter hook forward priority 10; policy accept;
        ct state { established, related } accept
        iifname "lo" accept
        ct state invalid drop
        ip6 daddr { ::/96, 2002:a00::/24 } reject with icmpv6 addr-unreachable
        jump filter_FORWARD_ZONES
        reject with icmpx admin-prohibited
    }
}
.
"""
#: What it adds when it is told to trust a network.
TRUST = "nft add rule inet firewalld filter_FORWARD_ZONES {} saddr {} goto filter_FWD_trusted"

#: Rules that look like those that refuse all, each for some packets only.
FOR_SOME = """
nft -f - <<.
table inet wall {
    chain passing {
        type filter hook forward priority 0;
        ct state invalid drop
        meta nfproto ipv6 udp dport 9 drop
        ip saddr 192.0.2.0/24 counter reject
        ip ttl 5 drop
        iifname "eth9" drop
        limit rate 1/second drop
    }
    chain elsewhere { drop; }
}
.
iptables-nft -A FORWARD -s 192.0.2.0/24 -j DROP
iptables-nft -A FORWARD -i eth9 -j REJECT
iptables-legacy -A FORWARD -p udp -j DROP
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Host]:
    with host(tmp_path) as made:
        yield made


def warnings(machine: Host, way: str, number: int = 1) -> list[str]:
    """What a daemon with networks of so many families warns of at its start."""
    lease_keeper = machine.keep(nets=NETS[:number], **WAYS[way])
    lease_keeper.stop()
    return lease_keeper.lines()


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("way", ["nft", "legacy"])
def test_a_rule_before_ours_that_refuses_all_is_reported_with_what_helps(
    machine: Host, way: str, refusal: str
) -> None:
    machine.sh(f"iptables-{way} -A FORWARD -j {refusal}")
    (line,) = warnings(machine, way)
    machine.sh(line.partition("run as root: ")[2])
    assert warnings(machine, way) == []


@pytest.mark.parametrize("way", ["nft", "legacy"])
def test_a_rule_behind_ours_is_in_nobodys_way(machine: Host, way: str) -> None:
    machine.set_once(nets=[NETS[0]], **WAYS[way])
    machine.sh(f"iptables-{way} -A FORWARD -j {REFUSALS[0]}")
    assert warnings(machine, way) == []


def test_search_for_drops_that_hangs_does_not_keep_the_daemon_from_stopping(machine: Host) -> None:
    tables = 10  # each takes the time limit of a command: together longer than ``stop`` waits
    for table in (f"inet other{number}" for number in range(tables)):
        machine.sh(f"nft 'add table {table}; add chain {table} c {{ type filter hook forward priority 0; }}'")
    environment = machine.stub(["nft"], f"touch {machine.directory}/begun; sleep 1000")
    lease_keeper = machine.start(nets=[NETS[0]], environment=environment, **WAYS["nft"])
    wait_for((machine.directory / "begun").exists, what="the search to begin")
    lease_keeper.stop()


@pytest.mark.parametrize("way", ["nft", "nftables"])
def test_firewalld_is_reported_until_it_trusts_the_network(machine: Host, way: str) -> None:
    machine.sh(FIREWALLD)
    lines = warnings(machine, way, 2)
    for line, (network, _) in zip(lines, NETS, strict=True):
        assert "chain filter_FORWARD of table inet firewalld drops" in line
        assert f"firewall-cmd --permanent --zone=trusted --add-source={network}" in line
    machine.sh(TRUST.format("ip", NETS[0][0]))
    assert warnings(machine, way, 2) == lines[1:]
    machine.sh(TRUST.format("ip6", NETS[1][0]))
    assert warnings(machine, way, 2) == []


@pytest.mark.parametrize(
    "script",
    [FIREWALLD, "iptables-nft -N INPUT_ZONES", "iptables-legacy -N INPUT_ZONES"],
    ids=["nftables", "iptables-nft", "iptables-legacy"],
)
def test_firewalld_is_known_by_what_it_has_in_the_kernel(machine: Host, script: str) -> None:
    with machine.namespace.entered():
        assert not has_firewalld()
        machine.sh(script)
        assert has_firewalld()


@pytest.mark.parametrize(("pods", "are_dropped"), [("10.5.0.0/16", False), ("10.6.0.0/16", True)])
def test_elements_of_an_ipset_decide_what_a_rule_about_it_lets_through(
    machine: Host, monkeypatch: pytest.MonkeyPatch, pods: str, are_dropped: bool
) -> None:
    machine.sh("iptables-nft -A FORWARD -j DROP")
    accept = "-A FORWARD -m set --match-set pods src -j ACCEPT"
    environment = machine.stub(
        ["ipset", "iptables-nft-save"],
        f"case $0 in *ipset) printf 'create pods hash:net family inet\\nadd pods {pods}\\n' ;;"
        f" *) printf '*filter\\n:FORWARD ACCEPT [0:0]\\n{accept}\\n-A FORWARD -j DROP\\n' ;; esac",
    )
    monkeypatch.setenv("PATH", environment["PATH"])
    with machine.namespace.entered():
        dropping = forward_drops(ip_network("10.5.0.0/16"), IptablesRunner(threading.Event()))
    assert bool(dropping) == are_dropped


def test_rules_that_refuse_some_packets_are_not_reported(machine: Host) -> None:
    machine.sh(FOR_SOME)
    assert warnings(machine, "nft", 2) == []
