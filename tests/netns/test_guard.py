"""A guarded tunnel: packets of nodes get in, whatever joins and leaves, and those of strangers do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import ROOT
from tests.lab.lab import NETWORK
from tests.netns.firewall_host import host
from tests.netns.pair import DUAL_STACK
from tests.netns.test_cleanup import cleanup
from tests.netns.test_firewall_task import everything
from tests.netns.test_plan import carry_out, plan
from tests.netns.test_seeing import flannelctl

VXLAN = {"Type": "vxlan"}
KINDS = [
    pytest.param({"Type": "vxlan", "Port": 4790}, "udp dport 4790", id="vxlan"),
    pytest.param({"Type": "udp"}, "udp dport 8285", id="udp"),
    pytest.param({"Type": "ipip"}, "meta l4proto ipencap", id="ipip", marks=pytest.mark.needs_kernel("ipip")),
]


def cluster(lab: Lab, number: int = 2, **config: Any) -> list[Node]:
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN, **config})
    nodes = lab.add_nodes(number)
    for node in nodes:
        node.start("--guard-tunnel")
    for node in nodes:
        node.wait_ready()
    return nodes


def guard(node: Node, family: str = "ip") -> str:
    return node.run("nft", "list", "table", family, "flannel-guard", check=False).stdout


def admitted(node: Node, family: str = "ip") -> set[str]:
    """Return the addresses in the set of a guard."""
    done = node.run("nft", "-j", "list", "table", family, "flannel-guard", check=False)
    items = json.loads(done.stdout)["nftables"] if done.returncode == 0 else []
    return {each for item in items for each in item.get("set", {}).get("elem", [])}


@pytest.mark.parametrize(("backend", "test"), KINDS)
def test_guarded_tunnel_lets_in_peers_and_no_stranger(lab: Lab, backend: dict[str, Any], test: str) -> None:
    first, second = cluster(lab, Backend=backend)
    first.container().wait_for_reply(second.container())
    wait_for(lambda: admitted(first) == {second.address}, what="the peer to be let in")
    assert f"{test} ip saddr != @nodes" in guard(first)
    # A node whose lease is gone is a stranger; it still knows the way here.
    second.kill()
    lab.etcd.delete_lease(second.subnet())
    wait_for(lambda: admitted(first) == set(), what="the node to be let in no more")
    assert not second.container().reaches(first.container(), 0.5)
    assert "counter packets 0 " not in guard(first)
    second.start("--guard-tunnel")
    second.container().wait_for_reply(first.container())


def test_both_families_are_guarded(lab: Lab) -> None:
    first, second = cluster(lab, **DUAL_STACK)
    wait_for(lambda: admitted(first, "ip6") == {second.ipv6_address}, what="the peer to be let in")
    assert "udp dport 8472 ip6 saddr != @nodes" in guard(first, "ip6")
    here, there = first.container(), second.container()
    here.wait_for_reply(there.addresses[6])
    here.wait_for_reply(there.addresses[4])
    wait_for(lambda: flannelctl(first, "status").returncode == 0, what="a node that is well")
    first.wait_for_log("Made our rules with ip6tables")
    for command in ("doctor", "routes", "peers"):
        done = flannelctl(first, command)
        assert done.returncode == 0, done.stdout


def test_everything_passes_until_all_leases_are_known(lab: Lab) -> None:
    first, second = cluster(lab)
    first.container().wait_for_reply(second.container())
    wait_for(lambda: admitted(first) == {second.address}, what="the peer to be let in")
    first.stop()
    first.run("nft", "delete", "table", "ip", "flannel-guard")
    lab.etcd.stop()
    first.start("--guard-tunnel")
    first.wait_for_log("etcd")
    assert "drop" not in guard(first)
    lab.etcd.start()
    wait_for(lambda: "drop" in guard(first), 60, "the tunnel to be guarded")
    assert admitted(first) == {second.address}


@pytest.mark.parametrize("crowd", [800, pytest.param(2002, marks=pytest.mark.long)])
def test_churn_of_leases_costs_a_healthy_peer_no_packet(lab: Lab, crowd: int) -> None:
    first, second = cluster(lab, SubnetLen=28)
    here, there = first.container(), second.container()
    here.wait_for_reply(there)
    subnets = [f"10.5.{number // 16}.{number % 16 * 16}/28" for number in range(16, 16 + crowd)]
    free = [subnet for subnet in subnets if subnet not in (first.subnet(), second.subnet())]
    leases = [(subnet, f"192.0.{2 + n // 250}.{1 + n % 250}") for n, subnet in enumerate(free)]
    with here.ping(there) as ping:
        ping.wait_for_replies()
        for number, (subnet, public) in enumerate(leases):
            mac = f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"
            data = {"VNI": 1, "VtepMAC": mac}
            lab.etcd.put_lease(subnet, {"PublicIP": public, "BackendType": "vxlan", "BackendData": data})
        wait_for(lambda: len(admitted(first)) == len(leases) + 1, 60, "all nodes to be let in")
        for subnet, _ in leases:
            lab.etcd.delete_lease(subnet)
        wait_for(lambda: admitted(first) == {second.address}, 60, "the others to be let in no more")
        first.kill()
        first.start("--guard-tunnel")
        first.wait_ready()
        ping.wait_for_replies()
        assert ping.lost() == 0


def test_guard_goes_with_the_flag_and_with_cleanup(lab: Lab) -> None:
    first, _ = cluster(lab)
    wait_for(lambda: "drop" in guard(first), what="the tunnel to be guarded")
    first.stop()
    removal = "nft delete table ip flannel-guard"
    assert removal in plan(lab, first).splitlines()
    first.start()
    first.wait_ready()
    wait_for(lambda: not guard(first), what="the guard to go")
    first.stop()
    assert removal not in plan(lab, first).splitlines()
    first.start("--guard-tunnel")
    first.wait_ready()
    wait_for(lambda: "drop" in guard(first), what="the guard to be back")
    first.stop()
    assert any("table ip flannel-guard" in line for line in cleanup(first))
    assert not guard(first)


LEFT_GUARD = """
table ip flannel-guard {
    set nodes { type ipv4_addr; elements = { 192.0.2.1 }; }
    chain input {
        type filter hook input priority -10;
        udp dport 8472 ip saddr != @nodes counter drop comment "8472"
    }
}
"""


@pytest.mark.parametrize("rules", [True, False])
def test_earlier_guard_goes_whether_rules_are_desired_or_not(tmp_path: Path, rules: bool) -> None:
    with host(tmp_path) as machine:
        machine.sh("nft -f -", stdin=LEFT_GUARD)
        log = machine.set_once(masquerade=rules, forward=rules)
        assert "flannel-guard" not in machine.sh("nft list tables"), log


def test_earlier_guard_without_libnftables_is_warned_of_and_the_rules_are_set(tmp_path: Path) -> None:
    with host(tmp_path) as machine:
        machine.sh("nft -f -", stdin=LEFT_GUARD)
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nftables'] = None")
        keeper = machine.keep(environment={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
        keeper.stop()
        (line,) = keeper.lines()
        assert line.startswith("An earlier run's guard drops new nodes' packets, and without libnftables it")
        assert "[nftables]" in line
        assert machine.state("nft") == everything()


def test_guard_that_others_remove_is_put_back(lab: Lab) -> None:
    first, second = cluster(lab)
    wait_for(lambda: "drop" in guard(first), what="the tunnel to be guarded")
    first.run("nft", "delete", "table", "ip", "flannel-guard")
    wait_for(lambda: "drop" in guard(first), 60, "the guard to be back")
    assert admitted(first) == {second.address}


def test_planned_guard_is_that_of_the_daemon(lab: Lab) -> None:
    first, second = cluster(lab)
    wait_for(lambda: admitted(first) == {second.address}, what="the peer to be let in")
    wait_for(lambda: "drop" in guard(first), what="the tunnel to be guarded")
    wait_for(lambda: plan(lab, first, "--guard-tunnel") == "", what="all that is planned")
    before = guard(first)
    first.stop()
    first.run("nft", "delete", "table", "ip", "flannel-guard")
    planned = plan(lab, first, "--guard-tunnel")
    assert "guard lets in" in planned, planned
    for line in planned.splitlines():
        if "guard" in line:
            carry_out(first, f"nft {line.partition(': nft ')[2]}")
    assert guard(first) == before
