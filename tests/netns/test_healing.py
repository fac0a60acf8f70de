"""Whatever removes or changes what the daemon has made, it puts it right at once and then is quiet."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for

#: A repair takes some milliseconds; this leaves a busy machine room.
SOON = 3.0
#: Longer than the pause between two repairs where somebody keeps undoing them.
QUIET = 0.5

ANY_BACKEND = [
    pytest.param(["ip route del {subnet}"], ["route {subnet}"], id="a deleted route"),
    pytest.param(
        ["ip route replace {subnet} via {gateway}"], ["route {subnet}"], id="a route to another gateway"
    ),
    pytest.param(["ip route replace {subnet} dev lo"], ["route {subnet}"], id="a route to another device"),
    pytest.param(["ip route replace blackhole {subnet}"], ["route {subnet}"], id="a route into the void"),
]

VXLAN = [
    pytest.param(["ip neigh del {base} dev flannel.1"], ["neigh {base}"], id="a deleted ARP entry"),
    pytest.param(
        ["ip neigh replace {base} lladdr 02:00:00:00:00:99 dev flannel.1 nud permanent"],
        ["neigh {base}"],
        id="a changed ARP entry",
    ),
    pytest.param(
        ["ip neigh replace {base} lladdr {mac} dev flannel.1 nud stale"],
        ["neigh {base}"],
        id="an ARP entry that may expire",
    ),
    pytest.param(["bridge fdb del {mac} dev flannel.1"], ["fdb {mac}"], id="a deleted FDB entry"),
    pytest.param(
        ["bridge fdb replace {mac} dev flannel.1 dst 198.18.0.99 self permanent"],
        ["fdb {mac}"],
        id="a changed FDB entry",
    ),
    pytest.param(["ip address del {own}/32 dev flannel.1"], ["address {own}/32"], id="a deleted address"),
    pytest.param(["ip link del flannel.1"], ["link flannel.1"], id="a deleted device"),
    pytest.param(["ip link set flannel.1 down"], ["link flannel.1"], id="a device set down"),
    pytest.param(
        ["ip link set flannel.1 down", "ip link set flannel.1 up"],
        ["route {subnet}"],
        id="a device set down and up",
    ),
    pytest.param(
        ["ip link set flannel.1 address 02:00:00:00:00:99"], ["link flannel.1"], id="a changed MAC"
    ),
    pytest.param(["ip link set flannel.1 mtu 1400"], ["link flannel.1"], id="a changed MTU"),
    pytest.param(["ip link set flannel.1 type vxlan learning"], ["link flannel.1"], id="learning turned on"),
    pytest.param(
        ["ip link del flannel.1", "ip link add flannel.1 type dummy", "ip link set flannel.1 up"],
        ["link flannel.1"],
        id="a device of another kind",
    ),
    pytest.param(
        [
            "ip link del flannel.1",
            "ip link add flannel.1 type vxlan id 2 dev eth0 local 198.18.0.1 dstport 8472",
        ],
        ["link flannel.1"],
        id="a device of another segment",
    ),
    pytest.param(
        [
            "ip route flush dev flannel.1",
            "ip neigh flush dev flannel.1 nud permanent",
            "bridge fdb del {mac} dev flannel.1",
            "ip address flush dev flannel.1 scope global",
        ],
        ["route {subnet}", "neigh {base}", "fdb {mac}", "address {own}/32"],
        id="everything flushed",
    ),
]


def connect(one: Node, other: Node) -> None:
    one.container().wait_for_reply(other.container())


def names(lab: Lab, node: Node, peer: Node) -> dict[str, str]:
    """What the commands and log lines in the tables above stand for."""
    return {
        "subnet": peer.subnet(),
        "base": peer.subnet().removesuffix("/24"),
        "own": node.subnet().removesuffix("/24"),
        "mac": (peer.link("flannel.1") or {}).get("address", ""),
        "gateway": lab.etcd.address,
    }


def state(node: Node) -> dict[str, Any]:
    """What the kernel holds, whichever number a device that was made anew has got."""
    state = node.kernel_state("flannel.1", "eth0")
    for device in state.values():
        (device["link"] or {}).pop("ifindex", None)
        (device["link"] or {}).pop("link_index", None)
    return state


def damage(node: Node, commands: list[str]) -> None:
    """Do all of it before the daemon can answer, and see that it is not without effect."""
    before = state(node)
    with node.paused():
        for command in commands:
            node.run(*command.split())
        assert state(node) != before


def wait_for_log(node: Node, *texts: str) -> None:
    for text in texts:
        wait_for(lambda text=text: text in node.log(), SOON, f"the log to name {text}:\n{node.log()}")


def check_healing(lab: Lab, backend: dict[str, Any], commands: list[str], healed: list[str]) -> None:
    node, peer = lab.cluster(backend)
    connect(node, peer)
    before = state(node)
    words = names(lab, node, peer)
    damage(node, [command.format(**words) for command in commands])
    wait_for(lambda: state(node) == before, SOON, "the kernel to be as it was")
    wait_for_log(node, *(f"Healed: {what.format(**words)}" for what in healed))
    with node.changes() as changes:
        assert changes.during(QUIET) == []
    connect(node, peer)


@pytest.mark.parametrize(("commands", "healed"), ANY_BACKEND)
def test_the_way_to_a_peer_heals(
    lab: Lab, backend: dict[str, Any], commands: list[str], healed: list[str]
) -> None:
    check_healing(lab, backend, commands, healed)


@pytest.mark.parametrize(("commands", "healed"), VXLAN)
def test_the_tunnel_heals(lab: Lab, commands: list[str], healed: list[str]) -> None:
    check_healing(lab, {"Type": "vxlan"}, commands, healed)
