"""The removal guard, on a real store and a real kernel."""

from __future__ import annotations

import re

import pytest

from flanneld.state.permits import HOLD
from tests.lab import Lab, Node, wait_for
from tests.netns.test_seeing import answer
from tests.netns.test_store import host_gw, overlay_routes, stopped

PEERS = range(1, 13)
WAYS = {f"10.5.{number}.0/24": f"198.18.0.{200 + number}" for number in PEERS}
LEFT = {subnet: gateway for subnet, gateway in WAYS.items() if subnet in ("10.5.1.0/24", "10.5.2.0/24")}
READ_AGAIN = "relisting in 30 s"
#: The list may be the first to tell of the one that is new.
MOST_ARE_GONE = re.compile("10 of 1[23] peers are gone")


def put_all(lab: Lab) -> None:
    for number, subnet in zip(PEERS, WAYS, strict=True):
        lab.etcd.put_lease(subnet, host_gw(200 + number))


def lose_most(lab: Lab) -> None:
    for subnet in WAYS:
        if subnet not in LEFT:
            lab.etcd.delete_lease(subnet)


@pytest.fixture
def api() -> str:
    """In v3 a daemon that was stopped still hears all that etcd has sent it, however much."""
    return "v2"


@pytest.fixture
def node(lab: Lab) -> Node:
    """A node that leads to a dozen peers."""
    (node,) = lab.cluster({"Type": "host-gw"}, nodes=1, SubnetMin="10.5.100.0")
    put_all(lab)
    wait_for_ways(node, WAYS)
    # One poll after the other may have caught up: a stopped daemon hears only what a stream has sent it.
    wait_for(lambda: lab.etcd.watches() == 2, what="the streams of all leases and of its own")
    return node


def wait_for_ways(node: Node, ways: dict[str, str], deadline: float = 20) -> None:
    wait_for(lambda: overlay_routes(node) == ways, deadline, f"{ways}")


def outrun(lab: Lab, node: Node) -> None:
    """Let the daemon learn from a list, and not from its watch, that most leases are gone.

    One change more comes before: it is on its way already.
    """
    with stopped(lab, node):
        lab.etcd.put_lease("10.5.50.0/24", host_gw(250))
        lab.etcd.drop_streams()
        lose_most(lab)
        lab.etcd.put_often("/unrelated", 2000)


def test_a_list_that_lacks_most_peers_cuts_nobody_off(lab: Lab, node: Node) -> None:
    outrun(lab, node)
    (line,) = node.wait_for_log(READ_AGAIN)
    assert MOST_ARE_GONE.search(line)
    wait_for_ways(node, {**WAYS, "10.5.50.0/24": "198.18.0.250"})
    put_all(lab)
    lab.etcd.delete_lease("10.5.50.0/24")
    wait_for_ways(node, WAYS)


def test_held_removals_are_reported_and_counted(lab: Lab, node: Node) -> None:
    outrun(lab, node)
    node.wait_for_log(READ_AGAIN)
    told = answer(node, "status")
    assert told["removal_guard"] == {"holds": True, "number": 1}
    (held,) = [each for each in told["health"]["conditions"] if each["part"] == "removals"]
    assert MOST_ARE_GONE.search(held["problem"])


def test_removals_that_a_stopped_daemon_was_sent_are_not_held(lab: Lab, node: Node) -> None:
    with stopped(lab, node):
        lose_most(lab)
        lab.etcd.put_often("/unrelated", 2000)
    wait_for_ways(node, LEFT)
    assert READ_AGAIN not in node.log()


def test_leases_that_go_one_by_one_are_not_held(lab: Lab, node: Node) -> None:
    lose_most(lab)
    wait_for_ways(node, LEFT)
    assert READ_AGAIN not in node.log()


def test_a_start_with_a_list_that_lacks_most_peers_sweeps_nothing(lab: Lab, node: Node) -> None:
    node.stop()
    lose_most(lab)
    node.start()
    (line,) = node.wait_for_log(READ_AGAIN)
    assert "10 of 12 routes lead to peers that are not in the list" in line
    node.wait_for_log("In sync with 2 peers")
    assert overlay_routes(node) == WAYS


def test_the_brake_can_be_switched_off(lab: Lab, node: Node) -> None:
    node.stop()
    lose_most(lab)
    node.start("--removal-guard=false")
    wait_for_ways(node, LEFT)


@pytest.mark.long
@pytest.mark.parametrize("restart", [False, True])
def test_peers_missing_from_the_second_list_are_removed(lab: Lab, node: Node, restart: bool) -> None:
    if restart:
        node.stop()
        lose_most(lab)
        node.start()
    else:
        outrun(lab, node)
    node.wait_for_log(READ_AGAIN)
    wait_for_ways(node, LEFT if restart else {**LEFT, "10.5.50.0/24": "198.18.0.250"}, HOLD + 10)
    assert len(node.wait_for_log("Removals resumed: the leases were relisted")) == 1
