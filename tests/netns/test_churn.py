"""What the daemon holds while leases come and go and somebody damages what they led to, again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

import pytest

from tests.bench.process import rss_mib
from tests.lab import Lab, Node, wait_for
from tests.netns.apis import both_apis

#: What comes and goes at a time. The real nodes' subnets are above.
NUMBERS = range(10, 18)
SUBNETS = [f"10.5.{number}.0/24" for number in NUMBERS]
DAMAGE = [
    *(f"route del {subnet}" for subnet in SUBNETS[:4]),
    *(f"neigh del {subnet[:-3]} dev flannel.1" for subnet in SUBNETS[4:]),
]
EVENTS = 2 * len(SUBNETS)

#: Of the memory that an event costs for good, in bytes: no object of Python's is smaller.
NOTHING = 16
MIB = 1 << 20
#: Between two rounds, in seconds: half an hour need not be one of full load.
PAUSE = 0.8


class Held(NamedTuple):
    """Threads and file descriptors of a process."""

    threads: int
    descriptors: int

    @classmethod
    def by(cls, pid: int) -> Held:
        process = Path(f"/proc/{pid}")
        return cls(len([*(process / "task").iterdir()]), len([*(process / "fd").iterdir()]))


def churn(lab: Lab, node: Node) -> None:
    """Let peers come, damage what leads to them, see it healed, and let them go."""

    def are_known() -> bool:
        there = {route["dst"] for route in node.routes("flannel.1")}
        named = {entry["dst"] for entry in node.neighbors("flannel.1")}
        return there.issuperset(SUBNETS) and named.issuperset(subnet[:-3] for subnet in SUBNETS)

    for number, subnet in zip(NUMBERS, SUBNETS, strict=True):
        data = {"VtepMAC": f"02:00:00:00:00:{number:02x}"}
        peer = {"PublicIP": f"198.18.0.{number}", "BackendType": "vxlan", "BackendData": data}
        lab.etcd.put_lease(subnet, peer)
    wait_for(are_known, what="the peers")
    node.namespace.ip(*DAMAGE)
    wait_for(are_known, what="the repair")
    for subnet in SUBNETS:
        lab.etcd.delete_lease(subnet)
    node.wait_for_no_route(SUBNETS[-1], 20)


@pytest.fixture
def nodes(lab: Lab) -> tuple[Node, Node]:
    """Two that reach each other, and do nothing any more."""
    node, peer = lab.cluster({"Type": "vxlan"}, SubnetMin="10.5.100.0")
    node.container().wait_for_reply(peer.container())
    node.wait_for_log("rules with")
    return node, peer


@both_apis
def test_churn_leaves_no_thread_and_no_descriptor_behind(lab: Lab, nodes: tuple[Node, Node]) -> None:
    node, peer = nodes
    churn(lab, node)
    before = Held.by(node.pid)
    with node.container().ping(peer.container()) as ping:
        for _ in range(20):
            churn(lab, node)
        assert ping.lost() == 0
    wait_for(lambda: Held.by(node.pid) == before, what=f"{before} again")
    wait_for(lambda: node.log().count("Healed: ") >= 20 * len(DAMAGE), what="all repairs in the log")


@pytest.mark.long
@pytest.mark.parametrize("api", ["v3"])
def test_half_an_hour_of_churn_costs_no_memory(lab: Lab, nodes: tuple[Node, Node]) -> None:
    """etcd is started anew every now and then, as connections are what leaks most easily."""
    node, peer = nodes
    churn(lab, node)
    before = Held.by(node.pid)
    with node.container().ping(peer.container(), interval=0.05) as ping:
        samples = [*history(lab, node, 1800)]
        assert ping.lost() == 0
    wait_for(lambda: Held.by(node.pid) == before, what=f"{before} again")
    settled = samples[len(samples) // 3 :]
    slope, _ = linear_regression(*zip(*settled, strict=True))
    summary = f"{settled[-1][0]} events, {slope:.1f} bytes each, {settled[-1][1] / MIB:.1f} MiB in the end"
    print(summary, before)
    assert slope < NOTHING, f"{summary}: {samples}"


def history(lab: Lab, node: Node, seconds: float) -> Iterator[tuple[int, float]]:
    """Churn for so long; so many events have happened and so many bytes are resident after each round."""
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        churn(lab, node)
        rounds += 1
        yield rounds * EVENTS, rss_mib(node.pid)[0] * MIB
        if rounds % 100 == 0:
            lab.etcd.restart()
        time.sleep(PAUSE)
