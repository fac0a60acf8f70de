"""Policy rules for route lookups, ip-rule(8), in rtnetlink's format (linux/fib_rules.h; pure)."""

from __future__ import annotations

import struct

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.rtnetlink.messages import AF, FAMILY, network_of, number
from flanneld.network.rtnetlink.netlink import MalformedNetlink, attributes, text_of, unpack

RTM_GETRULE = 34
#: struct fib_rule_hdr: family, lengths of destination and source, tos, table, two reserved, action, flags.
_HEADER = struct.Struct("=BBBBBBBBI")
_DST, _SRC, _IIF, _PRIORITY, _MARK, _TABLE, _OIF = 1, 2, 3, 6, 10, 15, 17
_ACTIONS = {2: "goto", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
_INVERT = 2
#: Priorities of the rules that every host has.
_DEFAULT = frozenset({0, 32766, 32767})
_TABLES = {253: "default", 254: "main", 255: "local"}


class PolicyRule(Struct, frozen=True, gc=False):
    """One rule. ``text`` is the rule as ``ip rule`` takes it, without its priority."""

    family: Family
    priority: int
    text: str
    source: IPNetwork | None = None
    destination: IPNetwork | None = None
    iif: str = ""
    #: It has a condition that is not looked at here, such as a mark.
    is_narrow: bool = False

    @property
    def is_default(self) -> bool:
        return self.priority in _DEFAULT

    def may_match(self, target: IPAddress, source: IPAddress | None, iif: str) -> bool:
        """Return True if a packet has these properties of the rule; an unmarked packet has no mark."""
        sides = ((self.destination, target), (self.source, source))
        if self.is_narrow or self.family != target.version:
            return False
        if any(net is not None and (ip is None or ip not in net) for net, ip in sides):
            return False
        return self.iif in ("", iif)


def request(family: Family) -> bytes:
    """Return the body of a dump of the rules."""
    return _HEADER.pack(AF[family], 0, 0, 0, 0, 0, 0, 0, 0)


def decode(data: bytes, offset: int, end: int) -> PolicyRule:
    """Decode a rule. Raises ``MalformedNetlink``."""
    family, to_length, from_length, tos, table, _, _, action, flags = unpack(_HEADER, data, offset, end)
    if family not in FAMILY:
        raise MalformedNetlink
    found = attributes(data, offset + _HEADER.size, end)
    source = network_of(found[_SRC], from_length) if _SRC in found else None
    destination = network_of(found[_DST], to_length) if _DST in found else None
    iif, oif = text_of(found, _IIF), text_of(found, _OIF)
    table = number(found.get(_TABLE)) or table
    words = [
        *(("from", str(source)) if source else ("from", "all")),
        *(("to", str(destination)) if destination else ()),
        *(("fwmark", hex(number(found[_MARK]))) if _MARK in found else ()),
        *(("iif", iif) if iif else ()),
        *(("oif", oif) if oif else ()),
        _ACTIONS.get(action, "lookup"),
        *((_TABLES.get(table, str(table)),) if action == 1 else ()),
    ]
    narrow = bool(oif or tos or flags & _INVERT or number(found.get(_MARK)))
    return PolicyRule(
        FAMILY[family], number(found.get(_PRIORITY)), " ".join(words), source, destination, iif, narrow
    )
