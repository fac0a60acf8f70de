"""A lease inside another node's subnet: neither the kernel's routes nor a backend's own table get it."""

from __future__ import annotations

from base64 import b64encode
from ipaddress import IPv4Network
from typing import Any

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.charons import IPSEC, with_own_run
from tests.netns.pair import connect
from tests.netns.test_wireguard import WIREGUARD

#: Each backend with its data in a stranger's lease, and the commands that show what leads to a peer.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, tuple[str, ...]]] = {
    "host-gw": ({"Type": "host-gw"}, None, ("ip route",)),
    "vxlan": ({"Type": "vxlan"}, {"VNI": 1, "VtepMAC": "02:00:00:00:00:77"}, ("ip route",)),
    "wireguard": (
        WIREGUARD,
        {"PublicKey": b64encode(bytes(range(32))).decode(), "Port": 51820},
        ("ip route", "wg show all allowed-ips"),
    ),
    "ipsec": (IPSEC, None, ("ip route", "ip xfrm policy")),
}
_NEEDS = {"wireguard": "wireguard", "ipsec": "esp"}


def start(node: Node) -> None:
    key = {"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")}
    node.start(command=with_own_run(node, *own_command()), environment=key)


def leads(node: Node, command: str, net: IPv4Network) -> bool:
    return str(net) in node.run(*command.split()).stdout.replace("\t", " ").split()


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[pytest.mark.needs_kernel(_NEEDS[name])] if name in _NEEDS else [])
        for name in CASES
    ],
)
def test_lease_inside_a_nodes_subnet_takes_no_packet_and_is_followed_once_the_node_is_gone(
    lab: Lab, backend: str
) -> None:
    config, data, commands = CASES[backend]
    lab.etcd.put_config({"Network": NETWORK, "Backend": config})
    node, peer = lab.add_nodes(2)
    for each in (node, peer):
        start(each)
    for each in (node, peer):
        each.wait_ready()
    connect(node, peer)
    subnet = IPv4Network(peer.subnet())
    half = next(subnet.subnets())
    stranger: dict[str, Any] = {"PublicIP": "198.18.0.77", "BackendType": backend}
    lab.etcd.put_lease(str(half), stranger | ({"BackendData": data} if data else {}))
    node.wait_for_log(f"Lease {half} is not followed: it overlaps the lease {subnet}")
    connect(node, peer)
    for command in commands:
        assert leads(node, command, subnet), command
        assert not leads(node, command, half), command
    peer.stop()
    lab.etcd.delete_lease(str(subnet))
    for command in commands:
        wait_for(lambda: leads(node, command, half), 20, f"{half} in {command}")  # noqa: B023
        wait_for(lambda: not leads(node, command, subnet), 20, f"no {subnet} in {command}")  # noqa: B023
    assert len(node.wait_for_log("is not followed")) == 1
