"""Which containers of this node are told to others: those that their bridge has just heard."""

from __future__ import annotations

import sys

from tests.lab import Lab, Node
from tests.netns.pair import DUAL_STACK

#: Prints the containers of the subnets in its arguments. It has the /sys of its network namespace.
PROGRAM = (
    "import sys; from ipaddress import ip_network; from flanneld.network.bridges import heard_containers;"
    "print(*heard_containers(map(ip_network, sys.argv[1:])))"
)


def told(node: Node) -> list[str]:
    done = node.run(sys.executable, "-c", PROGRAM, node.subnet(4), node.subnet(6))
    return sorted(done.stdout.split())


def test_containers_that_the_bridge_has_heard_are_told_and_gone_ones_are_not(lab: Lab) -> None:
    (node,) = lab.cluster({"Type": "vxlan"}, 1, **DUAL_STACK)
    assert told(node) == []
    first, second = node.container(), node.container(2)
    for each in (first, second):
        for address in each.addresses.values():
            node.run("ping", "-c", "1", "-W", "10", address)
    assert told(node) == sorted([*first.addresses.values(), *second.addresses.values()])
    (gone,) = second.namespace.json("ip", "-j", "link", "show", "dev", "eth0")
    second.namespace.run("ip", "link", "del", "dev", "eth0")
    for address in second.addresses.values():  # such an entry outlives its container
        node.run("ip", "neigh", "replace", address, "lladdr", gone["address"], "dev", "cni0")
    for address in first.addresses.values():
        node.run("ping", "-c", "1", "-W", "10", address)
    assert told(node) == sorted(first.addresses.values())
