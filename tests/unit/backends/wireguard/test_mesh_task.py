"""The task of a mesh, second by second: whom it asks, what it announces, and when it reads."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from ipaddress import IPv4Address, ip_address, ip_network

import pytest

from flanneld.backends.wireguard.mesh import Mesh, MeshTask, Nat, ask_peers, name_of, parse, text_of, to_ask
from flanneld.errors import Retryable
from flanneld.model import IPAddress, Uplink
from flanneld.network.genetlink import Endpoint
from flanneld.network.query import answer, decode
from flanneld.runtime import clock
from flanneld.state.table import TunnelSession

HERE, THERE = "192.168.1.5", "192.168.7.7"
BEGIN = 1000.0
HALF_A_DAY = 12 * 3600
NETWORK = [ip_network("10.5.0.0/16")]


class Time(clock.Clock):
    time, slept = BEGIN, 0.0

    def now(self) -> float:
        return self.time

    def suspended(self) -> float:
        return self.slept


def session(number: int, endpoint: str, *, is_established: bool = True) -> TunnelSession:
    return TunnelSession(ip_network(f"10.5.{number}.0/24"), is_established, endpoint=endpoint)


class Node:
    """A node's task, its store and what its peers answer: what happened, with the time since the start."""

    name = "store"

    def __init__(self, time: Time) -> None:
        self.time = time
        self.uplink = self._uplink(HERE)
        self.sessions = [session(number, f"203.0.113.{number}:1") for number in range(1, 12)]
        self.answers: list[str] = []
        self.fails = False
        self.asked: list[tuple[float, int]] = []
        self.written: list[tuple[float, str]] = []
        self.reads: list[float] = []
        self.tries: list[float] = []
        self.mesh = Mesh(bytes(32), {4: 51820}, 0)
        self.task = MeshTask(self.mesh, self, lambda: self.uplink, NETWORK, lambda: self.sessions, self._ask)

    @staticmethod
    def _uplink(address: str) -> Uplink:
        return Uplink("eth0", 1, 1500, IPv4Address(address), IPv4Address(address))

    def _now(self) -> float:
        return self.time.time - BEGIN

    def _ask(self, targets: Sequence[IPAddress]) -> Collection[Endpoint]:
        self.asked.append((self._now(), len(targets)))
        return [found for each in self.answers if (found := parse(each))]

    def _try(self) -> None:
        self.tries.append(self._now())
        if self.fails:
            raise Retryable("the store is down")

    def publish_endpoints(self, name: str, text: str) -> None:
        assert name == self.mesh.name
        self._try()
        self.written.append((self._now(), text))

    def endpoints(self) -> dict[str, str]:
        self._try()
        self.reads.append(self._now())
        return {}

    def move(self, address: str = THERE) -> None:
        self.uplink = self._uplink(address)

    def run(self, until: float) -> None:
        """Make a step each second, up to that of the time."""
        while self._now() <= until:
            assert self.task.step(self.time.time) == self.time.time + 1
            self.time.time += 1


@pytest.fixture
def node() -> Iterator[Node]:
    time = Time()
    with clock.replaced(time):
        yield Node(time)


# ---- asking ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "times"),
    [([], [0, 2, 4, 6, 8]), ([f"{HERE}:51820"], [0, 6, 66, 126]), (["203.0.113.99:4000"], [0, 6, 66, 126])],
    ids=["nobody answers", "no NAT", "NAT"],
)
def test_two_peers_are_asked_soon_until_an_answer_is_repeated(
    node: Node, answers: list[str], times: list[float]
) -> None:
    node.answers = answers
    node.run(until=max(times) + 1)
    assert node.asked == [(time, 2) for time in times]


def test_nobody_is_asked_before_there_is_a_session(node: Node) -> None:
    sessions, node.sessions = node.sessions, []
    node.run(until=9)
    assert node.asked == []
    node.sessions = sessions[:1]
    node.run(until=11)
    assert node.asked == [(10, 1)]


@pytest.mark.parametrize("answers", [[], [f"{HERE}:51820"]])
def test_after_a_move_eight_are_asked_until_one_answers(
    node: Node, answers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.answers = [f"{HERE}:51820"]
    node.run(until=99)
    assert not node.mesh.greets
    node.asked.clear()
    node.move()
    node.answers = answers
    node.run(until=110)
    assert node.asked == ([(106, 8)] if answers else [(106, 8), (108, 8), (110, 8)])
    assert node.mesh.greets
    assert caplog.messages.count("This node has moved, or was suspended: asking peers where they see it") == 1
    node.asked.clear()
    node.answers = ["198.51.100.1:7"]
    node.run(until=126)
    assert node.asked[-1][1] == 2


@pytest.mark.parametrize(("slept", "is_asked"), [(4.9, False), (5.0, True)])
def test_a_long_sleep_is_like_a_move(node: Node, slept: float, is_asked: bool) -> None:
    node.answers = [f"{HERE}:51820"]
    node.run(until=9)
    node.time.slept = slept
    node.run(until=20)
    assert node.mesh.greets is is_asked
    assert ((16, 8) in node.asked) is is_asked


def test_kind_of_nat_is_told_when_it_changes(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.answers = ["203.0.113.99:4000"]
    node.run(until=70)
    node.answers = ["203.0.113.99:4000", "203.0.113.99:4001"]
    node.run(until=140)
    assert node.mesh.nat is Nat.SYMMETRIC
    assert caplog.messages == [
        "NAT between this node and its peers: cone",
        "NAT between this node and its peers: symmetric",
    ]


def test_peers_with_a_session_are_asked_once_each_those_at_public_addresses_first() -> None:
    sessions = [
        session(1, "192.168.1.9:1"),
        session(2, "8.8.8.8:1"),
        session(3, "8.8.8.8:2"),
        session(4, "8.8.4.4:1", is_established=False),
        session(5, ""),
        session(6, "[2001:4860::1]:1"),
    ]
    found = [str(each) for each in to_ask(sessions, 9)]
    assert (set(found[:2]), found[2:]) == ({"10.5.2.0", "10.5.6.0"}, ["10.5.1.0"])
    assert set(map(str, to_ask(sessions, 2))) == {"10.5.2.0", "10.5.6.0"}


def test_peers_that_do_not_answer_as_they_should_tell_nothing() -> None:
    told = {"127.0.0.1": "203.0.113.9:4000", "127.0.0.2": "127.0.0.9:1", "127.0.0.3": "nowhere"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peers:
        peers.setsockopt(socket.IPPROTO_IP, 8, 1)  # IP_PKTINFO: answers leave from the address that was asked
        peers.bind(("0.0.0.0", 0))

        def serve() -> None:
            for _ in told:
                data, notes, _, source = peers.recvmsg(65535, 64)
                query, asked = decode(data), notes[0][2][8:12]
                assert query
                note = (socket.IPPROTO_IP, 8, bytes(4) + asked + bytes(4))
                facts = {"endpoint": told[socket.inet_ntoa(asked)]}
                peers.sendmsg([answer(query, facts)], [note], 0, source)

        thread = threading.Thread(target=serve)
        thread.start()
        found = ask_peers(peers.getsockname()[1])([ip_address(each) for each in told])
        thread.join(60)
    assert list(map(text_of, found)) == ["203.0.113.9:4000"]


def test_name_of_a_node_has_no_slash_which_would_divide_the_key_of_a_store() -> None:
    assert name_of(b"\xff" * 32) == 42 * "_" + "8="


# ---- announcing ------------------------------------------------------------------------------------


def test_what_is_known_from_the_start_is_announced_at_once_and_again_twice_a_day(node: Node) -> None:
    node.run(until=9)
    node.time.time = BEGIN + HALF_A_DAY - 5
    node.run(until=HALF_A_DAY + 5)
    assert node.written == [(0, f"{HERE}:51820"), (HALF_A_DAY, f"{HERE}:51820")]


def test_a_move_is_announced_at_once(node: Node) -> None:
    node.run(until=9)
    node.move()
    node.run(until=20)
    assert node.written[1:] == [(10, f"{THERE}:51820")]


def test_what_peers_tell_is_announced_once_a_minute(node: Node) -> None:
    node.answers = ["203.0.113.99:4000"]
    node.run(until=3)
    node.answers = ["203.0.113.99:4001"]
    node.run(until=70)
    assert node.written == [
        (0, f"203.0.113.99:4000,{HERE}:51820"),
        (60, f"203.0.113.99:4001,{HERE}:51820"),
    ]


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([f"{HERE}:51820"], f"{HERE}:51820"),
        ([f"{HERE}:51820", "203.0.113.99:4000"], f"203.0.113.99:4000,{HERE}:51820"),
        (["203.0.113.99:4000", "203.0.113.99:4001"], f"{HERE}:51820"),
    ],
    ids=["no NAT", "one kind of peers sees a NAT", "symmetric NAT"],
)
def test_only_what_leads_other_peers_here_is_announced(node: Node, answers: list[str], text: str) -> None:
    node.answers = answers
    node.run(until=3)
    assert [each for _, each in node.written] == [text]


def test_store_that_fails_is_asked_each_5_s(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.fails = True
    node.run(until=12)
    assert node.tries == [0, 5, 10]
    node.fails = False
    node.run(until=20)
    assert node.written == [(15, f"{HERE}:51820")]
    node.fails = True
    node.tries.clear()
    node.time.time = BEGIN + 15 + HALF_A_DAY
    node.run(until=15 + HALF_A_DAY + 7)
    assert node.tries == [15 + HALF_A_DAY, 20 + HALF_A_DAY]
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert caplog.messages[1] == "The store has our endpoints again after 15 s"


def test_store_that_fails_to_tell_the_endpoints_is_asked_each_5_s(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node.run(until=3)
    node.fails = True
    node.mesh.searched = frozenset({"one"})
    node.run(until=17)
    assert node.tries == [0, 4, 9, 14]
    node.fails = False
    node.run(until=30)
    assert node.reads == [19, 24]
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]


# ---- reading ---------------------------------------------------------------------------------------


def test_endpoints_are_read_ever_more_rarely_while_the_same_peers_are_searched_for(node: Node) -> None:
    node.run(until=9)
    assert node.reads == []
    node.mesh.searched = frozenset({"one", "other"})
    node.run(until=200)
    assert node.reads == [10, 15, 25, 45, 85, 145]
    node.mesh.searched = frozenset({"other"})
    node.run(until=210)
    assert node.reads[6:] == [205]
    node.mesh.searched = frozenset({"other", "third"})
    node.run(until=230)
    assert node.reads[7:] == [211, 216, 226]


def test_endpoints_are_not_read_once_all_peers_were_met(node: Node) -> None:
    node.mesh.searched = frozenset({"one"})
    node.run(until=3)
    node.mesh.searched = frozenset()
    node.run(until=100)
    assert node.reads == [0]


# ---- what is told of NAT ---------------------------------------------------------------------------


@pytest.mark.parametrize("nat", [Nat.UNKNOWN, Nat.NONE, Nat.CONE])
def test_most_kinds_of_nat_are_no_problem(node: Node, nat: Nat) -> None:
    node.mesh.nat = nat
    assert node.mesh.problem == ""


def test_symmetric_nat_is_a_problem_whose_remedy_names_the_ports() -> None:
    found = Mesh(bytes(32), {6: 51821, 4: 51820}, 0)
    found.nat = Nat.SYMMETRIC
    assert "symmetric NAT" in found.problem
    assert "forward UDP port 51820 or 51821 to it" in found.problem
