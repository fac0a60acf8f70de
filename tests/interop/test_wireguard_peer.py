"""WireGuard together with another daemon that keeps its leases in etcd's v3 API, in each mode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from flanneld.backends.wireguard.mesh import NAT_KEEPALIVE
from tests.lab import Lab, Node, own_command, peer_command, wait_for
from tests.lab.lab import NETWORK
from tests.netns.pair import DUAL_STACK, connect
from tests.netns.test_mesh import RESTRICTED, Site, sessions

OURS, THEIRS = own_command(), peer_command("v3")

pytestmark = [
    pytest.mark.needs_kernel("wireguard"),
    pytest.mark.parametrize("api", ["v3"]),
]
WIREGUARD = {"Type": "wireguard", "PSK": "ZmxhbmVsZCBwcmUtc2hhcmVkIGtleSBmb3IgdGVzdHM="}


def start(node: Node, command: list[str]) -> None:
    assert command, "set FLANNELD_PEER_V3 to the other daemon's command"
    node.start(command=command, environment={"WIREGUARD_KEY_FILE": str(node.directory / "wgkey")})
    node.wait_ready()


def mixed(lab: Lab, commands: list[list[str]], **config: Any) -> list[Node]:
    lab.etcd.put_config({"Network": NETWORK, **config})
    nodes = lab.add_nodes(len(commands))
    for node, command in zip(nodes, commands, strict=True):
        start(node, command)
    for node in nodes:
        for other in nodes:
            connect(node, other)
    return nodes


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours-first", "theirs-first"])
@pytest.mark.parametrize(
    ("mode", "stack"),
    [
        *((mode, DUAL_STACK) for mode in ("separate", "auto", "ipv4", "ipv6")),
        *((mode, {}) for mode in ("separate", "auto", "ipv4")),
    ],
)
def test_nodes_of_both_reach_each_other(
    lab: Lab, mode: str, stack: dict[str, Any], order: tuple[list[str], list[str]]
) -> None:
    mixed(lab, list(order), Backend={**WIREGUARD, "Mode": mode}, **stack)


def announced(lab: Lab, node: Node) -> str:
    """Return a lease's value, but for what differs from node to node. Before 0.26.6 Go announced no port."""
    value: str = lab.etcd.lease_values()[node.subnet()]
    key: str = lab.etcd.leases()[node.subnet()]["BackendData"]["PublicKey"]
    return value.replace(key, "KEY").replace(node.address, "IP").replace('"KEY"}', '"KEY","Port":51820}')


def test_both_write_the_same(lab: Lab) -> None:
    ours, theirs = mixed(lab, [OURS, THEIRS], Backend=WIREGUARD)
    assert announced(lab, ours) == announced(lab, theirs)


def test_one_node_changes_hands_and_keeps_its_key(lab: Lab) -> None:
    node, peer = mixed(lab, [OURS, OURS], Backend=WIREGUARD)
    subnet, lease = node.subnet(), lab.etcd.leases()[node.subnet()]
    for command in (THEIRS, OURS):
        node.stop()
        start(node, command)
        assert node.subnet() == subnet
        assert lab.etcd.leases()[subnet]["BackendData"]["PublicKey"] == lease["BackendData"]["PublicKey"]
        connect(node, peer)
        connect(peer, node)
    wait_for(lambda: lab.etcd.leases()[subnet] == lease, what="the lease to be as before")


@pytest.mark.parametrize(("kind", "also"), [("wireguard", "vxlan"), ("vxlan", "wireguard")])
def test_the_other_daemon_ignores_a_second_backend(lab: Lab, kind: str, also: str) -> None:
    """Neither our lease nor the network config keeps it from its work; it stays where it was."""
    backends: dict[str, dict[str, str]] = {"wireguard": WIREGUARD, "vxlan": {"Type": "vxlan"}}
    (theirs,) = mixed(lab, [THEIRS], Backend=backends[kind])
    ours, later = mixed(lab, [OURS, THEIRS], Backend={**backends[kind], "Also": backends[also]})
    assert lab.etcd.leases()[ours.subnet()]["BackendData"]["Also"]["Type"] == also
    for one, other in itertools.permutations((theirs, ours, later), 2):
        connect(one, other)


#: Seconds: a session with traffic is renewed after 120 s (REKEY_AFTER_TIME), and by nothing else before.
RENEWAL = 115
#: Bytes of a handshake initiation.
INITIATION = 148


def test_a_mesh_reaches_the_other_daemon_and_leaves_its_sessions_alone(lab: Lab) -> None:
    """A node behind NAT reaches it, too; meanwhile a node that has died is searched for in vain."""
    lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "wireguard", "Mesh": True}})
    ours, hidden, theirs, dead = nodes = lab.add_nodes(4)
    Site(lab, 1, RESTRICTED).take(hidden)
    for node in nodes:
        start(node, THEIRS if node is theirs else OURS)
    dead.kill()
    dead.namespace.ip("link set eth0 down")
    for one, other in itertools.permutations((ours, hidden, theirs), 2):
        connect(one, other)

    def handshakes() -> list[tuple[float, object]]:
        pairs = ((ours, theirs), (theirs, ours), (hidden, theirs), (theirs, hidden))
        found = [sessions(one)[other.subnet()] for one, other in pairs]
        return [(each.last_handshake, each.endpoint) for each in found]

    def sent() -> int:
        return min(sessions(each)[dead.subnet()].tx_bytes for each in (ours, hidden))

    before, tried = handshakes(), sent()
    with ours.container().ping(theirs.container()) as ping:
        wait_for(lambda: sent() >= tried + 4 * INITIATION, 120, "four attempts to reach the dead node")
        ping.wait_for_replies()
        ping.stop()
    assert ping.lost() == 0
    for (was, at), (now, there) in zip(before, handshakes(), strict=True):
        assert there == at
        assert now == was or now - was >= RENEWAL
    assert [sessions(each)[theirs.subnet()].keepalive for each in (ours, hidden)] == [0, NAT_KEEPALIVE]
    assert all("endpoints" not in str(each) for each in lab.etcd.leases().values())
    ours.stop()
    start(ours, OURS)
    theirs.stop()
    start(theirs, THEIRS)
    for one, other in itertools.permutations((ours, hidden, theirs), 2):
        connect(one, other)
