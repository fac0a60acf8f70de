"""nf_tables over netlink: which tables and chains there are, and news of what others remove.

Asking here takes microseconds where a command takes milliseconds, on a large cluster's node seconds, and
creates nothing. Facts are from linux/netfilter/nfnetlink.h and nf_tables.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family
from flanneld.network.firewall.rules import JUMPS, OWN_CHAINS, Chain, Rule
from flanneld.network.rtnetlink.netlink import (
    NETLINK_ADD_MEMBERSHIP,
    NLM_F_ROOT_MATCH,
    NLMSG_DONE,
    NLMSG_ERROR,
    SO_RCVBUFFORCE,
    SOL_NETLINK,
    attribute,
    attributes,
    message,
    messages,
    number_of,
    text_of,
    unpack,
)
from flanneld.runtime import waits

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10 << 8
_NEWTABLE, _GETTABLE, _DELTABLE, _NEWCHAIN, _GETCHAIN, _DELCHAIN, _NEWRULE, _GETRULE, _DELRULE = range(9)
_NEWGEN = 15
_TABLE_NAME, _CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY = 1, 1, 3, 4, 5
_RULE_TABLE, _RULE_CHAIN, _RULE_EXPRESSIONS = 1, 2, 4
_GEN_PROC_NAME = 3
#: An attribute that is never there.
_NOTHING = -1
_HOOK_NUMBER = 1
_NFNLGRP_NFTABLES = 7
_NF_INET_FORWARD, _NF_DROP = 2, 0

#: The kernel's numbers of the families (NFPROTO_*).
_PROTOCOL: dict[Family, int] = {4: 2, 6: 10}
_INET = 1
_FAMILY: dict[int, Family] = {2: 4, 10: 6}
#: The families of tables, as nft(8) names them.
_TABLE_FAMILY = {1: "inet", 2: "ip", 10: "ip6"}

#: What the kernel answers to questions for a subsystem that it does not have.
_NOT_THERE = (errno.EINVAL, errno.EOPNOTSUPP)

_RECEIVE = 64 * 1024
#: Seconds within which the kernel says who did what it has just told.
_SAME_BREATH = 0.1
#: A large cluster's kube-proxy rewrites tens of thousands of rules at a time.
_RECEIVE_BUFFER = 4 << 20
_ERRNO = struct.Struct("=i")
_HEADER = struct.Struct(">BBH")


class NoNetfilter(OSError):
    """This kernel has no nf_tables."""


class Netfilter:
    """Asks nf_tables in the network namespace of the thread that made it. All raise ``OSError``."""

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER
            )
        except OSError as error:
            raise NoNetfilter(error.errno, "this kernel has no netlink for netfilter") from error
        self._seq = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def has_table(self, family: Family, table: str) -> bool:
        return self._has(_GETTABLE, family, attribute(_TABLE_NAME, _terminated(table)))

    def has_chain(self, family: Family, chain: Chain) -> bool:
        table, name = chain
        body = attribute(_CHAIN_TABLE, _terminated(table)) + attribute(_CHAIN_NAME, _terminated(name))
        return self._has(_GETCHAIN, family, body)

    def count_rules(self) -> int:
        """How many rules for IPv4 and IPv6 there are that are not flannel's."""
        others, ways = 0, set()
        for protocol in _FAMILY:
            for _, given in self._dump(_GETRULE, protocol):
                chain = (text_of(given, _RULE_TABLE), text_of(given, _RULE_CHAIN))
                if chain not in OWN_CHAINS:
                    others += 1
                elif chain in JUMPS:
                    ways.add((protocol, chain))
        return max(0, others - len(ways))

    def forwarding(self, family: Family) -> Iterator[tuple[str, str, bool]]:
        """Chains at the FORWARD hook: the table as nft(8) names it, the chain, whether its policy drops."""
        for protocol in (_PROTOCOL[family], _INET):
            for _, given in self._dump(_GETCHAIN, protocol):
                hooked = given.get(_CHAIN_HOOK, b"")
                if number_of(attributes(hooked, 0, len(hooked)), _HOOK_NUMBER) == _NF_INET_FORWARD:
                    table = f"{_TABLE_FAMILY[protocol]} {text_of(given, _CHAIN_TABLE)}"
                    yield table, text_of(given, _CHAIN_NAME), number_of(given, _CHAIN_POLICY) == _NF_DROP

    def rules(self, family: Family, table: str, chain: str = "") -> list[Rule]:
        """The rules of a chain, or of all in the table, as they concern a family.

        The table is named as nft(8) does.
        """
        from flanneld.network.firewall.nftables.kernel_rules import read_rule  # few have a chain to look at

        kind, _, name = table.partition(" ")
        protocol = next(number for number, word in _TABLE_FAMILY.items() if word == kind)
        body = attribute(_RULE_TABLE, _terminated(name))
        if chain:
            body += attribute(_RULE_CHAIN, _terminated(chain))
        return [
            read_rule(family, given.get(_RULE_EXPRESSIONS, b""))
            for _, given in self._ask(_GETRULE, NLM_F_ROOT_MATCH, protocol, body)
            # Old kernels tell of all tables.
            if text_of(given, _RULE_TABLE) == name and chain in ("", text_of(given, _RULE_CHAIN))
        ]

    def _has(self, kind: int, family: Family, body: bytes) -> bool:
        try:
            next(self._ask(kind, 0, _PROTOCOL[family], body))
        except FileNotFoundError:
            return False
        return True

    def _dump(self, kind: int, protocol: int) -> Iterator[tuple[int, dict[int, bytes]]]:
        return self._ask(kind, NLM_F_ROOT_MATCH, protocol, b"")

    def _ask(
        self, kind: int, flags: int, protocol: int, body: bytes
    ) -> Iterator[tuple[int, dict[int, bytes]]]:
        """Each answer as (type, attributes)."""
        self._seq += 1
        request = message(_SUBSYSTEM | kind, flags, _HEADER.pack(protocol, 0, 0) + body, self._seq)
        self._socket.send(request)
        while True:
            data = self._socket.recv(_RECEIVE)
            for answer, _, seq, _, offset, end in messages(data):
                if seq != self._seq:
                    continue
                if answer in (NLMSG_DONE, NLMSG_ERROR):
                    (code,) = unpack(_ERRNO, data, offset, end)
                    if -code in _NOT_THERE:
                        raise NoNetfilter(-code, "this kernel has no nf_tables")
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return
                yield answer & 0xFF, attributes(data, offset + _HEADER.size, end)


class Removal(Struct, frozen=True, gc=False):
    """Something was removed from nf_tables, or may have been if notifications were lost.

    ``table`` and ``chain`` are empty where all of them are meant, ``family`` is None for any.
    """

    family: Family | None = None
    table: str = ""
    chain: str = ""
    by: str = ""


class Removals:
    """Listens to what is removed from nf_tables, by whomever: our own commands are not told apart."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            _NETLINK_NETFILTER,
        )
        # A socket without a port is left out of what is notified.
        self._socket.bind((0, 0))
        # Losing notifications only costs a look at the rules.
        with suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, _RECEIVE_BUFFER)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> set[Removal]:
        """What has come since the last time."""
        found: set[Removal] = set()
        while True:
            try:
                found = _fold(found, self._socket.recv(_RECEIVE))
            except BlockingIOError:
                if not self._goes_on(found):
                    return found
            except OSError as failure:
                if failure.errno != errno.ENOBUFS:
                    raise
                found.add(Removal())

    def _goes_on(self, found: set[Removal]) -> bool:
        """Whether more has come of a transaction: we may have been woken in the middle of its news."""
        nameless = any(removal.family and not removal.by for removal in found)
        return nameless and waits.readable(self._socket.fileno(), _SAME_BREATH)


#: What is removed, with the places of its table's and its chain's name.
_REMOVALS: dict[int, tuple[int, int]] = {
    _SUBSYSTEM | _DELTABLE: (_TABLE_NAME, _NOTHING),
    _SUBSYSTEM | _DELCHAIN: (_CHAIN_TABLE, _CHAIN_NAME),
    _SUBSYSTEM | _DELRULE: (_RULE_TABLE, _RULE_CHAIN),
}


def _fold(found: set[Removal], data: bytes) -> set[Removal]:
    """Add what one receive tells. The message that ends a transaction names the program behind it."""
    for kind, _, _, _, offset, end in messages(data):
        if offset + _HEADER.size > end:
            continue
        given = offset + _HEADER.size
        if kind == _SUBSYSTEM | _NEWGEN:
            by = text_of(attributes(data, given, end), _GEN_PROC_NAME)
            found = {removal if removal.by else replace(removal, by=by) for removal in found}
        elif kind in _REMOVALS and (family := _FAMILY.get(data[offset])):
            table, chain = (text_of(attributes(data, given, end), name) for name in _REMOVALS[kind])
            found.add(Removal(family, table, chain))
    return found


def _terminated(text: str) -> bytes:
    return text.encode() + b"\0"
