"""Queries of nf_tables over netlink, and notifications of removals.

A query takes microseconds. A command takes milliseconds, on a node of a large cluster seconds, and may create
tables. Source: linux/netfilter/nfnetlink.h and nf_tables.h.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family
from flanneld.network.firewall.rules import JUMPS, OWN_CHAINS, Chain
from flanneld.network.rtnetlink.netlink import (
    DumpInterrupted,
    NetlinkSocket,
    attribute,
    attributes,
    messages,
    number_of,
    text_of,
)
from flanneld.runtime import waits
from flanneld.state.resources import GUARD

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10 << 8
_NEWTABLE, _GETTABLE, _DELTABLE, _NEWCHAIN, _GETCHAIN, _DELCHAIN, _NEWRULE, _GETRULE, _DELRULE = range(9)
_NEWGEN = 15
_TABLE_NAME, _CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY = 1, 1, 3, 4, 5
_RULE_TABLE, _RULE_CHAIN = 1, 2
_GEN_PROC_NAME = 3
#: Attribute type that never occurs.
_NOTHING = -1
_HOOK_NUMBER, _HOOK_PRIORITY, _HOOK_DEVICE = 1, 2, 3
_CHAIN_TYPE = 7
_NFNLGRP_NFTABLES = 7
_NF_DROP = 0

#: Kernel numbers of the families (NFPROTO_*).
_PROTOCOL: dict[Family, int] = {4: 2, 6: 10}
_INET = 1
_FAMILY: dict[int, Family] = {2: 4, 10: 6}
#: Families of tables, as nft(8) names them.
_TABLE_FAMILY = {1: "inet", 2: "ip", 5: "netdev", 7: "bridge", 10: "ip6"}
#: Hooks by their numbers (NF_INET_*), and those of a netdev table (NF_NETDEV_*).
_HOOKS, _NETDEV_HOOKS = (
    ("prerouting", "input", "forward", "output", "postrouting", "ingress"),
    ("ingress", "egress"),
)
_NETDEV, _BRIDGE = 5, 7

#: Errors for a subsystem that the kernel does not have.
_NOT_THERE = (errno.EINVAL, errno.EOPNOTSUPP)

_DUMP_TRIES = 5
#: Seconds within which the kernel names the author of a change it has notified.
SAME_BREATH = 0.1
#: Bytes: kube-proxy of a large cluster rewrites tens of thousands of rules at a time.
_RECEIVE_BUFFER = 4 << 20
_HEADER = struct.Struct(">BBH")


class NoNetfilter(OSError):
    """Error for a kernel without nf_tables."""


class Hooked(Struct, frozen=True, gc=False):
    """A base chain. ``table`` is nft(8)'s name for it: ``inet filter``; ``device`` is for those of netdev.

    Of the chains at a hook, those of lower ``priority`` come first.
    """

    table: str
    chain: str
    hook: str
    type: str
    drops: bool
    priority: int = 0
    device: str = ""


class Netfilter:
    """Queries of nf_tables in the creating thread's network namespace. All methods raise ``OSError``."""

    def __init__(self) -> None:
        try:
            self._socket = NetlinkSocket(protocol=_NETLINK_NETFILTER)
        except OSError as error:
            if error.errno != errno.EPROTONOSUPPORT:
                raise
            raise NoNetfilter(error.errno, "this kernel has no netlink for netfilter") from error

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
        """Return the number of IPv4 and IPv6 rules that are not flannel's."""
        others, ways = 0, set()
        for protocol in _FAMILY:
            with suppress(DumpInterrupted):  # a few more or less
                for given in self._dump(_GETRULE, protocol):
                    chain = (text_of(given, _RULE_TABLE), text_of(given, _RULE_CHAIN))
                    if chain not in OWN_CHAINS:
                        others += 1
                    elif chain in JUMPS:
                        ways.add((protocol, chain))
        return max(0, others - len(ways))

    def hooked(self, family: Family) -> Iterator[Hooked]:
        """Yield the base chains that packets of a family pass; hooks of a bridge are ``bridge input``."""
        for protocol in (_PROTOCOL[family], _INET, _NETDEV, _BRIDGE):
            for given in self._whole(_GETCHAIN, protocol):
                raw = given.get(_CHAIN_HOOK)
                if raw is None:
                    continue
                hook = attributes(raw, 0, len(raw))
                number = number_of(hook, _HOOK_NUMBER)
                hooks = _NETDEV_HOOKS if protocol == _NETDEV else _HOOKS
                if number is not None and number < len(hooks):
                    yield Hooked(
                        f"{_TABLE_FAMILY[protocol]} {text_of(given, _CHAIN_TABLE)}",
                        text_of(given, _CHAIN_NAME),
                        f"bridge {hooks[number]}" if protocol == _BRIDGE else hooks[number],
                        text_of(given, _CHAIN_TYPE),
                        number_of(given, _CHAIN_POLICY) == _NF_DROP,
                        int.from_bytes(hook.get(_HOOK_PRIORITY, b""), signed=True),
                        text_of(hook, _HOOK_DEVICE),
                    )

    def _has(self, kind: int, family: Family, body: bytes) -> bool:
        try:
            with _with_nf_tables():
                self._socket.ask(_SUBSYSTEM | kind, _HEADER.pack(_PROTOCOL[family], 0, 0) + body)
        except FileNotFoundError:
            return False
        return True

    def _whole(self, kind: int, protocol: int, body: bytes = b"") -> list[dict[int, bytes]]:
        """Return the attributes of all objects, none missing because of a change meanwhile."""
        for _ in range(_DUMP_TRIES - 1):
            with suppress(DumpInterrupted):
                return list(self._dump(kind, protocol, body))
        return list(self._dump(kind, protocol, body))

    def _dump(self, kind: int, protocol: int, body: bytes = b"") -> Iterator[dict[int, bytes]]:
        with _with_nf_tables():
            request = _HEADER.pack(protocol, 0, 0) + body
            for data, offset, end in self._socket.dump(_SUBSYSTEM | kind, request):
                yield attributes(data, offset + _HEADER.size, end)


@contextmanager
def _with_nf_tables() -> Iterator[None]:
    """Run the block. Raises ``NoNetfilter`` if the kernel lacks nf_tables."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_THERE:
            raise NoNetfilter(error.errno, "this kernel has no nf_tables") from None
        raise


def has_guard(family: Family) -> bool:
    """Return True if a guard of the tunnel is in the kernel."""
    try:
        with Netfilter() as netfilter:
            return netfilter.has_table(family, GUARD)
    except OSError:
        return False


class Removal(Struct, frozen=True, gc=False):
    """A removal from nf_tables, or a possible one if notifications were lost.

    Empty ``table`` and ``chain`` and a ``family`` of None stand for any.
    """

    family: Family | None = None
    table: str = ""
    chain: str = ""
    by: str = ""


class Removals:
    """Listener for removals from nf_tables by any program, our own commands included."""

    def __init__(self, notifications: NetlinkSocket | None = None) -> None:
        self._socket = notifications or NetlinkSocket(
            [_NFNLGRP_NFTABLES], _RECEIVE_BUFFER, protocol=_NETLINK_NETFILTER
        )

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> set[Removal]:
        """Return the removals since the last call."""
        found: set[Removal] = set()
        while True:
            try:
                found = _fold(found, self._socket.receive())
            except BlockingIOError:
                if not self._goes_on(found):
                    return found
            except OSError as failure:
                if failure.errno != errno.ENOBUFS:
                    raise
                found.add(Removal())

    def _goes_on(self, found: set[Removal]) -> bool:
        """Return True if more notifications of a transaction follow. A wake-up may come in their middle."""
        nameless = any(removal.family and not removal.by for removal in found)
        return nameless and waits.readable(self._socket.fileno(), SAME_BREATH)


#: Removal messages, with the attributes of the table's and the chain's name.
_REMOVALS: dict[int, tuple[int, int]] = {
    _SUBSYSTEM | _DELTABLE: (_TABLE_NAME, _NOTHING),
    _SUBSYSTEM | _DELCHAIN: (_CHAIN_TABLE, _CHAIN_NAME),
    _SUBSYSTEM | _DELRULE: (_RULE_TABLE, _RULE_CHAIN),
}


def _fold(found: set[Removal], data: bytes) -> set[Removal]:
    """Add the removals in one datagram. The last message of a transaction names the program."""
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
