"""Filters that the kernel applies for a socket, here to datagrams of this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from flanneld.network.rtnetlink.netlink import HEADER
from flanneld.network.socket_filters import drop_changes_by, pass_echo_replies

OURS, THEIRS = 0x01020304, 0x04030201
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender, receiver:
        receiver.setblocking(False)
        yield sender, receiver


def received(pair: Pair, *sent: bytes) -> list[bytes]:
    """Return which datagrams come through."""
    for each in sent:
        pair[0].send(each)
    found = []
    while True:
        try:
            found.append(pair[1].recv(100))
        except BlockingIOError:
            return found


def change(port: int) -> bytes:
    return HEADER.pack(HEADER.size, 24, 0, OURS, port)


@pytest.mark.parametrize("port", [OURS, 1, 0xFFFFFFFF])
def test_changes_by_one_port_are_dropped_and_those_by_others_pass(port: int, pair: Pair) -> None:
    drop_changes_by(pair[1], port)
    others = [change(each) for each in (THEIRS, 0, 2, OURS ^ 0xFF)]
    assert received(pair, change(port), others[0], change(port), *others[1:]) == others


def echo(kind: int, identifier: int) -> bytes:
    return bytes((kind, 0, 0, 0)) + identifier.to_bytes(2) + b"\0\1"


def test_echo_replies_to_others_are_dropped_and_so_is_what_came_before(pair: Pair) -> None:
    sender, receiver = pair
    for kind in (129, 128):
        sender.send(echo(kind, 7))
    pass_echo_replies(receiver, 129, 0x1234)
    mine = echo(129, 0x1234)
    others = echo(129, 0x3412), echo(129, 7), echo(128, 0x1234), echo(130, 0x1234), b"\x81"
    assert received(pair, mine, *others, mine) == [mine, mine]
