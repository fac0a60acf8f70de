"""One daemon in several networks, over etcd and over a server of leases."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flanneld.subnet.embedded.store import open_file
from tests.lab import Lab, Node, wait_for
from tests.lab.daemon import own_command
from tests.lab.ping import Ping
from tests.netns.test_remote import REMOTE, server

PREFIX = "/coreos.com/network"
BLUE = {"Network": "10.6.0.0/16", "Backend": {"Type": "host-gw"}}
RED = {"Network": "10.7.0.0/16", "Backend": {"Type": "vxlan", "VNI": 7}}
BLACK = {"Network": "10.9.0.0/16", "Backend": {"Type": "extension", "SubnetAddCommand": "touch harmed"}}
#: It wants what red has.
PINK = {"Network": "10.8.0.0/16", "Backend": {"Type": "vxlan", "VNI": 7}}


def put(lab: Lab, name: str, config: dict[str, Any]) -> None:
    lab.etcd.set(f"{PREFIX}/{name}/config", json.dumps(config))


def directory(node: Node) -> Path:
    return node.directory / "networks"


def subnet(node: Node, name: str) -> str:
    """The subnet of a node in a network, once it has one."""

    def lines() -> list[str]:
        path = directory(node) / f"{name}.env"
        text = path.read_text() if path.exists() else ""
        return [line.partition("=")[2] for line in text.splitlines() if line.startswith("FLANNEL_SUBNET=")]

    return wait_for(lines, 60, f"{name}.env on {node.name}; its log:\n{node.log()}")[0]


def leads_to(node: Node, gateway: str) -> bool:
    """Whether a node has a route to the subnet that begins before this address."""
    base = gateway.rpartition(".")[0]
    return any(route["dst"].startswith(f"{base}.0") for route in node.routes())


def masqueraded(node: Node) -> set[str]:
    """The networks whose packets are masqueraded when they leave."""
    rules = node.run("iptables-nft-save", "-t", "nat", check=False).stdout.splitlines()
    return {rule.split(" -s ")[1].split()[0] for rule in rules if " -s " in rule and "MASQUERADE" in rule}


def is_gone(path: Path) -> bool:
    return not path.exists()


def start(node: Node, *flags: str, command: Sequence[str] | None = None) -> None:
    node.start(f"--subnet-dir={directory(node)}", *flags, command=command)


@pytest.mark.parametrize("over", ["etcd", "server"])
def test_networks_come_and_go_and_leave_each_other_alone(over: str) -> None:
    with Lab(api="v3") as lab:
        put(lab, "blue", BLUE)
        put(lab, "red", RED)
        if over == "etcd":
            check(lab, "--ip-masq")
        else:
            with server(lab, "v3"):
                check(lab, REMOTE, "--etcd-endpoints=http://127.0.0.1:1")


def check(lab: Lab, *flags: str) -> None:
    one, other = nodes = lab.add_nodes(2)
    for node in nodes:
        start(node, "--watch-networks", *flags)
    for node, peer in ((one, other), (other, one)):
        wait_for(node.service_manager.ready, 60, f"READY=1 of {node.name}; its log:\n{node.log()}")
        for name in ("blue", "red"):
            gateway = subnet(peer, name)
            wait_for(partial(leads_to, node, gateway), 60, f"a route to {gateway}")
    if "--ip-masq" in flags:
        wait_for(lambda: masqueraded(one) == {"10.6.0.0/16", "10.7.0.0/16"}, 60, "rules of both networks")
    put(lab, "pink", PINK)
    one.wait_for_log("it wants VNI 7, which the network red has")
    put(lab, "black", BLACK)
    one.wait_for_log("the network config would run commands here as root; -allow-extension lets it")
    # The device has the base address of the subnet.
    red = f"{subnet(other, 'red').rpartition('.')[0]}.0"
    wait_for(lambda: one.run("ping", "-c1", "-W1", red, check=False).returncode == 0, 60, f"{red} to answer")
    with Ping(one.namespace, red, one.directory / "ping") as ping:
        ping.wait_for_replies()
        gateway = subnet(other, "blue")
        lab.etcd.delete(f"{PREFIX}/blue/config")
        for node in nodes:
            wait_for(partial(is_gone, directory(node) / "blue.env"), 60, "blue.env to go")
        wait_for(lambda: not leads_to(one, gateway), 60, "the routes of blue to go")
        if "--ip-masq" in flags:
            wait_for(lambda: masqueraded(one) == {"10.7.0.0/16"}, 60, "the rules of blue to go")
        lab.etcd.delete(f"{PREFIX}/pink/config")
        ping.wait_for_replies()
        assert ping.lost() == 0
    assert one.link("flannel.7")
    lab.etcd.delete(f"{PREFIX}/red/config")
    wait_for(lambda: not one.link("flannel.7"), 60, "the device of red to go")
    assert one.stop().status == 0


def test_named_networks_are_served_from_a_file_in_the_same_process() -> None:
    with Lab() as lab:
        node = lab.add_nodes(1)[0]
        store = node.directory / "leases.db"
        flags = [f"--store={store}", "--network=10.5.0.0/16", f"--listen={node.address}:8888"]
        start(node, "--networks=blue", "--healthz-port=10300", *flags)
        node.wait_for_log("Couldn't fetch network config")
        open_file(str(store)).create(f"{PREFIX}/blue/config", json.dumps(BLUE), None)
        assert subnet(node, "blue").startswith("10.6.")
        wait_for(node.service_manager.ready, 60, "READY=1")
        metrics = node.run("curl", "-sf", "http://127.0.0.1:10300/metrics").stdout
        assert 'flannel_network_up{network="blue"} 1' in metrics
        assert "flannel_server_connections 0" in metrics
        assert node.stop().status == 0
        assert (directory(node) / "blue.env").exists()


@pytest.mark.parametrize("networks", [12, pytest.param(50, marks=pytest.mark.long)])
def test_many_networks_are_served_by_one_daemon(networks: int) -> None:
    names = [f"net{number}" for number in range(networks)]
    with Lab(api="v3") as lab:
        for number, name in enumerate(names):
            backend = {"Type": "vxlan", "VNI": number + 1}
            put(lab, name, {"Network": f"10.{100 + number}.0.0/16", "Backend": backend})
        one, other = nodes = lab.add_nodes(2)
        for node in nodes:
            start(node, f"--networks={','.join(names)}")
        # All at once: a message is lost where those before it were not read.
        wait_for(lambda: sum(node.service_manager.ready() for node in nodes) == 2, 120, "READY=1 of both")
        for name in names:
            wait_for(partial(leads_to, one, subnet(other, name)), 60, f"a route of {name}")
        # They try the rules one after the other: a chain that another one has just removed is no refusal.
        assert not any("refuses" in node.log() for node in nodes)
        assert one.stop().status == 0


#: Runs a command with as many descriptors as select(2) takes, but for the first hundred.
CROWDED = (
    sys.executable,
    "-c",
    "import os, sys\n"
    "for number in range(45, 1024):\n"
    "    os.dup2(0, number)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n",
)


def test_rules_in_nftables_come_back_where_select_cannot_take_the_descriptors() -> None:
    names = [f"net{number:02d}" for number in range(9)]
    with Lab(api="v3") as lab:
        for number, name in enumerate(names, 1):
            backend = {"Type": "vxlan", "VNI": number}
            config = {"Network": f"10.{100 + number}.0.0/16", "Backend": backend}
            put(lab, name, {**config, "EnableNFTables": name == names[-1]})  # one network may have it
        (node,) = lab.add_nodes(1)
        # As systemd starts a service.
        command = ("prlimit", "--nofile=1024:8192", *CROWDED, *own_command())
        start(node, "--ip-masq", f"--networks={','.join(names)}", command=command)
        descriptors = Path(f"/proc/{node.pid}/fd")
        wait_for(
            lambda: any(int(each.name) > 1024 for each in descriptors.iterdir()), 120, "high descriptors"
        )

        def has_rules() -> bool:
            listed = node.run("nft", "list", "table", "ip", "flannel-ipv4", check=False)
            return "masquerade" in listed.stdout

        wait_for(has_rules, 60, "the rules")
        node.run("nft", "delete", "table", "ip", "flannel-ipv4")
        wait_for(has_rules, 60, "the rules to be back")
        assert node.stop().status == 0
