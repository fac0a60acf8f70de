"""Many hosts at once, on loopback: each address of 127.0.0.0/8 is a host."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest

from flanneld.model import IPAddress
from flanneld.network import survey as module
from flanneld.network.query import TOKEN_LENGTH, answer, decode
from flanneld.network.survey import (
    SAMPLE,
    SILENCE,
    Echo,
    EchoChannel,
    QueryChannel,
    ask,
    echoes,
    glance_at_mtu,
    losses_of_sample,
    passing,
    path_mtus,
    queries,
    reached,
    refused,
    survey,
    unanswered,
)
from flanneld.runtime.clock import replaced
from tests.clock import Clock

SOON = 5.0
MANY = [IPv4Address("127.0.1.0") + number for number in range(1000)]
HERE = IPv4Address("127.0.0.1")


@contextmanager
def node(*, ignored: int = 0) -> Iterator[int]:
    """Answer queries on all of loopback, after the first ``ignored`` ones; yield the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, 8, 1)  # IP_PKTINFO: answers leave from the address that was asked
        sock.bind(("0.0.0.0", 0))

        def serve() -> None:
            left = ignored
            while True:
                data, notes, _, source = sock.recvmsg(65535, 64)
                query = decode(data)
                if query is None:
                    return
                left -= 1
                if left < 0:
                    info = notes[0][2]
                    note = (socket.IPPROTO_IP, 8, bytes(4) + info[8:12] + bytes(4))
                    sock.sendmsg([answer(query, {"version": "1"})], [note], 0, source)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"end", ("127.0.0.1", sock.getsockname()[1]))
            thread.join(SOON)


def closed_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def test_a_thousand_nodes_answer_one_survey() -> None:
    with node() as port:
        # One socket stands for all nodes here, and its buffer holds few of their queries.
        found = queries(MANY, port, 0.3, tries=30)
    assert len(found) == len(MANY)
    assert all(reply.facts == {"version": "1"} and reply.arrived for reply in found.values())


class SmallBuffer:
    """A channel whose socket keeps 40 answers; a file is always readable."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._answers: list[bytes] = []

    def fileno(self) -> int:
        return self._file

    def send(self, _target: IPAddress, token: bytes) -> None:
        self._answers += [token][: 40 - len(self._answers)]

    def receive(self) -> Iterator[tuple[bytes, Mapping[str, Any], int]]:
        answers, self._answers = self._answers, []
        for each in answers:
            yield each, {}, 0

    def close(self) -> None:
        pass


def test_answers_are_read_before_the_buffer_is_full(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file, replaced(Clock()):
        replies = survey(SmallBuffer(file.fileno()), MANY, 0.0, 1)
    assert all(reply.rtt is not None for reply in replies.values())


def test_closed_port_is_a_refusal_of_the_host_that_has_it() -> None:
    found = queries(MANY[:100], closed_port(), SOON)
    assert all(reply.is_refusal and reply.arrived and reply.rtt is None for reply in found.values())


def test_what_is_there_at_the_deadline_counts() -> None:
    """A busy host may let us sleep beyond it."""
    assert refused([(HERE, closed_port())], 0.0) == {HERE}
    assert echoes([HERE], 0.0, 1)[HERE].arrived


@pytest.mark.parametrize("host", [HERE, IPv6Address("::1")], ids=str)
@pytest.mark.parametrize("when", ["before its filter", "behind its filter"])
def test_replies_to_other_programs_leave_room_for_ours(
    host: IPAddress, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A raw socket gets all of them, and its buffer holds some 90 large ones."""
    flooding: list[EchoChannel] = []

    def flood() -> None:
        for others in flooding:
            for _ in range(500):
                others.send(host, bytes(TOKEN_LENGTH))
                list(others.receive())

    def raw(*kind: int) -> socket.socket:
        if kind[1] == socket.SOCK_DGRAM:
            raise PermissionError
        sock = real(*kind)
        if when == "before its filter":
            flood()
        return sock

    real = socket.socket
    monkeypatch.setattr("flanneld.network.survey.socket.socket", raw)
    with closing(EchoChannel(host.version, 1400)) as others:
        flooding.append(others)
        with closing(EchoChannel(host.version)) as ours:
            flood()
            assert ask(ours, host, SOON).arrived


def test_the_first_of_two_answers_counts() -> None:
    class Doubled:
        def __init__(self) -> None:
            self._token = b""

        def fileno(self) -> int:
            return ready.fileno()

        def send(self, _target: IPAddress, token: bytes) -> None:
            self._token = token

        def receive(self) -> Iterator[tuple[bytes, Mapping[str, Any], int]]:
            yield self._token, {}, 0
            clock.time += 1.0
            yield self._token, {}, 0

        def close(self) -> None:
            """Nothing is open."""

    clock = Clock()
    with socket.socket() as ready, replaced(clock):
        assert survey(Doubled(), [HERE], SOON, 1)[HERE].rtt == 0.0


def test_refusal_of_one_host_is_not_blamed_on_the_next() -> None:
    """The kernel reports an ICMP error also by the next call on the socket, to whichever host that is."""
    silent = [IPv4Address("127.9.0.0") + number for number in range(20)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as first, ExitStack() as stack:
        first.bind((str(silent[0]), 0))
        port = first.getsockname()[1]
        for each in silent[1:]:
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sock.bind((str(each), port))
        mixed = [each for pair in zip(MANY, silent, strict=False) for each in pair]
        found = queries(mixed, port, 0.3, tries=2)
    assert {target for target, reply in found.items() if reply.is_refusal} == set(MANY[: len(silent)])
    assert not any(found[each].arrived for each in silent)


def test_lost_query_is_sent_again() -> None:
    with node(ignored=1) as port:
        assert queries([HERE], port, 0.3, tries=1)[HERE].arrived is False
    with node(ignored=1) as port:
        assert queries([HERE], port, 0.3, tries=2)[HERE].arrived is True


def test_answer_has_the_wanted_size_in_each_direction() -> None:
    with node() as port:
        for size, answer_size in ((576, 576), (1500, 60), (1500, 1500)):
            channel = QueryChannel(4, port, size, answer_size)
            try:
                assert ask(channel, HERE, SOON).arrived
            finally:
                channel.close()


def test_loopback_carries_what_is_asked_for_and_answers_from_each_address() -> None:
    other = IPv4Address("127.0.0.9")
    questions: list[tuple[IPAddress, int]] = [
        (HERE, 1500),
        (other, 9000),
        (IPv6Address("::1"), 1400),
        (HERE, 400),
    ]
    assert glance_at_mtu(questions) == [1500, 9000, 1400, 400]
    assert path_mtus(questions) == [1500, 9000, 1400, 400]
    assert passing([HERE, other], 3, SOON, sources={4: other}) == {HERE, other}
    assert reached([HERE, other], SOON) == {HERE, other}


class Silent(SmallBuffer):
    """A channel on which nobody answers."""

    def __init__(self, file: int) -> None:
        super().__init__(file)
        self.asked = 0

    def send(self, _target: IPAddress, _token: bytes) -> None:
        self.asked += 1


def test_survey_ends_early_when_its_answers_are_no_longer_wanted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file, replaced(Clock()):
        channel = Silent(file.fileno())
        replies = survey(channel, [HERE], SOON, 3, is_wanted=lambda: False)
    assert (replies, channel.asked) == ({HERE: SILENCE}, 3)


class Refusing(Silent):
    """A channel that refuses messages with an error, some number of times."""

    def __init__(self, file: int, code: int, times: int) -> None:
        super().__init__(file)
        self._code = code
        self._times = times

    def send(self, _target: IPAddress, _token: bytes) -> None:
        self.asked += 1
        if self.asked <= self._times:
            raise OSError(self._code, "refused")


@pytest.mark.parametrize(
    ("code", "times", "error"),
    [
        (errno.EMSGSIZE, 5, errno.EMSGSIZE),
        (errno.EMSGSIZE, 4, 0),
        (errno.ECONNREFUSED, 5, 0),  # of an earlier message
        (0, 5, errno.EIO),
    ],
)
def test_refusal_by_this_host_counts_if_it_is_repeated(
    code: int, times: int, error: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file, replaced(Clock()):
        channel = Refusing(file.fileno(), code, times)
        assert survey(channel, [HERE], 0.0, 1)[HERE].error == error


def test_kernel_without_ipv6_knows_of_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("flanneld.network.survey.socket.socket", refuse)
    assert refused([(ip_address("fd00::1"), 8472)], 1.0) == set()


def test_only_packets_lost_before_an_answered_one_are_lost_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the rate of ICMP drops all that follow; a path that loses packets, some in between."""
    limited, lossy, silent = map(ip_address, ("192.0.2.1", "2001:db8::1", "192.0.2.3"))

    def answered(asked: Sequence[Echo], _: float) -> set[Echo]:
        first = asked[: len(asked) // 2]
        return {each for each in first if each.target == limited} | {
            each for each in asked if each.target == lossy and each.size % 2
        }

    monkeypatch.setattr(module, "_answered", answered)
    assert losses_of_sample((limited, lossy, silent)) == {
        limited: (0, SAMPLE // 2),
        lossy: (SAMPLE // 2, 0),
        silent: (0, SAMPLE),
    }


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ([], 0),
        ([{1400}], 0),
        ([{1400}, {1400}], 1),
        ([{575}, set()], 0),
        ([{575, 570}], 2),
        ([{*range(567, 577), 1400}], SAMPLE),
    ],
    ids=["none", "one by chance", "the large one", "a small one by chance", "two", "all"],
)
def test_single_packet_without_an_answer_is_sent_once_more(
    lost: list[set[int]], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = iter([*lost, set[int]()])

    def answered(asked: Collection[Echo], _: float) -> set[Echo]:
        gone = next(tries)
        return {each for each in asked if each.size not in gone}

    monkeypatch.setattr(module, "_answered", answered)
    assert unanswered(ip_address("192.0.2.1"), 1400) == found
