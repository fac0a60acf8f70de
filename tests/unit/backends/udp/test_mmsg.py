"""Many datagrams in one system call, between two sockets of this host."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

import pytest

from flanneld.backends.udp.proxy.python import RECEIVE_BUFFER, Messages, PeerLookup, tune


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
            each.settimeout(60)
        yield one, other


def fill(room: Messages, target: socket.socket, lengths: list[int]) -> None:
    """Datagrams of these lengths, each of one letter, for ``target``."""
    host, port = target.getsockname()
    name = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton(host))
    for slot, length in enumerate(lengths):
        room.names[16 * slot : 16 * slot + 16] = name
        room.buffers[slot][:length] = bytes([65 + slot]) * length
        room.to_send[2 * slot + 1] = length


def test_all_are_sent_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    room = Messages(4, 100)
    fill(room, other, [1, 0, 100, 50])
    assert room.send(one.fileno(), 4) == []
    assert [other.recv(1000) for _ in range(4)] == [b"A", b"", b"C" * 100, b"D" * 50]


def test_refused_datagram_does_not_delay_the_others(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    room = Messages(4, 65535)
    fill(room, other, [65535, 7, 65535, 9])
    assert room.send(one.fileno(), 4) == [0, 2]
    assert [other.recv(1000) for _ in range(2)] == [b"B" * 7, b"D" * 9]


def test_waiting_datagrams_are_read_with_their_sender(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    room = Messages(2, 65535)
    assert room.receive(other.fileno()) == 0
    for datagram in (b"first", b"", b"x" * 60_000):
        one.sendto(datagram, other.getsockname())
    assert room.receive(other.fileno()) == 2
    assert [bytes(room.buffers[i][: room.received[i]]) for i in range(2)] == [b"first", b""]
    assert room.names[4:8] == room.names[20:24] == socket.inet_aton("127.0.0.1")
    assert room.receive(other.fileno()) == 1
    assert room.received[0] == 60_000


def test_the_target_that_a_table_of_peers_gives_is_one_that_the_kernel_takes(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    table = PeerLookup(other.getsockname()[1])
    table.set(IPv4Network("10.5.0.0/16"), IPv4Address("127.0.0.1"))
    room = Messages(1, 10)
    room.names[:] = table.find(int(IPv4Address("10.5.7.1"))) or b""
    room.to_send[1] = 3
    assert room.send(one.fileno(), 1) == []
    assert other.recv(10) == bytes(3)


def test_the_receive_buffer_is_as_large_as_this_user_may_make_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, _ = ends
    before = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    tune(one.fileno())
    assert before < one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2 * RECEIVE_BUFFER
