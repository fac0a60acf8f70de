"""All nodes of a cluster as one of them sees them: ``flannelctl nodes`` and ``doctor --cluster``."""

from __future__ import annotations

import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.lab import API, NETWORK
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_file_store import remote, store_flags
from tests.netns.test_remote import REMOTE, server
from tests.netns.test_seeing import answer, flannelctl, lease

PATIENCE = 60
GUIDE = Path(__file__).parents[2] / "docs" / "firewall.md"
ANSWERS = ("--answer-port=8470",)


def settled(lab: Lab, backend: dict[str, Any], nodes: int = 2, **config: Any) -> list[Node]:
    """Nodes whose containers reach each other, and whose daemons answer queries."""
    found = lab.cluster(backend, nodes=nodes, flags=ANSWERS, **config)
    for each in found[1:]:
        connect(found[0], each)
    return found


def seen(node: Node) -> dict[str, dict[str, Any]]:
    """The nodes by their first subnet."""
    return {each["subnets"][0]: each for each in answer(node, "nodes")["nodes"]}


def cluster_findings(node: Node) -> dict[str, str]:
    told = answer(node, "doctor", "--cluster")["findings"]
    return {each["check"]: f"{each['problem']}: {each['evidence']}" for each in told if each["theme"] == "N"}


def test_nodes_are_listed_with_what_they_run(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"})
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")
    told = seen(node)
    assert list(told) == [node.subnet(), peer.subnet()]
    for each in told.values():
        assert (each["state"], each["notes"]) == ("ok", [])
        assert (each["backend"], each["vni"], each["port"], each["mtu"]) == ("vxlan", 1, 8472, 1450)
        assert each["store"] == "etcd v2"
    assert told[node.subnet()]["is_own"]
    assert told[peer.subnet()]["rtt"] > 0
    assert flannelctl(node, "nodes").returncode == 0
    assert cluster_findings(node) == {}
    node.stop()
    without = flannelctl(node, "nodes")
    assert without.returncode == 1
    assert re.search("PROBLEM +this node .*no daemon answers here$", without.stdout, re.MULTILINE)


@pytest.mark.parametrize("kind", ["file", f"etcd {API}"])
def test_clients_of_a_lease_server_keep_their_leases_in_its_store(lab: Lab, kind: str) -> None:
    nodes = lab.add_nodes(3)
    with ExitStack() as stack:
        if kind == "file":
            nodes[0].start(*ANSWERS, *store_flags(nodes[0], {"Type": "vxlan"}))
            of_server = remote(nodes[0])
        else:
            lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
            stack.enter_context(server(lab, API))
            nodes[0].start(*ANSWERS)
            of_server = REMOTE
        for each in nodes[1:]:
            each.start(*ANSWERS, of_server)
        for each in nodes:
            each.wait_ready()
        for node in nodes:
            wait_for(partial(_keep_leases_in, node, [kind, "remote", "remote"]), PATIENCE, "three answers")
            wait_for(partial(_finds_nothing, node), PATIENCE, "a cluster that is well")


def _finds_nothing(node: Node) -> bool:
    return cluster_findings(node) == {}


def _keep_leases_in(node: Node, stores: list[str]) -> bool:
    """Return True if the nodes say that of their stores, and there is nothing to note."""
    told = seen(node).values()
    return sorted(each["store"] or "" for each in told) == stores and not any(each["notes"] for each in told)


def test_nodes_answer_over_ipv6_and_at_their_public_ip_without_a_tunnel(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "host-gw"}, **DUAL_STACK)
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")


def test_nodes_answer_over_ipv6_in_the_overlay(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"}, **DUAL_STACK, EnableIPv4=False)
    subnet = peer.subnet(6)
    wait_for(lambda: seen(node)[subnet]["answers"] == "daemon", PATIENCE, "an answer")
    assert seen(node)[subnet]["notes"] == []
    wait_for(lambda: stops(node, subnet)[0] is None, PATIENCE, "a way that is open")
    assert checks(node)["checksums"][0] == "ok"


def test_node_that_finds_its_port_taken_says_so_and_answers_once_it_is_free(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"})
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")
    peer.stop()
    with peer.namespace.entered(), socket.socket(type=socket.SOCK_DGRAM) as holder:
        holder.bind(("", 8470))
        peer.start(*ANSWERS)
        peer.wait_for_log("Cannot answer queries at", PATIENCE)
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")


def test_dead_nodes_and_nodes_that_answer_no_queries_are_told_apart(lab: Lab) -> None:
    node, peer, mute = settled(lab, {"Type": "vxlan"}, nodes=3)
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")
    mute.stop()
    mute.start()
    mute.wait_ready(PATIENCE)
    lab.etcd.put_lease("10.5.240.0/24", lease("198.18.0.240", "02:00:00:00:00:f0"))
    node.wait_for_route("10.5.240.0/24")
    told = seen(node)
    assert told[mute.subnet()]["answers"] == "kernel"
    assert told["10.5.240.0/24"]["answers"] == "nothing"
    # Side by side: each waits for the node that does not answer.
    with ThreadPoolExecutor(16) as pool:
        findings, edges = pool.submit(cluster_findings, node), pool.submit(answer, node, "graph")
        pictures = ["graph", "graph --format=dot", "graph --format=html"]
        commands = ["nodes", "doctor --cluster", f"ping {mute.subnet()}", *pictures]
        done = pool.map(lambda words: flannelctl(node, *words.split()), commands)
        nodes, doctor, ping, tree, dot, page = done
    remedy = "of 1 node; start flanneld there with -answer-port=8470"
    assert remedy in nodes.stdout.splitlines()[-1]
    assert remedy in doctor.stdout
    assert "-answer-port=8470" in ping.stdout.splitlines()[-1]
    assert "10.5.240.0/24 (198.18.0.240): no answer" in findings.result()["silent nodes"]
    assert nodes.returncode == 1
    assert (
        "PROBLEM: 1 node\n|   `-- 10.5.240.0/24  198.18.0.240  -  no answer\n`-- ok: 2 nodes" in tree.stdout
    )
    assert tree.returncode == 1
    assert f'"{node.subnet()}" -- "{peer.subnet()}"' in dot.stdout
    assert page.stdout.startswith("<!DOCTYPE html>")
    assert all(each in page.stdout for each in told)
    assert {each["to"] for each in edges.result()["edges"]} == told.keys() - {node.subnet()}


def test_node_that_drops_icmp_is_no_silent_node(lab: Lab) -> None:
    """As a node of Go, which answers no queries either."""
    node, peer = lab.cluster({"Type": "vxlan"})
    connect(node, peer)
    for each in (node, peer):
        each.run("iptables-nft", "-A", "INPUT", "-p", "icmp", "-j", "DROP")
    assert seen(node)[peer.subnet()]["answers"] == "kernel"
    assert cluster_findings(node) == {}
    peer.run("ip", "link", "set", "eth0", "down")
    assert seen(node)[peer.subnet()]["answers"] == "nothing"


def test_strangers_get_no_answer(lab: Lab) -> None:
    """A host of the underlay that is no node, even if it routes the node's overlay address there."""
    node, peer = settled(lab, {"Type": "vxlan"})
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")
    ask = (
        "import sys; from ipaddress import ip_address as ip;"
        "from flanneld.network.survey import queries;"
        "print(queries([ip(sys.argv[1])], 8470, 0.5)[ip(sys.argv[1])].facts.get('version'))"
    )
    base = node.subnet().removesuffix("/24")
    lab.switch.ip(f"route add {base}/32 via {node.address}")
    assert lab.switch.run("ping", "-c1", "-W5", base).returncode == 0
    assert lab.switch.run(sys.executable, "-c", ask, base).stdout.strip() == "None"
    assert peer.run(sys.executable, "-c", ask, base).stdout.strip() != "None"


# ---- ping and netcheck --------------------------------------------------------------------------


def stops(node: Node, target: str) -> tuple[str | None, set[str]]:
    """Where packets stop, and the stages that were tried."""
    told = answer(node, "ping", target, "--count=3")
    stages = {each["check"] for each in told["checks"]}
    return told["stops_at"], {each for each in stages if " " not in each} - {"checksums", "filter"}


def drop(node: Node, chain: str, *rules: str) -> None:
    node.run("nft", "add table inet fault")
    node.run("nft", f"add chain inet fault {chain} {{ type filter hook {chain} priority -400; }}")
    for rule in rules:
        node.run("nft", f"add rule inet fault {chain} {rule}")


def mend(node: Node) -> None:
    node.run("nft", "delete table inet fault")


def test_ping_says_where_packets_stop(lab: Lab) -> None:
    faults = (
        ("input", "udp dport 8472 drop", "tunnel"),
        ("input", "udp dport 8472 reject with icmpx admin-prohibited", "port"),
        ("input", "ip saddr 198.18.0.0/16 drop", "underlay"),
        ("input", "iifname flannel.1 ip protocol icmp ip length > 1400 drop", "tunnel"),
        ("input", "udp dport 8470 udp checksum != 0 drop", "udp"),
        ("output", "udp sport 8470 ip length > 1400 drop", "tunnel"),
        ("forward", "drop", "forward"),
    )
    # A node for each, since where no answer comes all that takes time is to wait for it.
    node, peer, gone, *ill = settled(lab, {"Type": "vxlan"}, nodes=3 + len(faults))

    def ping(target: str) -> dict[str, Any]:
        return answer(node, "ping", target, "--count=3")

    container, absent = peer.container().address, peer.subnet().replace(".0/24", ".250")
    wait_for(lambda: stops(node, container)[0] is None, PATIENCE, "a way that is open")
    at, stages = stops(node, container)
    assert (at, stages) == (None, {"underlay", "port", "tunnel", "udp", "there", "back", "container"})
    assert flannelctl(node, "ping", peer.subnet()).returncode == 0
    targets = [each.container().address for each in (*ill, gone)]
    with ThreadPoolExecutor(16) as pool:
        told = list(pool.map(ping, targets))
        assert {each["stops_at"] for each in told} == {None}, [each["reason"] for each in told]
        for each, (hook, rule, _) in zip(ill, faults, strict=True):
            drop(each, hook, rule)
        gone.stop()
        gone.run("ip", "link", "delete", "flannel.1")
        told = list(pool.map(ping, [*targets, absent]))
    expected = [*(stage for _, _, stage in faults), "port", "container"]
    assert [each["stops_at"] for each in told] == expected, [each["reason"] for each in told]
    # By the socket for which the kernel sorts answers; so far it was a raw one.
    node.run("sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
    assert stops(node, absent)[0] == "container"
    assert stops(node, container)[0] is None


def test_ping_works_without_an_address_in_the_overlay_and_over_ipv6(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "host-gw"}, **DUAL_STACK)
    wait_for(lambda: "back" in stops(node, peer.subnet())[1], PATIENCE, "an answer")
    assert stops(node, peer.subnet()) == (None, {"underlay", "udp", "there", "back"})
    container = peer.container().addresses[6]
    connect(node, peer)
    assert stops(node, container)[0] is None


def test_node_that_lets_nothing_in_for_itself_is_no_problem(lab: Lab) -> None:
    """Its containers talk: ``forward`` is another chain."""
    node, *filtered = settled(lab, {"Type": "vxlan"}, nodes=4)
    for each, accepted in zip(filtered, ("!= icmp", "tcp", "{ tcp, icmp }"), strict=True):
        rules = (f"meta l4proto {accepted} accept", "udp dport 8472 accept")
        drop(each, "input", *rules, "iifname { eth0, flannel.1 } drop")
        node.container().wait_for_reply(each.container().address)
        done = flannelctl(node, "netcheck", each.subnet())
        assert (done.returncode, "stops at" in done.stdout) == (0, False), done.stdout


def test_host_that_denies_by_default_is_opened_by_the_commands_of_the_guide(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"})
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")
    peer.run("nft", "add table inet filter")
    peer.run("nft", "add chain inet filter input { type filter hook input priority 0; policy drop; }")
    peer.run("nft", "add rule inet filter input ct state established accept")
    assert stops(node, peer.subnet())[0] is not None
    opening, answering = re.findall(r"(?m)^    nft (insert rule .*)$", GUIDE.read_text())
    peer.run("nft", opening)
    connect(node, peer)
    assert stops(node, peer.subnet()) == (None, {"underlay", "port", "tunnel", "udp"})
    peer.run("nft", answering)
    assert checks(node)["udp"][0] == "ok"


def checks(node: Node) -> dict[str, tuple[str, str]]:
    return {each["check"]: (each["state"], each["found"]) for each in answer(node, "netcheck")["checks"]}


def test_netcheck_tries_the_port_that_the_backend_names(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "udp", "Port": 8299})
    port = f"UDP port 8299 of {peer.address}"
    wait_for(lambda: checks(node)["port"] == ("ok", f"{port} is open"), PATIENCE, "an answer")
    drop(peer, "input", "udp dport 8299 reject")
    assert checks(node)["port"] == ("PROBLEM", f"{port} is closed")


def test_netcheck_tells_checksums_from_a_firewall(lab: Lab) -> None:
    node, peer = settled(lab, {"Type": "vxlan"})
    wait_for(lambda: seen(node)[peer.subnet()]["answers"] == "daemon", PATIENCE, "an answer")
    sound = checks(node)
    assert {name: state for name, (state, _) in sound.items()} == dict.fromkeys(
        (
            *("NAT, underlay", "underlay", "port", "tunnel", "udp", "there", "back"),
            *("path MTU, underlay", "path MTU, tunnel", "checksums", "NAT, overlay"),
        ),
        "ok",
    )
    # As with a wrong one, a host drops what has a checksum, and takes what has none.
    spoilt = "udp {}port 8470 udp checksum != 0 drop"
    for hook, direction, where in (
        ("input", "d", "this node"),
        ("output", "s", f"{peer.subnet()} ({peer.address})"),
    ):
        drop(peer, hook, spoilt.format(direction))
        assert checks(node)["checksums"] == (
            "PROBLEM",
            f"UDP arrives without checksums only; {where} spoils them",
        )
        mend(peer)
    drop(peer, "input", "udp dport 8470 drop")
    assert checks(node)["checksums"] == ("hint", "ICMP arrives, UDP does not")
    mend(peer)
    drop(peer, "input", "udp dport 8472 drop")
    assert checks(node)["port"] == ("unknown", f"UDP port 8472 of {peer.address} gives no answer")
    mend(peer)
    node.run("nft", "add table ip fault")
    node.run("nft", "add chain ip fault post { type nat hook postrouting priority 90; }")
    node.run("nft", f"add rule ip fault post oifname flannel.1 snat to {node.container().address}")
    assert checks(node)["NAT, overlay"][0] == "hint"
