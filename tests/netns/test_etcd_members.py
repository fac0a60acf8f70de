"""Of three members of etcd the one that leads fails while leases come and go: no packet is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab import Lab, Node, own_command, wait_for
from tests.lab.lab import NETWORK
from tests.lab.members import Member, Members
from tests.netns.apis import both_apis, v2_if_long

HOST_GW = {"Type": "host-gw"}
#: Seconds until a daemon gives up a silent member, and more: in v3 half a minute, in v2 a poll of a minute.
NOTICED = {"v2": 100.0, "v3": 60.0}
SOON = 30.0


@pytest.fixture
def members(lab: Lab, api: str) -> Iterator[Members]:
    with Members(lab, api) as members:
        members.write(
            lambda member: member.put_config(
                {"Network": NETWORK, "SubnetMin": "10.5.100.0", "Backend": HOST_GW}
            )
        )
        yield members


def start(lab: Lab, members: Members, number: int) -> list[Node]:
    nodes = lab.add_nodes(number)
    for node in nodes:
        # Their start costs seconds of processor time, which others need more.
        node.start(f"-etcd-endpoints={members.urls}", command=["nice", *own_command()])
    return nodes


def pair(lab: Lab, members: Members) -> tuple[Node, Node]:
    first, second = start(lab, members, 2)
    for node in (first, second):
        node.wait_ready(SOON)
    return first, second


@contextmanager
def no_packet_lost(one: Node, other: Node) -> Iterator[None]:
    one.container().wait_for_reply(other.container(), SOON)
    with one.container().ping(other.container()) as ping:
        yield
        ping.wait_for_replies(deadline=SOON)
        assert ping.lost() == 0


def put_peers(members: Members, *numbers: int, but: Member | None = None) -> None:
    for number in numbers:
        attributes = {"PublicIP": f"198.18.0.{number}", "BackendType": "host-gw"}
        members.write(lambda member: member.put_lease(f"10.5.{number}.0/24", attributes), but=but)  # noqa: B023


def check_known(nodes: list[Node], *numbers: int, deadline: float = SOON) -> None:
    """Each node leads to these peers and to the other nodes."""
    peers = {f"10.5.{number}.0/24" for number in numbers} | {node.subnet() for node in nodes}
    for node in nodes:
        wanted = peers - {node.subnet()}
        wait_for(lambda: known(node) == wanted, deadline, f"{wanted} on {node.name}")  # noqa: B023


def known(node: Node) -> set[str]:
    return {row["dst"] for row in node.routes("eth0") if row["dst"].startswith("10.5.")}


@v2_if_long
@pytest.mark.parametrize("joining", [3, pytest.param(30, marks=pytest.mark.long)])
def test_the_leader_is_killed_while_nodes_join(lab: Lab, members: Members, joining: int) -> None:
    first, second = pair(lab, members)
    with no_packet_lost(first, second):
        nodes = start(lab, members, joining)
        wait_for(lambda: len(known(first)) >= 2, SOON, "the first to join")
        dying = members.leader()
        dying.kill()
        put_peers(members, 1, 2, but=dying)
        for node in nodes:
            node.wait_ready(2 * SOON)
        nodes = [first, second, *nodes]
        assert len({node.subnet() for node in nodes}) == len(nodes)
        check_known(nodes, 1, 2, deadline=2 * SOON)
        members.restart(dying)
        put_peers(members, 3)
        check_known(nodes, 1, 2, 3)


def lead_from(members: Members, node: Node) -> Member:
    """Make the member that a daemon listens to the leader."""
    (used,) = wait_for(lambda: members.used_by(node), SOON, "a connection to a member")[:1]
    members.make_leader(used)
    return used


@v2_if_long
def test_the_leader_is_cut_off_from_the_others_and_not_from_the_daemons(
    lab: Lab, members: Members, api: str
) -> None:
    first, second = pair(lab, members)
    with no_packet_lost(first, second):
        leader = lead_from(members, first)
        with leader.severed(members.others(leader)):
            put_peers(members, 1, 2, but=leader)
            check_known([first, second], 1, 2, deadline=NOTICED[api])
        put_peers(members, 3)
        check_known([first, second], 1, 2, 3)


@pytest.mark.long
@both_apis
def test_the_leader_is_cut_off_from_everybody(lab: Lab, members: Members, api: str) -> None:
    first, second = pair(lab, members)
    with no_packet_lost(first, second):
        leader = lead_from(members, first)
        with lab.unplugged(leader.host):
            put_peers(members, 1, 2, but=leader)
            check_known([first, second], 1, 2, deadline=NOTICED[api])
            (third,) = start(lab, members, 1)
            third.wait_ready(SOON)
            check_known([first, second, third], 1, 2)
        put_peers(members, 3)
        check_known([first, second, third], 1, 2, 3)


@pytest.mark.long
@both_apis
def test_the_leader_hangs(lab: Lab, members: Members, api: str) -> None:
    first, second = pair(lab, members)
    with no_packet_lost(first, second):
        leader = lead_from(members, first)
        with leader.frozen():
            put_peers(members, 1, 2, but=leader)
            check_known([first, second], 1, 2, deadline=NOTICED[api])
        put_peers(members, 3)
        check_known([first, second], 1, 2, 3)


@contextmanager
def stuttering(member: Member) -> Iterator[None]:
    """As on a disk that takes most of a second for each write: it works for moments only."""
    over = threading.Event()

    def stutter() -> None:
        while not over.is_set():
            member.send_signal(signal.SIGSTOP)
            over.wait(0.6)
            member.send_signal(signal.SIGCONT)
            over.wait(0.1)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@v2_if_long
def test_the_leaders_disk_is_slow_while_nodes_join(lab: Lab, members: Members) -> None:
    first, second = pair(lab, members)
    with no_packet_lost(first, second):
        with stuttering(lead_from(members, first)):
            nodes = [first, second, *start(lab, members, 2)]
            put_peers(members, 1, 2)
            for node in nodes[2:]:
                node.wait_ready(2 * SOON)
            members.write(lambda member: member.delete_lease("10.5.1.0/24"))
            check_known(nodes, 2, deadline=2 * SOON)
        put_peers(members, 3)
        check_known(nodes, 2, 3)
