"""The wall clock jumps by hours while the daemon runs: nothing that it does goes by that clock."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import Lab, Node, wait_for
from tests.lab.etcd import TTL
from tests.netns.apis import both_apis
from tests.netns.kube import start as start_with_kube
from tests.netns.kube import write_net_conf
from tests.netns.strangers import ABOVE_STRANGERS, PATIENT, Stranger, settle, wait_for_just
from tests.netns.test_seeing import answer
from tests.netns.wall_clock import WallClock

VXLAN = {"Type": "vxlan"}
HOUR = 3600
#: So far ahead of the right time, one after the other, in seconds.
JUMPS = (2 * HOUR, -2 * HOUR, 0)
#: A renewal is due so long before the end of a lease.
MARGIN = HOUR
#: Lines about one peer that comes, is damaged and goes, and some more.
WORDS = 10
READ_CLOCKS = "import json, time; print(json.dumps([time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)]))"


def check_clock(node: Node, clock: WallClock, ahead: int) -> None:
    """See that the daemon itself has the wrong time, and that only the wall clock is wrong."""
    told = answer(node, "status")["time"]
    assert told - time.time() == pytest.approx(ahead, abs=HOUR / 4)
    read = [sys.executable, "-c", READ_CLOCKS]
    done = subprocess.run(read, env=clock.environment, capture_output=True, check=True, text=True)
    wall, boot = json.loads(done.stdout)
    assert wall - time.time() == pytest.approx(ahead, abs=HOUR / 4)
    assert boot - time.clock_gettime(time.CLOCK_BOOTTIME) == pytest.approx(0, abs=HOUR / 4)


@both_apis
def test_no_jump_of_the_clock_costs_a_packet_a_lease_or_many_words(lab: Lab, tmp_path: Path) -> None:
    lab.etcd.put_config({"Network": "10.5.0.0/16", "Backend": VXLAN, **ABOVE_STRANGERS})
    node, peer = lab.add_nodes(2)
    clock = WallClock(tmp_path)
    node.start(environment=clock.environment)
    peer.start()
    settle(node, peer)
    # Due in half an hour by the clock that runs on, and overdue by the one that is two hours ahead.
    own = lab.etcd.leases()[node.subnet()]
    written = lab.etcd.put_lease(node.subnet(), own, ttl=MARGIN + HOUR // 2)
    said = len(node.log().splitlines())
    with node.container().ping(peer.container()) as ping:
        for ahead in JUMPS:
            clock.put(ahead)
            check_clock(node, clock, ahead)
            check_work(lab, node, Stranger(7))
        assert (lab.etcd.lease(node.subnet()) or {})["modifiedIndex"] == written
        clock.put(-2 * HOUR)
        lab.etcd.put_lease(node.subnet(), own, ttl=MARGIN + 3)
        wait_for(lambda: (lab.etcd.lease(node.subnet()) or {})["ttl"] > TTL - HOUR, PATIENT, "a full term")
        clock.put(2 * HOUR)
        check_work(lab, node, Stranger(8))
        assert ping.lost() == 0
    assert len(node.wait_for_log("Lease renewed, new expiration: ")) == 1
    assert answer(node, "status")["health"]["late"] == []
    assert len(node.log().splitlines()) - said < WORDS * (len(JUMPS) + 2)


def check_work(lab: Lab, node: Node, stranger: Stranger) -> None:
    """See that a peer that comes is led to, that damage is repaired, and that a peer can go."""
    stranger.come(lab)
    wait_for_just(node, [stranger])
    stranger.damage(node)
    wait_for_just(node, [stranger])
    stranger.go(lab)
    wait_for_just(node, [])


def test_with_kubernetes_a_clock_that_jumps_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    write_net_conf(lab, VXLAN)
    node, peer = lab.add_nodes(2)
    clock = WallClock(tmp_path)
    for each, environment in ((node, clock.environment), (peer, {})):
        lab.kube.add(each, f"10.5.{100 + each.number}.0/24")
        start_with_kube(lab, each, environment={"NODE_NAME": each.name, **environment})
    settle(node, peer)
    said = len(node.log().splitlines())
    stranger = Stranger(50)
    with node.container().ping(peer.container()) as ping:
        for ahead in JUMPS:
            clock.put(ahead)
            check_clock(node, clock, ahead)
            told = stranger.attributes
            lab.kube.control.put_peer(
                "stranger", stranger.subnet, told["PublicIP"], "vxlan", told["BackendData"]
            )
            wait_for_just(node, [stranger])
            stranger.damage(node)
            wait_for_just(node, [stranger])
            lab.kube.control.delete_node("stranger")
            wait_for_just(node, [])
        assert ping.lost() == 0
    assert len(node.log().splitlines()) - said < WORDS * len(JUMPS)
