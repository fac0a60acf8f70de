"""Reader of the iptables-legacy tables, directly from the kernel: no process, no lock, under 1 ms.

The layout is from linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h and
linux/netfilter/x_tables.h. Only existing tables are read: the request would create a missing one.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from flanneld.model import Family
from flanneld.network.firewall.fate import ACCEPT, MASQUERADE, RETURN, Rule, Test
from flanneld.network.firewall.rules import OWN_CHAINS, Chain, Rules
from flanneld.network.rtnetlink.netlink import MalformedNetlink, unpack

_NAMES: Mapping[Family, str] = {4: "ip_tables_names", 6: "ip6_tables_names"}
_LEVEL: Mapping[Family, int] = {4: socket.SOL_IP, 6: socket.IPPROTO_IPV6}
_SO_GET_INFO, _SO_GET_ENTRIES = 64, 65
_HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")

_NAME = struct.Struct("32s")
#: struct ipt_getinfo: name, valid hooks, start of each hook, its policy, number of entries, bytes.
_INFO = struct.Struct("@32sI5I5III")
_GET_ENTRIES = struct.Struct("@32sI0Q")
#: struct ipt_entry and ip6t_entry: two addresses, their masks, interfaces, protocol, flags, inversions, the
#: offset of the target and that of the next entry.
_ENTRY: Mapping[Family, struct.Struct] = {
    4: struct.Struct("@4s4s4s4s64sHBBIHHI2Q"),
    6: struct.Struct("@16s16s16s16s64sHxBB3xIHHI2Q"),
}
_INVERT_SOURCE, _INVERT_DESTINATION = 0x08, 0x10
#: Header of a match or target: size, name and revision.
_EXTENSION = struct.Struct("@H29sB")
_VERDICT = struct.Struct("@i")
_VERDICTS = {-1: "DROP", -2: ACCEPT, -4: "QUEUE", -5: RETURN}
_MARK = struct.Struct("@IIB")
#: Offset of the flags in MASQUERADE's data.
_NAT_FLAGS: Mapping[Family, struct.Struct] = {4: struct.Struct("@4xI"), 6: struct.Struct("@I")}
_RANDOM_FULLY = 1 << 4
#: Name of the target at the head of a user-defined chain; the chain's name follows it.
_ERROR = b"ERROR".ljust(29, b"\0")

_ATTEMPTS = 10


class _Entry(NamedTuple):
    """Fields of an entry, in the order of ``_ENTRY``."""

    source: bytes
    destination: bytes
    source_mask: bytes
    destination_mask: bytes
    interfaces: bytes
    protocol: int
    flags: int
    inversions: int
    cache: int
    target: int
    next: int
    comefrom: int
    packets: int
    bytes: int


def tables(family: Family) -> set[str]:
    """Return the existing tables of this network namespace. Raises ``PermissionError`` except for root."""
    try:
        return set(Path("/proc/thread-self/net", _NAMES[family]).read_text().split())
    except FileNotFoundError:
        return set()  # no such tables, or module not loaded


def read(family: Family, chains: Iterable[Chain], there: Collection[str] | None = None) -> Rules:
    """Return the rules of the chains that exist. Raises ``OSError``.

    Tables in ``there`` are created if they do not exist. By default only existing ones are read.
    """
    there = tables(family) if there is None else there
    found: dict[Chain, tuple[Rule, ...]] = {}
    desired = list(chains)
    for table in sorted({table for table, _ in desired if table in there}):
        snapshot = _take(family, table)
        for chain in desired:
            if chain[0] == table and (rules := snapshot.rules(chain[1])) is not None:
                found[chain] = rules
    return found


def has_chain(family: Family, chain: Chain) -> bool:
    return chain in read(family, [chain])


def count_rules(family: Family) -> int:
    """Return the number of rules that are not flannel's. Raises ``OSError``."""
    ours = sum(len(rules) + 1 for rules in read(family, OWN_CHAINS).values())
    return max(0, sum(_take(family, table).count() for table in tables(family)) - ours)


class TableDump(Struct, frozen=True, gc=False):
    """Contents of one table. ``hooks`` maps built-in chains to the offsets of first rule and policy.

    All methods raise ``MalformedNetlink``, an ``OSError``, for invalid data.
    """

    family: Family
    hooks: Mapping[str, tuple[int, int]]
    entries: int
    data: bytes

    def rules(self, chain: str) -> tuple[Rule, ...] | None:
        """Return the rules of a chain, None if it does not exist."""
        if chain in self.hooks:
            start, policy = self.hooks[chain]
            return tuple(self._rule(offset) for offset in self._walk(start) if offset < policy)
        head = self._head(chain)
        if head is None:
            return None
        offsets = list(self._walk(head + self._entry(head).next))
        return tuple(self._rule(offset) for offset in offsets[:-1])  # the last entry is the implicit return

    def count(self) -> int:
        """Return the number of rules, without policies and the two entries around each user-defined chain."""
        own = self.data.count(_ERROR) - 2  # the entry at the end of the table has this name twice
        return self.entries - len(self.hooks) - 2 * own - 1

    def _head(self, chain: str) -> int | None:
        """Return the offset of a chain's first entry, or None."""
        name = chain.encode() + b"\0"
        at = self.data.find(name)
        while at >= 0:
            target = at - _EXTENSION.size
            if self.data[target + 2 : target + 2 + len(_ERROR)] == _ERROR:
                return target - _ENTRY[self.family].size
            at = self.data.find(name, at + 1)
        return None

    def _walk(self, offset: int) -> Iterator[int]:
        """Yield the offsets of the entries from here to the end of the chain."""
        while offset < len(self.data):
            entry = self._entry(offset)
            if self._name(offset + entry.target) == "ERROR":
                return
            yield offset
            offset += entry.next

    def _entry(self, offset: int) -> _Entry:
        form = _ENTRY[self.family]
        entry = _Entry(*_unpack(form, self.data, offset))
        if not form.size <= entry.target < entry.next:
            raise MalformedNetlink
        return entry

    def _name(self, offset: int) -> str:
        return _string(_unpack(_EXTENSION, self.data, offset)[1])

    def _rule(self, offset: int) -> Rule:
        entry = self._entry(offset)
        extra = [
            name
            for name, present in (
                ("interface", any(entry.interfaces)),
                ("protocol", entry.protocol),
                ("flags", entry.flags),
                ("inversion", entry.inversions & ~(_INVERT_SOURCE | _INVERT_DESTINATION)),
            )
            if present
        ]
        tests = [
            *_side("source", entry.source, entry.source_mask, entry.inversions & _INVERT_SOURCE, extra),
            *_side(
                "destination",
                entry.destination,
                entry.destination_mask,
                entry.inversions & _INVERT_DESTINATION,
                extra,
            ),
        ]
        comment = ""
        for name, data in self._matches(offset, entry):
            if name == "comment":
                comment = _string(data)
            elif name == "mark" and not (given := _unpack(_MARK, data))[2]:
                tests.append(Test("mark", ((given[0], given[1]),)))
            else:
                extra.append(name)
        verdict, random = self._target(offset + entry.target, offset + entry.next, extra)
        return Rule(verdict, tuple(tests), comment, random, " ".join(extra))

    def _matches(self, offset: int, entry: _Entry) -> Iterator[tuple[str, bytes]]:
        at, end = offset + _ENTRY[self.family].size, offset + entry.target
        while at < end:
            size, name, _ = _unpack(_EXTENSION, self.data, at)
            if size < _EXTENSION.size:
                raise MalformedNetlink
            yield _string(name), self.data[at + _EXTENSION.size : at + size]
            at += size

    def _target(self, offset: int, end: int, extra: list[str]) -> tuple[str, bool]:
        """Return the verdict, and True if source ports are fully random."""
        name = self._name(offset)
        data = self.data[offset + _EXTENSION.size : end]
        if not name:
            return self._standard(_unpack(_VERDICT, data)[0], end), False
        flags = _unpack(_NAT_FLAGS[self.family], data)[0] if name == MASQUERADE else 0
        if flags & ~_RANDOM_FULLY:
            extra.append("flags of MASQUERADE")
        return name, bool(flags)

    def _standard(self, verdict: int, following: int) -> str:
        if verdict < 0:
            return _VERDICTS.get(verdict, "")
        if verdict == following:
            return ""  # a rule without a target only counts packets
        for name, (start, _) in self.hooks.items():
            if verdict == start:
                return name
        head = self.data.rfind(_ERROR, 0, verdict)
        return _string(self.data[head + len(_ERROR) + 1 : verdict])


def _take(family: Family, table: str) -> TableDump:
    """Read an existing table."""
    with socket.socket(_AF[family], socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as kernel:
        for _ in range(_ATTEMPTS):
            given = _INFO.unpack(_ask(kernel, family, _SO_GET_INFO, _NAME.pack(table.encode()), _INFO.size))
            valid, starts, policies, entries, size = given[1], given[2:7], given[7:12], given[12], given[13]
            request = _GET_ENTRIES.pack(table.encode(), size)
            try:
                answer = _ask(kernel, family, _SO_GET_ENTRIES, request, _GET_ENTRIES.size + size)
            except BlockingIOError:
                continue  # the table changed between the two requests
            places = zip(_HOOKS, starts, policies, strict=True)
            hooks = {
                name: (start, policy)
                for number, (name, start, policy) in enumerate(places)
                if valid & 1 << number
            }
            return TableDump(family, hooks, entries, answer[_GET_ENTRIES.size :])
    raise OSError(errno.EAGAIN, f"table {table} changes all the time")


_AF: Mapping[Family, int] = {4: socket.AF_INET, 6: socket.AF_INET6}


def _ask(kernel: socket.socket, family: Family, option: int, request: bytes, size: int) -> bytes:
    """Call ``getsockopt`` with an input buffer, which Python's version lacks."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(request, size)
    length = ctypes.c_uint32(size)
    if libc.getsockopt(kernel.fileno(), _LEVEL[family], option, buffer, ctypes.byref(length)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw


def _side(field: str, address: bytes, mask: bytes, negated: int, extra: list[str]) -> Iterator[Test]:
    """Yield the test of an address, if there is one."""
    bits, width = int.from_bytes(mask), 8 * len(mask)
    length = bits.bit_count()
    if bits != (1 << width) - (1 << width - length):
        extra.append("mask")
    elif length or negated:
        yield Test(field, (ip_network((address, length)),), bool(negated))


def _unpack(form: struct.Struct, data: bytes, offset: int = 0) -> tuple[Any, ...]:
    return unpack(form, data, offset, len(data))


def _string(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")
