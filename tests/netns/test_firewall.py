"""Packet filter rules in whole clusters: what they let through, and whose address the world sees."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Self

import pytest

from tests.lab import Container, Exit, Lab, Node, wait_for
from tests.lab.daemon import own_command
from tests.lab.lab import NETWORK, gateway
from tests.netns.pair import DUAL_STACK
from tests.netns.test_firewall_task import NO_TOOLS
from tests.netns.test_seeing import answer
from tests.netns.traffic import PORT, Sniffer, Stream

VXLAN = {"Type": "vxlan"}
#: The daemon's flags and the network config that lead to each way of setting rules.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "nft": (("--iptables-flavour=nft",), {}),
    "v0.12": (("--iptables-flavour=nft", "--iptables-rules=v0.12"), {}),
    "legacy": (("--iptables-flavour=legacy", "--iptables-resync=1"), {}),
    "nftables": ((), {"EnableNFTables": True}),
}
STOPS: dict[str, Callable[[Node], Exit]] = {"SIGTERM": Node.stop, "SIGKILL": Node.kill}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def _lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine, many hosts: each should have a lock of its own, and needs one at least for this test."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))


def cluster(lab: Lab, way: str, *, nodes: int = 2, before: str = "", **config: Any) -> list[Node]:
    """Nodes that masquerade. ``before`` is run by a shell on each before its daemon starts."""
    flags, more = WAYS[way]
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN, **more, **config})
    made = lab.add_nodes(nodes)
    for node in made:
        node.run("sh", "-ec", before)
        node.start("--ip-masq", *flags)
    for node in made:
        node.wait_ready()
    return made


def talk(client: Container, server: Container) -> str:
    """Exchange a word over TCP; the client's address as the server sees it."""
    with server.namespace.entered():
        listener = socket.create_server(("0.0.0.0", PORT))
    listener.settimeout(60)
    with client.namespace.entered():
        there = socket.create_connection((server.address, PORT), timeout=60)
    with listener, there:
        here, (address, _) = listener.accept()
        with here:
            here.sendall(b"hello")
            assert there.recv(16) == b"hello"
    return str(address)


@pytest.mark.parametrize("way", ["nft", "v0.12", "legacy"])
def test_containers_talk_where_the_policy_is_to_drop(lab: Lab, way: str) -> None:
    flavour = "legacy" if way == "legacy" else "nft"
    first, second = cluster(lab, way, before=f"iptables-{flavour} -P FORWARD DROP")
    first.container().wait_for_reply(second.container())
    assert talk(first.container(), second.container()) == first.container().address
    assert talk(second.container(), first.container()) == second.container().address


def test_chains_of_others_are_searched_for_drops_after_subnet_env_is_written(lab: Lab) -> None:
    chain = "{ type filter hook forward priority 5; policy drop; }"
    node, *_ = cluster(lab, "nft", nodes=1, before=f"nft add table inet x; nft add chain inet x y '{chain}'")
    node.wait_for_log("chain y of table inet x drops the network's packets")
    lines = [line for line in node.log().splitlines() if "Running backend." in line or "drops the" in line]
    assert ["drops the" in line for line in lines] == [False, True]


def test_forwarding_is_left_to_others_on_demand(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN})
    node, *_ = lab.add_nodes(1)
    node.start("--iptables-forward-rules=false")
    node.wait_ready()
    assert node.run("nft", "list", "ruleset").stdout == ""


def test_the_world_sees_the_node_and_containers_see_each_other(lab: Lab, way: str, tmp_path: Path) -> None:
    first, second = cluster(lab, way)
    outside = gateway(first.link_number)
    inside, other = first.container(), second.container()
    inside.wait_for_reply(other)
    with Sniffer(lab.switch, "br0") as world, Stream(inside.namespace, outside, tmp_path / "out"):
        assert world.sources() == {first.address}
    with Sniffer(other.namespace, "eth0") as peer, Stream(inside.namespace, other.address, tmp_path / "in"):
        assert peer.sources() == {inside.address}


def test_without_masquerading_the_world_sees_the_containers(lab: Lab, tmp_path: Path) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN})
    node, *_ = lab.add_nodes(1)
    node.start()
    node.wait_ready()
    inside = node.container()
    with (
        Sniffer(lab.switch, "br0") as world,
        Stream(inside.namespace, gateway(node.link_number), tmp_path / "out"),
    ):
        assert world.sources() == {inside.address}


@pytest.mark.parametrize("way", ["nft", "legacy", "nftables"])
def test_masquerade_exceptions_see_the_containers(lab: Lab, way: str, tmp_path: Path) -> None:
    spared = {4: "198.18.0.0/15", 6: "fd00:18::/32"}
    node, *_ = cluster(lab, way, nodes=1, MasqueradeExceptions=list(spared.values()), **DUAL_STACK)
    inside = node.container()
    for family, own in inside.addresses.items():
        outside = gateway(node.link_number, family)
        stream = Stream(inside.namespace, outside, tmp_path / f"out{family}")
        with Sniffer(lab.switch, "br0") as world, stream:
            assert world.sources() == {own}
        hops = answer(node, "trace", outside)["hops"]
        (source,) = (hop for hop in hops if hop["hop"] == "source")
        assert "the container's address" in source["found"]
        assert f"-d {spared[family]}" in source["note"]
    (source,) = (hop for hop in answer(node, "trace", "203.0.113.1")["hops"] if hop["hop"] == "source")
    assert source["found"] == "this node's address on eth0"
    assert "-j MASQUERADE" in source["note"]


@pytest.mark.parametrize("way", ["nft", "legacy", "nftables"])
def test_nodes_see_the_containers_as_long_as_they_have_leases(lab: Lab, way: str, tmp_path: Path) -> None:
    first, second = cluster(lab, way, MasqueradeExceptions=["nodes"])
    wait_for(lambda: f"{second.address}" in rules(first), what="the second node to be spared")
    inside = first.container()
    with Sniffer(second.namespace, "eth0") as seen, Stream(inside.namespace, second.address, tmp_path / "a"):
        assert seen.sources() == {inside.address}
        leased = second.subnet()
        second.stop()
        lab.etcd.delete_lease(leased)
        wait_for(lambda: seen.sources() == {first.address}, what="the node to see the other node's address")


def test_packets_from_outside_keep_their_source(lab: Lab, way: str, tmp_path: Path) -> None:
    node, *_ = cluster(lab, way, nodes=1)
    inside = node.container()
    lab.switch.ip(f"route add {node.subnet()} via {node.address}")
    with Sniffer(inside.namespace, "eth0") as seen, Stream(lab.switch, inside.address, tmp_path / "in"):
        assert seen.sources() == {gateway(node.link_number)}


def test_both_families_are_masqueraded(lab: Lab, way: str, tmp_path: Path) -> None:
    node, *_ = cluster(lab, way, nodes=1, **DUAL_STACK)
    outside = gateway(node.link_number, 6)
    with Sniffer(lab.switch, "br0") as world, Stream(node.container().namespace, outside, tmp_path / "out"):
        assert world.sources() == {node.ipv6_address}


# ---- no packet with a container's address gets out --------------------------------------------


class Outflow:
    """What the world sees of a container's stream, from when it is first right."""

    def __init__(self, lab: Lab, node: Node, directory: Path) -> None:
        self._sniffer = Sniffer(lab.switch, "br0")
        self._stream = Stream(node.container().namespace, gateway(node.link_number), directory / "stream")
        self._begin = 0
        self.wait_until_tight()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.stop()
        self._sniffer.close()

    def listen(self, seconds: float = 0.3) -> None:
        self._sniffer.listen(seconds)

    def leaked(self) -> list[str]:
        """The sources of packets that are a container's address."""
        seen = self._sniffer.packets[self._begin :]
        assert seen, "nothing flows"
        return [source for source in seen if ip_address(source) in ip_network(NETWORK)]

    def wait_until_tight(self) -> None:
        """Wait until something flows and nothing leaks."""

        def tight() -> bool:
            begin = len(self._sniffer.packets)
            self.listen()
            self._begin = begin
            return len(self._sniffer.packets) > begin and not self.leaked()

        wait_for(tight, what="the stream to flow as it should")

    def during(self, act: Callable[[], object]) -> None:
        """Listen while something is done, and for a moment after it."""
        thread = threading.Thread(target=act)
        thread.start()
        while thread.is_alive():
            self.listen(0.05)
        thread.join()
        self.listen()


@pytest.fixture
def node(lab: Lab, way: str) -> Node:
    made, *_ = cluster(lab, way, nodes=1)
    return made


@pytest.fixture
def outflow(lab: Lab, node: Node, tmp_path: Path) -> Iterator[Outflow]:
    with Outflow(lab, node, tmp_path) as flow:
        yield flow


def start_again(node: Node, way: str, *flags: str) -> None:
    node.start("--ip-masq", *WAYS[way][0], *flags)
    node.wait_ready()


@pytest.mark.parametrize("end", STOPS)
def test_restart_leaks_no_unmasqueraded_packet(node: Node, way: str, outflow: Outflow, end: str) -> None:
    def restart() -> None:
        STOPS[end](node)
        start_again(node, way)

    outflow.during(restart)
    assert outflow.leaked() == []


def test_new_subnet_leaks_no_unmasqueraded_packet(lab: Lab, node: Node, way: str, outflow: Outflow) -> None:
    before = node.subnet()

    def move() -> None:
        node.stop()
        lab.etcd.delete_lease(before)
        lab.etcd.put_lease(before, {"PublicIP": "192.0.2.9", "BackendType": "vxlan"})
        start_again(node, way)

    outflow.during(move)
    assert node.subnet() != before
    assert outflow.leaked() == []
    assert before not in rules(node)
    assert node.subnet() in rules(node)


def test_new_rule_set_leaks_no_unmasqueraded_packet(lab: Lab, tmp_path: Path) -> None:
    node, *_ = cluster(lab, "nft", nodes=1)
    with Outflow(lab, node, tmp_path) as outflow:
        for next_way in ("v0.12", "legacy", "nft"):

            def change(to: str = next_way) -> None:
                node.stop()
                start_again(node, to)

            outflow.during(change)
        assert outflow.leaked() == []


FLUSHES = {
    "nft": "iptables-nft -t nat -F",
    "v0.12": "iptables-nft -t nat -F",
    "legacy": "iptables-legacy -t nat -F",
    "nftables": "nft flush ruleset",
}


def test_a_flush_is_made_good(node: Node, way: str, outflow: Outflow) -> None:
    node.run(*FLUSHES[way].split())
    # The legacy tables are looked at every second, others only when the kernel says that rules are gone.
    node.wait_for_log("Restored our rules")
    outflow.wait_until_tight()
    outflow.listen()
    assert outflow.leaked() == []


def rules(node: Node) -> str:
    """All rules there are."""
    with_legacy = "iptables-legacy-save; " if "legacy" in node.log() else ""
    return node.run("sh", "-ec", f"{with_legacy}nft list ruleset").stdout


# ---- the daemon ---------------------------------------------------------------------------------


def test_the_rules_are_there_before_subnet_env_is(lab: Lab, tmp_path: Path) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN})
    node, *_ = lab.add_nodes(1)
    stub = tmp_path / "iptables-nft-restore"
    stub.write_text(f'#!/bin/sh\ntest ! -e {node.subnet_file} && exec /usr/sbin/iptables-nft-restore "$@"\n')
    stub.chmod(0o755)
    node.start("--ip-masq", environment={"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"})
    node.wait_ready()
    assert "FLANNEL-POSTRTG" in rules(node)


def test_a_daemon_that_cannot_masquerade_says_so_and_ends(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN})
    node, *_ = lab.add_nodes(1)
    command = ("sh", "-ec", f'{NO_TOOLS}; exec "$@"', "sh", *own_command())
    assert node.start("--ip-masq", command=command).wait(20).status == 1
    assert "cannot masquerade" in node.log()
    assert "install the Debian package iptables" in node.log()
    assert not node.subnet_file.exists()


def test_a_daemon_without_iptables_runs_if_it_need_not_masquerade(lab: Lab) -> None:
    lab.etcd.put_config({"Network": NETWORK, "Backend": VXLAN})
    node, *_ = lab.add_nodes(1)
    node.start(command=("sh", "-ec", f'{NO_TOOLS}; exec "$@"', "sh", *own_command()))
    node.wait_ready()
    assert node.wait_for_log("No FORWARD rules")
