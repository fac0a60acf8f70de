"""What the daemon holds while leases come and go and somebody damages what they led to, again and again."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

import pytest

from tests.bench.process import rss_mib
from tests.lab import Lab, Node, wait_for
from tests.lab.etcd import PREFIX
from tests.netns.apis import both_apis
from tests.netns.strangers import ABOVE_STRANGERS, PATIENT, Stranger, settle, wait_for_just
from tests.netns.test_seeing import flannelctl

#: What comes and goes at a time.
STRANGERS = [Stranger(number) for number in range(8)]
#: Comes when all others have gone.
LAST = Stranger(99)
EVENTS = 2 * len(STRANGERS)
#: So often in a round they come and go without being waited for.
BURST = 40
#: The repairs that a round calls for: each stranger is led to by a route, an ARP entry and an FDB entry.
REPAIRS = 3 * len(STRANGERS[:2])

#: Bytes for good for each event that are no leak but noise: an object with anything in it is larger.
NOISE = 32
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

    def wait_for_no_more(self, pid: int) -> None:
        """Wait until a process holds no more than this of either; for a moment it may."""

        def is_met() -> bool:
            now = Held.by(pid)
            return now.threads <= self.threads and now.descriptors <= self.descriptors

        wait_for(is_met, PATIENT, f"no more than {self}; there is {Held.by(pid)}")


def churn(lab: Lab, node: Node) -> None:
    """Let peers come, damage what leads to them, see it healed, and let them go."""
    for each in STRANGERS:
        each.come(lab)
    wait_for_just(node, STRANGERS)
    for each in STRANGERS[:2]:
        each.damage(node)
    wait_for_just(node, STRANGERS)
    for each in STRANGERS:
        each.go(lab)
    wait_for_just(node, [])


def burst(lab: Lab, node: Node) -> None:
    """Let the same peers come and go again and again, all at once, and wait for the end of it only."""
    path = f"{PREFIX}/subnets"
    keys = {f"{path}/{each.subnet.replace('/', '-')}": json.dumps(each.attributes) for each in STRANGERS}
    for _ in range(BURST):
        lab.etcd.v3.put_all(keys)
        lab.etcd.v3.delete_span(min(keys), max(keys) + "0")
    LAST.come(lab)
    wait_for_just(node, [LAST])
    LAST.go(lab)
    wait_for_just(node, [])


@pytest.fixture
def nodes(lab: Lab) -> tuple[Node, Node]:
    """Two that reach each other, and do nothing any more."""
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}, **ABOVE_STRANGERS})
    node, peer = lab.add_nodes(2)
    node.start()
    peer.start()
    settle(node, peer)
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
    before.wait_for_no_more(node.pid)
    wait_for(lambda: repairs(node) >= 20 * REPAIRS, PATIENT, "all repairs to be counted")


def repairs(node: Node) -> int:
    status = json.loads(flannelctl(node, "status", "--output=json").stdout)
    return sum(each["number"] for each in status["repairs"])


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
    before.wait_for_no_more(node.pid)
    settled = samples[len(samples) // 3 :]
    slope, _ = linear_regression(*zip(*settled, strict=True))
    summary = f"{settled[-1][0]} events, {slope:.1f} bytes each, {settled[-1][1] / MIB:.1f} MiB in the end"
    print(summary, before)
    assert slope < NOISE, f"{summary}: {samples}"


def history(lab: Lab, node: Node, seconds: float) -> Iterator[tuple[int, float]]:
    """Churn for so long; so many events have happened and so many bytes are resident after each round."""
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        churn(lab, node)
        burst(lab, node)
        rounds += 1
        yield rounds * (1 + BURST) * EVENTS, rss_mib(node.pid)[0] * MIB
        if rounds % 100 == 0:
            lab.etcd.restart(signal.SIGKILL)
        time.sleep(PAUSE)
