"""Raw netlink socket to this host's kernel: questions and refusals, none of which changes anything."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.network.rtnetlink.netlink import NLM_F_ACK, NetlinkSocket, message

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
