"""Each family, and both, on etcd's v3 API as a newer etcd serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.lab import Lab, Node, wait_for
from tests.local_etcd import NEWER
from tests.netns.pair import DEVICES, DUAL_STACK, connect

STACKS = [
    pytest.param({}, id="IPv4"),
    pytest.param(DUAL_STACK, id="dual stack"),
    pytest.param({**DUAL_STACK, "EnableIPv4": False}, id="IPv6 only"),
]
SOON = 20.0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(api="v3", program=NEWER) as lab:
        yield lab


@contextmanager
def no_packet_lost(one: Node, other: Node) -> Iterator[None]:
    """In no family."""
    with ExitStack() as stack:
        targets = other.container().addresses.values()
        pings = [stack.enter_context(one.container().ping(target)) for target in targets]
        yield
        for ping in pings:
            ping.wait_for_replies(deadline=SOON)
            assert ping.lost() == 0


def traces(node: Node, addresses: set[str]) -> list[str]:
    """What of a peer's subnets and addresses is in the kernel of another node."""
    found = str([node.kernel_state(device) for device in DEVICES])
    return [address for address in addresses if f"'{address}'" in found]


@pytest.mark.parametrize(
    "backend",
    [{"Type": "vxlan"}, pytest.param({"Type": "host-gw"}, marks=pytest.mark.long)],
    ids=["vxlan", "host-gw"],
)
@pytest.mark.parametrize("stack", STACKS)
def test_nodes_join_restart_outlive_etcd_and_leave(
    lab: Lab, backend: dict[str, Any], stack: dict[str, Any]
) -> None:
    first, second, third = nodes = lab.cluster(backend, nodes=3, **stack)
    for one in nodes:
        for other in nodes:
            if one is not other:
                connect(one, other)
    before, env = first.kernel_state(*DEVICES), first.env()
    own = (third.address, third.ipv6_address)
    lease = next(
        key
        for key, value in lab.etcd.leases().items()
        if value.get("PublicIP") in own or value.get("PublicIPv6") in own
    )
    with no_packet_lost(first, second):
        first.kill()
        first.start()
        assert first.wait_ready(SOON) == env
        first.wait_for_log("In sync with", SOON)
        assert first.kernel_state(*DEVICES) == before
        third.stop()
        lab.etcd.kill()
        wait_for(lambda: "does not answer" in first.log(), SOON, "the daemon to notice")
        lab.etcd.start()
        lab.etcd.delete_lease(lease)
        there = {*own, *lease.split("&")}
        wait_for(lambda: not traces(first, there), SOON, "the leaving node's traces to go")
    connect(second, first)
