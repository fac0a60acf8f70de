"""A network of two daemons: nodes of each, and one node's daemon replaced while packets flow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from tests.lab import Lab, Node, Ping, wait_for
from tests.lab.etcd import TTL
from tests.netns.pair import connect

DEVICES = ("flannel.1", "flannel-v6.1", "flannel.ipip", "eth0")
STRAY = {4: "10.5.0.0/24", 6: "fc00:5::/64"}  # No daemon leases the first subnet of a network.

PAUSE, TIMES = 0.5, 40


def mixed(lab: Lab, backend: dict[str, Any], *commands: Sequence[str], **config: Any) -> list[Node]:
    """A node for each command, all of them connected."""
    assert all(commands), "set FLANNELD_PEER or FLANNELD_PEER_V3 to the other daemon's command"
    nodes = [lab.cluster(backend, nodes=1, command=command, **config)[0] for command in commands]
    if lab.etcd.api == "v3" and len(nodes) > 1:
        _again_and_again(partial(_tell_of_leases, lab), partial(_are_connected, nodes), "all to be connected")
    for node in nodes:
        for other in nodes:
            connect(node, other)
    return nodes


def _tell_of_leases(lab: Lab) -> None:
    """Write each lease again, for less time than a node does: ours would yield its new lease to that node."""
    for name, attributes in lab.etcd.leases().items():
        lab.etcd.put_lease(name, attributes, ttl=TTL // 2)


def _are_connected(nodes: Sequence[Node]) -> bool:
    targets = [target for node in nodes for target in node.container().addresses.values()]
    return all(node.container().reaches(target, 0.5) for node in nodes for target in targets)


def own_part(node: Node) -> dict[str, Any]:
    """What a node must not lose when its daemon changes; route protocol numbers are each daemon's own."""
    state = node.kernel_state(*DEVICES)
    for device in state.values():
        for route in [*device["routes-4"], *device["routes-6"]]:
            route.pop("protocol", None)
    env = node.env()
    if link := state["flannel-v6.1"]["link"]:
        # Go's daemons forget that IPv6's header is 20 bytes longer.
        link.pop("mtu")
        env.pop("FLANNEL_MTU")
    return {"env": env, "kernel": state}


def replace_daemons(lab: Lab, node: Node, peer: Node, commands: Sequence[Sequence[str]]) -> None:
    """One after the other takes the node over; see that no packet is lost and that nothing is different."""
    before = own_part(node)
    with ExitStack() as stack:
        pings = [stack.enter_context(ping) for ping in (*_pings(node, peer), *_pings(peer, node))]
        for command in commands:
            node.kill()
            _wait_for_replies(pings)
            node.start(command=command)
            node.wait_ready(20)
            _wait_until_peers_are_read(lab, node, peer)
            wait_until_it_is(before, node)
            _wait_for_replies(pings)
        assert [ping.lost() for ping in pings] == [0] * len(pings)


def wait_until_it_is(before: dict[str, Any], node: Node) -> None:
    """Wait for a node to be as it was."""
    with suppress(AssertionError):
        wait_for(lambda: own_part(node) == before)
    assert own_part(node) == before


def _pings(node: Node, other: Node) -> list[Ping]:
    return [node.container().ping(target) for target in other.container().addresses.values()]


def _wait_for_replies(pings: Sequence[Ping]) -> None:
    for ping in pings:
        ping.wait_for_replies(deadline=20)


def _wait_until_peers_are_read(lab: Lab, node: Node, peer: Node) -> None:
    """A lease that comes and goes, much like the peer's, shows that the daemon has read all others."""
    families = list(peer.container().addresses)
    leases = lab.etcd.leases()
    (known,) = (name for name in leases if peer.subnet(families[-1]) in name)
    stray = known
    for family in families:
        stray = stray.replace(peer.subnet(family), STRAY[family])
    newcomer = _newcomer(leases[known])

    def come() -> None:
        lab.etcd.put_lease(stray, newcomer)

    def go() -> None:
        if stray not in lab.etcd.leases():
            come()
            time.sleep(PAUSE)
        lab.etcd.delete_lease(stray)

    _again_and_again(come, lambda: _strays(node) == set(families), f"the routes to {stray}")
    _again_and_again(go, lambda: not _strays(node), f"the routes to {stray} to go")


def _again_and_again(act: Callable[[], None], reached: Callable[[], bool], what: str) -> None:
    """Go's v0.20 hears one event of etcd's v3 API, and none until it asks for the next."""
    for _ in range(TIMES):
        act()
        with suppress(AssertionError):
            wait_for(reached, PAUSE)
            return
    raise AssertionError(f"waited in vain for {what}")


def _newcomer(attributes: dict[str, Any]) -> dict[str, Any]:
    """What a node of the same kind would announce."""
    changes: dict[str, Any] = {"PublicIP": "198.18.0.200", "PublicIPv6": "fd00:18::c8"}
    for number, data in enumerate(("BackendData", "BackendV6Data")):
        if data in attributes:
            changes[data] = attributes[data] | {"VtepMAC": f"02:00:00:00:{number:02x}:c8"}
    return attributes | {name: value for name, value in changes.items() if attributes.get(name)}


def _strays(node: Node) -> set[int]:
    """The families in which there is a route to the subnet that is made up."""
    return {
        family
        for family, subnet in STRAY.items()
        if any(route["dst"] == subnet for route in node.routes(family=family))
    }
