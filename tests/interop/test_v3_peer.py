"""Together with another daemon that keeps its leases in etcd's v3 API, in either family and in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.interop.crowd import swap_after_them, swap_both_ways
from tests.interop.mixed import mixed, own_part, replace_daemons, wait_until_it_is
from tests.lab import Lab, Node, own_command, peer_command
from tests.netns.pair import DUAL_STACK

OURS, THEIRS = own_command(), peer_command("v3")
IPV6_ONLY: dict[str, Any] = {**DUAL_STACK, "EnableIPv4": False}

pytestmark = pytest.mark.parametrize("api", ["v3"])
# Not IPv6 alone: Go's nodes look for their lease by PublicIP, which is 0.0.0.0 then, and take another's.
stacks = pytest.mark.parametrize("stack", [{}, DUAL_STACK], ids=["IPv4 only", "dual stack"])


@pytest.fixture(params=["vxlan", "host-gw"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Type": request.param}


@stacks
@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours-first", "theirs-first"])
def test_nodes_of_both_reach_each_other(
    lab: Lab, backend: dict[str, Any], stack: dict[str, Any], order: tuple[list[str], list[str]]
) -> None:
    mixed(lab, backend, *order, **stack)


@stacks
def test_both_write_the_same(lab: Lab, backend: dict[str, Any], stack: dict[str, Any]) -> None:
    """But for what differs from node to node: subnets, addresses and MACs."""
    ours, theirs = mixed(lab, backend, OURS, THEIRS, **stack)
    assert announced(lab, ours) == announced(lab, theirs)


def test_both_write_the_same_for_ipv6_alone(backend: dict[str, Any], api: str) -> None:
    """Each in a network of its own."""
    found = []
    for command in (OURS, THEIRS):
        with Lab(api=api) as lab:
            found.append(announced(lab, *mixed(lab, backend, command, **IPV6_ONLY)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "turns", [(OURS, THEIRS, OURS), (THEIRS, OURS, THEIRS)], ids=["from-ours", "from-theirs"]
)
def test_a_lone_node_with_ipv6_alone_stays_as_it_is(
    lab: Lab, backend: dict[str, Any], turns: tuple[list[str], ...]
) -> None:
    (node,) = mixed(lab, backend, turns[0], **IPV6_ONLY)
    before = own_part(node)
    for command in turns[1:]:
        node.kill()
        node.start(command=command)
        node.wait_ready(20)
        wait_until_it_is(before, node)


def announced(lab: Lab, node: Node) -> tuple[str, str]:
    """A node's key and value, without what is its own."""
    subnets = [node.subnet(family).replace("/", "-") for family in node.container().addresses]
    (found,) = (each for each in lab.etcd.children("subnets") if subnets[-1] in each["key"])
    macs = [link["address"] for device in ("flannel.1", "flannel-v6.1") if (link := node.link(device))]
    key, value = found["key"], found["value"]
    for number, own in enumerate([*subnets, node.address, node.ipv6_address, *macs]):
        key, value = key.replace(own, f"<{number}>"), value.replace(f'"{own}"', f"<{number}>")
    return key, value


@stacks
@pytest.mark.parametrize(
    "turns", [(OURS, THEIRS, OURS), (THEIRS, OURS, THEIRS)], ids=["from-ours", "from-theirs"]
)
def test_changing_the_daemon_on_a_live_node_loses_nothing(
    lab: Lab, backend: dict[str, Any], stack: dict[str, Any], turns: tuple[list[str], ...]
) -> None:
    node, peer = mixed(lab, backend, turns[0], turns[1], **stack)
    replace_daemons(lab, node, peer, turns[1:])


@stacks
def test_a_node_that_leaves_is_led_to_by_neither(
    lab: Lab, backend: dict[str, Any], stack: dict[str, Any]
) -> None:
    ours, theirs, gone = mixed(lab, backend, OURS, THEIRS, OURS, **stack)
    family, subnet = next((family, gone.subnet(family)) for family in gone.container().addresses)
    gone.stop()
    lab.etcd.delete_lease(next(name for name in lab.etcd.leases() if subnet in name))
    for node in (ours, theirs):
        node.wait_for_no_route(subnet, family=family)


def test_a_reservation_outlives_the_change_to_our_daemon(lab: Lab, backend: dict[str, Any]) -> None:
    """Go's v0.20 makes a lease of it again as soon as it hears of it: it is made while that is down."""
    (node,) = mixed(lab, backend, THEIRS)
    subnet = node.subnet()
    node.kill()
    lab.etcd.put_lease(subnet, lab.etcd.leases()[subnet], ttl=None)
    node.start()
    node.wait_ready(20)
    assert node.subnet() == subnet
    assert "ttl" not in (lab.etcd.lease(subnet) or {})


@pytest.mark.long
@pytest.mark.parametrize("swap", [swap_both_ways, swap_after_them])
def test_changing_the_daemon_among_thousands_of_peers_loses_and_leaves_nothing(
    lab: Lab, swap: Callable[..., None]
) -> None:
    swap(lab, THEIRS, hears_all=False)
