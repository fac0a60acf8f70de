"""What the kernel tells of removed rules, in whatever pieces it comes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from flanneld.network.firewall import netlink
from flanneld.network.firewall.netlink import Removal, Removals
from flanneld.network.rtnetlink.netlink import NetlinkSocket, attribute, message

# linux/netfilter/nfnetlink.h and nf_tables.h
NF_TABLES, DELTABLE, DELCHAIN, DELRULE, NEWGEN = 10 << 8, 2, 5, 8, 15
TABLE_NAME, CHAIN_TABLE, CHAIN_NAME, RULE_TABLE, RULE_CHAIN, PROCESS_NAME = 1, 1, 3, 1, 2, 3
IPV4 = b"\x02\0\0\0"
DELETION = message(
    NF_TABLES | DELRULE, 0, IPV4 + attribute(RULE_TABLE, b"nat\0") + attribute(RULE_CHAIN, b"POSTROUTING\0")
)
GENERATION = message(NF_TABLES | NEWGEN, 0, b"\0\0\0\0" + attribute(PROCESS_NAME, b"iptables\0"))
NAMELESS = Removal(4, "nat", "POSTROUTING")
NAMED = Removal(4, "nat", "POSTROUTING", "iptables")


class Notifications(NetlinkSocket):
    """Notifications that a test sends."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours


@pytest.fixture
def kernel() -> Iterator[tuple[Removals, socket.socket]]:
    """A listener, and what stands for the kernel's end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield Removals(Notifications(ours)), theirs


def test_remover_is_named_by_the_end_of_its_transaction(
    kernel: tuple[Removals, socket.socket],
) -> None:
    listener, end = kernel
    end.send(DELETION)
    end.send(GENERATION)
    assert listener.read() == {NAMED}
    assert listener.read() == set()


@pytest.mark.parametrize(
    ("kind", "names", "chain"),
    [
        (DELTABLE, attribute(TABLE_NAME, b"nat\0"), ""),
        (DELCHAIN, attribute(CHAIN_TABLE, b"nat\0") + attribute(CHAIN_NAME, b"FLANNEL-FWD\0"), "FLANNEL-FWD"),
    ],
)
def test_removal_of_a_table_or_a_chain_is_told(
    kernel: tuple[Removals, socket.socket], kind: int, names: bytes, chain: str
) -> None:
    listener, end = kernel
    end.send(message(NF_TABLES | kind, 0, IPV4 + names))
    end.send(GENERATION)
    assert listener.read() == {Removal(4, "nat", chain, "iptables")}


def test_the_end_of_a_transaction_that_comes_a_moment_later_is_waited_for(
    kernel: tuple[Removals, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, end = kernel
    monkeypatch.setattr(netlink, "SAME_BREATH", 60.0)
    end.send(DELETION)
    later = threading.Timer(0.05, end.send, (GENERATION,))
    later.start()
    assert listener.read() == {NAMED}
    later.join()


def test_a_transaction_without_an_end_is_not_waited_for_long(
    kernel: tuple[Removals, socket.socket],
) -> None:
    listener, end = kernel
    end.send(DELETION)
    assert listener.read() == {NAMELESS}
