"""The extension backend: commands of the network config make the network between real daemons."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.netns.test_cluster import connect

SOON = 20
#: Upstream's sample configs, word for word.
HOST_GW = {
    "Type": "extension",
    "SubnetAddCommand": "ip route add $SUBNET via $PUBLIC_IP",
    "SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP",
}
VXLAN = {
    "Type": "extension",
    "PreStartupCommand": (
        "export VNI=1; export IF_NAME=flannel-vxlan; ip link del $IF_NAME 2>/dev/null; ip link add $IF_NAME"
        " type vxlan id $VNI dstport 8472 nolearning && ip link set mtu 1450 dev $IF_NAME"
        " && cat /sys/class/net/$IF_NAME/address"
    ),
    "PostStartupCommand": (
        "export IF_NAME=flannel-vxlan; export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`;"
        " ip addr add $SUBNET_IP/32 dev $IF_NAME && ip link set $IF_NAME up"
    ),
    "ShutdownCommand": "export IF_NAME=flannel-vxlan; ip link del $IF_NAME",
    "SubnetAddCommand": (
        "export SUBNET_IP=`echo $SUBNET | cut -d'/' -f 1`; export IF_NAME=flannel-vxlan; read VTEP;"
        " ip route add $SUBNET nexthop via $SUBNET_IP dev $IF_NAME onlink && arp -s $SUBNET_IP $VTEP dev"
        " $IF_NAME && bridge fdb add $VTEP dev $IF_NAME self dst $PUBLIC_IP"
    ),
}
NETWORK = "10.50.0.0/16"
PEER = "10.50.77.0/24"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A file in which commands note that they ran."""
    return tmp_path / "notes"


def noting(notes: Path, what: str, then: str = "true") -> str:
    """Return a command that notes when it runs, with its variables and input."""
    shown = f'echo {what} "$SUBNET $PUBLIC_IP $(cat)"'
    return f"{shown} >> {shlex.quote(str(notes))}; {then}"


def lines(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


def awaited(notes: Path, *wanted: str) -> None:
    wait_for(lambda: lines(notes) == list(wanted), SOON, f"{wanted}; noted were {lines(notes)}")


def one_node(lab: Lab, backend: dict[str, Any], *flags: str) -> Node:
    (node,) = lab.cluster({"Type": "extension", **backend}, nodes=1, flags=flags, Network=NETWORK)
    return node


def add_peer(lab: Lab, data: object = "data", address: str = "198.18.0.77", subnet: str = PEER) -> None:
    value = {"PublicIP": address, "BackendType": "extension", "BackendData": data}
    lab.etcd.put_lease(subnet, value)


def restart(node: Node) -> None:
    assert node.stop().status == 0
    node.start()
    node.wait_for_log("In sync with")


def test_commands_of_the_host_gw_sample_connect_nodes_and_a_peer_that_leaves_is_removed(lab: Lab) -> None:
    first, second = lab.cluster(HOST_GW, Network=NETWORK)
    connect([first, second])
    assert second.stop().status == 0
    lab.etcd.delete_lease(second.subnet())
    first.wait_for_no_route(second.subnet())


def test_commands_of_the_vxlan_sample_connect_nodes_and_shutdown_removes_the_device(lab: Lab) -> None:
    first, second = lab.cluster(VXLAN, Network=NETWORK)
    connect([first, second])
    value = lab.etcd.leases()[first.subnet()]
    assert value["BackendData"] == first.link("flannel-vxlan")["address"]
    assert first.stop().status == 0
    assert first.run("ip", "link", "show", "flannel-vxlan", check=False).returncode != 0
