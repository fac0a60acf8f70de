"""Raw netlink socket: to this host's kernel with questions that change nothing, and to any other."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.network.rtnetlink.netlink import (
    HEADER,
    NLM_F_ACK,
    DumpInterrupted,
    MalformedNetlink,
    NetlinkSocket,
    attribute,
    attributes,
    message,
    messages,
    number_of,
    text_of,
    u32,
    unpack,
)

RTM_NEWLINK, RTM_GETLINK = 16, 18
LOOPBACK, ABSENT = 1, 0x7FFFFFFF
_IFINFOMSG = struct.Struct("=BxHiII")


@pytest.fixture
def kernel() -> Iterator[NetlinkSocket]:
    made = NetlinkSocket()
    yield made
    made.close()


def link(index: int) -> bytes:
    return _IFINFOMSG.pack(0, 0, index, 0, 0)


def batch(*indexes: int) -> list[bytes]:
    """Return questions about links, each with its position; the kernel treats them like writes."""
    return [message(RTM_GETLINK, 0, link(index), number) for number, index in enumerate(indexes)]


@pytest.mark.parametrize(
    ("indexes", "refused"),
    [
        ((LOOPBACK,), []),
        ((ABSENT,), [0]),
        ((ABSENT, LOOPBACK), [0]),
        ((LOOPBACK, ABSENT), [1]),
        ((LOOPBACK, ABSENT, LOOPBACK, ABSENT, LOOPBACK), [1, 3]),
    ],
)
def test_refused_messages_of_a_batch_are_told_by_their_positions(
    kernel: NetlinkSocket, indexes: tuple[int, ...], refused: list[int]
) -> None:
    for _ in range(3):  # positions begin anew with each batch
        assert list(kernel.write(batch(*indexes))) == [[(each, errno.ENODEV) for each in refused]]


def test_long_batch_is_sent_in_parts_and_positions_go_on(kernel: NetlinkSocket) -> None:
    absent = {0, 400, 1199}
    parts = list(kernel.write(batch(*(ABSENT if each in absent else LOOPBACK for each in range(1200)))))
    assert len(parts) == 3  # of 16 KiB at most
    assert [each for part in parts for each, _ in part] == sorted(absent)


#: Bit in the numbers of requests that read; those that write are numbered from 0.
QUESTION = 1 << 31


def leave_refusals(kernel: NetlinkSocket, *numbers: int) -> None:
    """Leave answers to requests that nobody waits for any more, as after a failure."""
    with socket.socket(fileno=os.dup(kernel.fileno())) as same:
        for number in numbers:
            same.send(message(RTM_GETLINK, NLM_F_ACK, link(ABSENT), number))


@pytest.mark.parametrize("late", [0, 2, 5, 1000, QUESTION - 1, QUESTION | 3, QUESTION | 4])
def test_late_answer_to_another_request_is_not_one_to_the_batch(kernel: NetlinkSocket, late: int) -> None:
    assert list(kernel.write(batch(LOOPBACK, LOOPBACK, LOOPBACK))) == [[]]  # numbered 0 to 2
    leave_refusals(kernel, late)
    assert list(kernel.write(batch(LOOPBACK, ABSENT))) == [[(1, errno.ENODEV)]]


def test_late_answer_to_another_request_is_not_one_to_the_question(kernel: NetlinkSocket) -> None:
    leave_refusals(kernel, 1, 2, 3, QUESTION)
    assert kernel.ask(RTM_GETLINK, link(LOOPBACK))
    leave_refusals(kernel, 1, 2, 3, QUESTION | 1)
    assert list(kernel.dump(RTM_GETLINK, link(0)))


def test_batch_without_messages_is_not_sent(kernel: NetlinkSocket) -> None:
    assert list(kernel.write([])) == []


def test_answer_is_that_of_the_question_also_after_a_refusal(kernel: NetlinkSocket) -> None:
    with pytest.raises(OSError, match="No such device"):
        kernel.ask(RTM_GETLINK, link(ABSENT))
    data, offset, end = kernel.ask(RTM_GETLINK, link(LOOPBACK))
    assert _IFINFOMSG.unpack_from(data, offset)[2] == LOOPBACK
    assert end <= len(data)


def test_dump_has_each_link_once(kernel: NetlinkSocket) -> None:
    for _ in range(2):
        found = [_IFINFOMSG.unpack_from(data, at)[2] for data, at, _ in kernel.dump(RTM_GETLINK, link(0))]
        assert sorted(found) == sorted(index for index, _ in socket.if_nameindex())


@pytest.mark.parametrize("name", ["", "flannel.gone", "a-name-of-16-char", "lo" * 9])
def test_interface_that_is_not_there_has_no_number(kernel: NetlinkSocket, name: str) -> None:
    with pytest.raises(OSError, match="No such device") as refusal:
        kernel.index_of(name)
    assert refusal.value.errno == errno.ENODEV


def test_interface_has_its_number_until_the_socket_is_closed(kernel: NetlinkSocket) -> None:
    assert kernel.index_of("lo") == socket.if_nametoindex("lo")
    kernel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        kernel.index_of("lo")


def test_notifications_have_room_for_a_burst(kernel: NetlinkSocket) -> None:
    with socket.socket(fileno=os.dup(kernel.fileno())) as same:
        room = same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    limit = int(Path("/proc/sys/net/core/rmem_max").read_text())
    assert room >= 2 * min(1 << 20, limit)  # the kernel doubles what is asked for


# ---- messages and attributes ---------------------------------------------------------------------


def test_attributes_are_read_up_to_the_first_that_does_not_fit() -> None:
    whole = attribute(1, b"abc") + u32(0x8002, 7) + attribute(3, b"")
    assert len(whole) == 8 + 8 + 4
    assert attributes(whole, 0, len(whole)) == {1: b"abc", 2: b"\7\0\0\0", 3: b""}
    assert attributes(b"head" + whole, 4, 4 + len(whole)) == attributes(whole, 0, len(whole))
    assert attributes(whole, 0, len(whole) - 1).keys() == {1, 2}
    assert attributes(whole, 0, 7) == {1: b"abc"}  # without its padding
    assert attributes(whole, 0, 6) == {}
    assert attributes(whole + b"\3\0\4\0", 0, len(whole) + 4).keys() == {1, 2, 3}
    assert attributes(b"\5\0\1\0", 0, 4) == {}


def test_texts_and_numbers_of_attributes_are_read() -> None:
    found = {1: b"eth0\0", 2: b"\0\0\1\0", 3: b"\1\0", 4: b"\xff\0"}
    assert [text_of(found, kind) for kind in (1, 4, 9)] == ["eth0", "\ufffd", ""]
    assert [number_of(found, kind) for kind in (2, 3, 9)] == [256, None, None]


def test_messages_are_read_up_to_the_first_that_does_not_fit() -> None:
    one, other = message(RTM_GETLINK, 0x300, b"body", 7), message(RTM_NEWLINK, 0, b"", 8)
    padded = HEADER.pack(HEADER.size + 1, 3, 0, 9, 77) + b"x"
    data = one + padded + bytes(3) + other
    assert [(kind, flags, seq, port) for kind, flags, seq, port, _, _ in messages(data)] == [
        (RTM_GETLINK, 0x301, 7, 0),
        (3, 0, 9, 77),
        (RTM_NEWLINK, 1, 8, 0),
    ]
    assert [data[offset:end] for *_, offset, end in messages(data)] == [b"body", b"x", b""]
    assert len(list(messages(data[:-1]))) == 2
    assert list(messages(one[:-1])) == []
    assert len(list(messages(one + HEADER.pack(15, 0, 0, 0, 0)))) == 1


def test_start_of_a_body_is_whole_or_malformed() -> None:
    form = struct.Struct("=HH")
    assert unpack(form, b"xx\1\0\2\0", 2, 6) == (1, 2)
    for data, offset, end in ((b"\1\0\2\0", 0, 3), (b"\1\0\2", 0, 4), (b"\1\0\2\0", 1, 4)):
        with pytest.raises(MalformedNetlink):
            unpack(form, data, offset, end)


# ---- answers of any kernel -----------------------------------------------------------------------

ERROR, DONE, INTERRUPTED = 2, 3, 0x10
Answer = bytes | OSError


class FakeSocket:
    """Stands in for the socket: answers in their order, errors among them. Requests are kept."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.sent: list[bytes] = []
        self.options: dict[tuple[int, int], list[int]] = {}
        self.refused: dict[int, int] = {}

    def bind(self, _: object) -> None:
        pass

    def setblocking(self, _: bool) -> None:
        pass

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if code := self.refused.get(option):
            raise OSError(code, os.strerror(code))
        self.options.setdefault((level, option), []).append(value)

    def send(self, data: bytes) -> None:
        self.sent.append(bytes(data))

    def recv(self, _: int, flags: int = 0) -> bytes:
        if flags and not self.answers:
            raise BlockingIOError(errno.EAGAIN, "empty")
        if isinstance(first := self.answers.pop(0), OSError):
            raise first
        return first


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    found = FakeSocket()
    monkeypatch.setattr(socket, "socket", lambda *_: found)
    return found


FIRST = QUESTION | 1


def reply(kind: int, body: bytes = b"", flags: int = 0, seq: int = FIRST) -> bytes:
    return HEADER.pack(HEADER.size + len(body), kind, flags, seq, 0) + body


def code(number: int) -> bytes:
    return struct.pack("=i", -number)


def dumped(made: NetlinkSocket) -> list[bytes]:
    return [data[offset:end] for data, offset, end in made.dump(RTM_GETLINK, b"")]


def test_dump_has_the_objects_of_all_datagrams(fake: FakeSocket) -> None:
    fake.answers = [
        reply(RTM_NEWLINK, b"old.", seq=FIRST - 1),
        reply(RTM_NEWLINK, b"one.") + reply(RTM_NEWLINK, b"two."),
        reply(RTM_NEWLINK, b"six.") + reply(DONE, code(0)) + reply(RTM_NEWLINK, b"more"),
    ]
    assert dumped(NetlinkSocket()) == [b"one.", b"two.", b"six."]
    ((length, kind, flags, seq, port),) = (HEADER.unpack_from(each) for each in fake.sent)
    assert (length, kind, flags, seq, port) == (HEADER.size, RTM_GETLINK, 0x301, FIRST, 0)


@pytest.mark.parametrize("kind", [DONE, ERROR])
def test_dump_that_is_refused_is_an_error(kind: int, fake: FakeSocket) -> None:
    fake.answers = [reply(RTM_NEWLINK, b"one.") + reply(kind, code(errno.EPERM))]
    with pytest.raises(PermissionError):
        dumped(NetlinkSocket())


@pytest.mark.parametrize("flags", [(INTERRUPTED, 0), (0, INTERRUPTED), (INTERRUPTED | 2, 2)])
def test_dump_that_was_interrupted_is_told_at_its_end(flags: tuple[int, int], fake: FakeSocket) -> None:
    fake.answers = [reply(RTM_NEWLINK, b"one.", flags[0]) + reply(DONE, code(0), flags[1])]
    with pytest.raises(DumpInterrupted):
        dumped(NetlinkSocket())
    fake.answers = [reply(RTM_NEWLINK, b"one.", 2) + reply(DONE, code(0), 2)]
    assert dumped(NetlinkSocket()) == [b"one."]


def test_failure_of_a_read_empties_the_socket(fake: FakeSocket) -> None:
    """As long as it is not empty the kernel drops every answer."""
    lost = OSError(errno.ENOBUFS, "lost")
    fake.answers = [lost, b"rest", OSError(errno.ENOBUFS, "lost again"), b"rest"]
    made = NetlinkSocket()
    with pytest.raises(OSError, match=r"lost$"):
        dumped(made)
    assert fake.answers == []
    fake.answers = [reply(DONE, code(0), seq=QUESTION | 2)]
    assert dumped(made) == []


def test_acknowledgement_without_an_object_is_malformed(fake: FakeSocket) -> None:
    fake.answers = [reply(ERROR, code(0))]
    with pytest.raises(MalformedNetlink):
        NetlinkSocket().ask(RTM_GETLINK, b"")


def test_groups_are_listened_to_and_left(fake: FakeSocket) -> None:
    made = NetlinkSocket([1, 7])
    made.stop_listening()
    made.listen()
    added, dropped = fake.options[270, 1], fake.options[270, 2]  # SOL_NETLINK, NETLINK_*_MEMBERSHIP
    assert (added, dropped) == ([1, 7, 1, 7], [1, 7])
    assert (fake.options[270, 10], fake.options[270, 12]) == ([1], [1])  # short refusals, strict dumps


def test_old_kernel_without_options_and_rights_will_do(fake: FakeSocket) -> None:
    fake.refused = {10: errno.ENOPROTOOPT, 12: errno.ENOPROTOOPT, 33: errno.EPERM}
    NetlinkSocket(receive_buffer=1000)
    assert fake.options == {(socket.SOL_SOCKET, socket.SO_RCVBUF): [1000]}
