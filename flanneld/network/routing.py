"""Policy rules, ip-rule(8), and route lookups in rtnetlink's format (pure).

Source: linux/fib_rules.h and linux/rtnetlink.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.rtnetlink.messages import (
    AF,
    DST,
    FAMILY,
    RT_TABLE_MAIN,
    RTA_GATEWAY,
    RTA_OIF,
    RTA_TABLE,
    RTMSG,
    RTN_UNICAST,
    address_of,
    decode_plain_route,
    network_of,
    number,
)
from flanneld.network.rtnetlink.netlink import MalformedNetlink, attribute, attributes, text_of, u32, unpack

RTM_GETRULE = 34
#: struct fib_rule_hdr: family, lengths of destination and source, tos, table, two reserved, action, flags.
_HEADER = struct.Struct("=BBBBBBBBI")
_DST, _SRC, _IIF, _PRIORITY, _MARK, _TABLE, _MASK, _OIF, _PROTOCOL = 1, 2, 3, 6, 10, 15, 16, 17, 22
_SPORTS, _DPORTS = 23, 24
#: struct fib_rule_port_range: first and last port.
_PORT_RANGE = struct.Struct("=HH")
_ACTIONS = {2: "goto", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
_INVERT = 2
#: Priorities of the rules that every host has.
MAIN_RULE = 32766
_DEFAULT = frozenset({0, MAIN_RULE, 32767})
_TABLES = {253: "default", 254: "main", 255: "local"}


class PolicyRule(Struct, frozen=True, gc=False):
    """One rule. ``text`` is the rule as ``ip rule`` takes it, without its priority."""

    family: Family
    priority: int
    text: str
    source: IPNetwork | None = None
    destination: IPNetwork | None = None
    iif: str = ""
    #: Mark and mask of packets that it is about.
    mark: tuple[int, int] = (0, 0)
    #: Number of their IP protocol, and the first and last of their destination's ports; 0 for any.
    protocol: int = 0
    ports: tuple[int, int] = (0, 0)
    #: It has a condition that is not looked at here; it is about the packets that do not fulfil them all.
    is_narrow: bool = False
    is_inverted: bool = False

    @property
    def is_default(self) -> bool:
        return self.priority in _DEFAULT

    def may_match(
        self,
        target: IPAddress,
        source: IPAddress | None,
        iif: str,
        mark: int = 0,
        protocol: int = 0,
        port: int = 0,
    ) -> bool:
        """Return True if the rule is about a packet, as far as its conditions are looked at here."""
        sides = ((self.destination, target), (self.source, source))
        if self.family != target.version:
            return False
        value, mask = self.mark
        is_inside = all(net is None or (ip is not None and ip in net) for net, ip in sides)
        is_its_kind = self.protocol in (0, protocol) and self.ports[0] <= port <= (self.ports[1] or port)
        fulfils = is_inside and self.iif in ("", iif) and mark & mask == value and is_its_kind
        return not fulfils if self.is_inverted else fulfils and not self.is_narrow


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
    mark = number(found.get(_MARK)), number(found.get(_MASK))
    is_inverted = bool(flags & _INVERT)
    protocol = number(found.get(_PROTOCOL))
    sports, dports = (_ports(found.get(each, bytes(4))) for each in (_SPORTS, _DPORTS))
    words = [
        *(("not",) if is_inverted else ()),
        *(("from", str(source)) if source else ("from", "all")),
        *(("to", str(destination)) if destination else ()),
        *(("fwmark", f"{mark[0]:#x}/{mark[1]:#x}") if any(mark) else ()),
        *(("iif", iif) if iif else ()),
        *(("oif", oif) if oif else ()),
        *(("ipproto", IP_PROTOCOLS.get(protocol, str(protocol))) if protocol else ()),
        *(
            word
            for name, (first, last) in (("sport", sports), ("dport", dports))
            if last
            for word in (name, str(first) if first == last else f"{first}-{last}")
        ),
        _ACTIONS.get(action, "lookup"),
        *((_TABLES.get(table, str(table)),) if action == 1 else ()),
    ]
    narrow, priority, text = bool(oif or tos or sports[1]), number(found.get(_PRIORITY)), " ".join(words)
    return PolicyRule(
        FAMILY[family],
        priority,
        text,
        source,
        destination,
        iif,
        mark,
        protocol,
        dports,
        is_narrow=narrow,
        is_inverted=is_inverted,
    )


def _ports(data: bytes) -> tuple[int, int]:
    first, last = unpack(_PORT_RANGE, data, 0, len(data))
    return first, last


#: Numbers of IP protocols with which a route may be looked up, each with its name.
ICMP, TCP, UDP, ICMPV6 = 1, 6, 17, 58
IP_PROTOCOLS = {ICMP: "icmp", TCP: "tcp", UDP: "udp", ICMPV6: "ipv6-icmp"}
_RTA_DST, _RTA_SRC, _RTA_IIF, _RTA_PREFSRC, _RTA_MULTIPATH, _RTA_MARK, _RTA_VIA = 1, 2, 3, 7, 9, 16, 18
#: Of Linux 4.17; an older one has no rules about them either.
_RTA_IP_PROTO, _RTA_DPORT = 27, 29
RT_TABLE_LOCAL = 255
RTN_LOCAL, RTN_BROADCAST, RTN_ANYCAST = 2, 3, 4
#: Flags: of a request for the route itself (Linux 4.13), and of an answer with one packet's way.
_RTM_F_FIB_MATCH, _RTM_F_CLONED = 0x2000, 0x200
#: struct rtnexthop: length, flags, hops, interface; attributes follow.
_RTNEXTHOP = struct.Struct("=HBBi")


#: Length in bytes of the last attribute of an IPv4 route with one next hop: its interface.
ENDING = 8


def interface_ending(index: int) -> bytes:
    """Return the last bytes of an IPv4 route through an interface."""
    return u32(RTA_OIF, index)


class RoutedPacket(Struct, frozen=True, gc=False):
    """What a route is looked up for. One that this host passes on arrives by ``iif``, an interface's index.

    ``mark`` is the packet filter's, ``protocol`` and ``port`` are IP's; 0 is none of each.
    """

    target: IPAddress
    source: IPAddress | None = None
    iif: int = 0
    mark: int = 0
    protocol: int = 0
    port: int = 0


def lookup_request(packet: RoutedPacket) -> bytes:
    """Return the request for a route lookup.

    With the interface by which it arrives, the kernel looks the packet up as one to be passed on.
    """
    raw, source = packet.target.packed, packet.source
    length = 8 * len(raw) if source else 0
    numbers = ((_RTA_MARK, packet.mark), (_RTA_IIF, packet.iif))
    return b"".join(
        (
            RTMSG.pack(AF[packet.target.version], 8 * len(raw), length, 0, 0, 0, 0, 0, 0),
            DST[len(raw)] + raw,
            attribute(_RTA_SRC, source.packed) if source else b"",
            *(u32(kind, value) for kind, value in numbers if value),
            attribute(_RTA_IP_PROTO, bytes([packet.protocol])) if packet.protocol else b"",
            attribute(_RTA_DPORT, packet.port.to_bytes(2, "big")) if packet.port else b"",
        )
    )


def match_request(target: IPAddress) -> bytes:
    """Return the request for the route that a packet to ``target`` would take."""
    raw = target.packed
    return (
        RTMSG.pack(AF[target.version], 8 * len(raw), 0, 0, 0, 0, 0, 0, _RTM_F_FIB_MATCH) + DST[len(raw)] + raw
    )


class LookupResult(Struct, frozen=True, gc=False):
    """Result of a lookup: output interface, source address, gateway and type (RTN_*)."""

    index: int
    source: IPAddress | None
    gateway: IPAddress | None
    kind: int


def decode_lookup(data: bytes, offset: int, end: int) -> LookupResult:
    """Decode the result of a lookup. Raises ``MalformedNetlink``."""
    kind = unpack(RTMSG, data, offset, end)[7]
    found = attributes(data, offset + RTMSG.size, end)
    source = found.get(_RTA_PREFSRC)
    return LookupResult(
        number(found.get(RTA_OIF)), address_of(source) if source else None, _gateway(found), kind
    )


def decode_destination(data: bytes, offset: int, end: int) -> tuple[str, int, int] | None:
    """Return destination, interface and type (RTN_*) of a main-table route.

    Return None for default routes and other tables.
    """
    plain = decode_plain_route(data, offset, end)
    if plain is not None:
        return plain.destination, plain.index, RTN_UNICAST
    family, length, _, _, _, _, _, kind, _ = unpack(RTMSG, data, offset, end)
    found = attributes(data, offset + RTMSG.size, end)
    raw = found.get(_RTA_DST)
    if raw is None or family not in FAMILY or number(found.get(RTA_TABLE)) != RT_TABLE_MAIN:
        return None
    return f"{address_of(raw)}/{length}", number(found.get(RTA_OIF)), kind


def decode_default_route(data: bytes, offset: int, end: int) -> int | None:
    """Return the interface of a default route, 0 for none or several; None for any other route."""
    family, length, _, _, _, _, _, kind, _ = unpack(RTMSG, data, offset, end)
    if length or kind != RTN_UNICAST or family not in FAMILY:
        return None
    found = attributes(data, offset + RTMSG.size, end)
    return number(found.get(RTA_OIF)) if number(found.get(RTA_TABLE)) == RT_TABLE_MAIN else None


class SeenHostRoute(Struct, frozen=True, gc=False):
    """A unicast route of the main table, of any metric. A next hop is an interface and a gateway.

    ``destination`` is None for a default route.
    """

    destination: IPNetwork | None
    protocol: int
    hops: tuple[tuple[int, IPAddress | None], ...]


def decode_host_route(data: bytes, offset: int, end: int) -> SeenHostRoute | None:
    """Return a unicast route of the main table, else None. Raises ``MalformedNetlink``."""
    table = unpack(RTMSG, data, offset, end)[4]
    return decode_match(data, offset, end) if table == RT_TABLE_MAIN else None


def decode_match(data: bytes, offset: int, end: int) -> SeenHostRoute | None:
    """Return a unicast route of any table, else None. Raises ``MalformedNetlink``.

    An older kernel tells no destination: that counts as a default route.
    """
    family, length, _, _, _, protocol, _, kind, flags = unpack(RTMSG, data, offset, end)
    if kind != RTN_UNICAST or family not in FAMILY:
        return None
    found = attributes(data, offset + RTMSG.size, end)
    raw = found.get(_RTA_DST)
    destination = network_of(raw, length) if raw is not None and not flags & _RTM_F_CLONED else None
    several = found.get(_RTA_MULTIPATH)
    hops = tuple(_hops(several)) if several else ((number(found.get(RTA_OIF)), _gateway(found)),)
    return SeenHostRoute(destination, protocol, hops)


def _hops(several: bytes) -> Iterator[tuple[int, IPAddress | None]]:
    offset = 0
    while offset < len(several):
        length, _, _, index = unpack(_RTNEXTHOP, several, offset, len(several))
        if length < _RTNEXTHOP.size:
            raise MalformedNetlink
        yield index, _gateway(attributes(several, offset + _RTNEXTHOP.size, offset + length))
        offset += (length + 3) & ~3


def _gateway(found: dict[int, bytes]) -> IPAddress | None:
    # struct rtvia, the IPv6 gateway of an IPv4 route: two bytes of family, then the address.
    raw = found.get(RTA_GATEWAY) or found.get(_RTA_VIA, b"")[2:]
    return address_of(raw) if raw else None


def local_request(family: Family) -> bytes:
    """Return the body of a dump of the local table."""
    return RTMSG.pack(AF[family], 0, 0, 0, RT_TABLE_LOCAL, 0, 0, 0, 0) + u32(RTA_TABLE, RT_TABLE_LOCAL)


def decode_local(data: bytes, offset: int, end: int) -> tuple[int, IPNetwork, int] | None:
    """Return type (RTN_*), network and interface of a local, broadcast or anycast route, else None."""
    family, length, _, _, table, _, _, kind, _ = unpack(RTMSG, data, offset, end)
    if table != RT_TABLE_LOCAL or kind not in (RTN_LOCAL, RTN_BROADCAST, RTN_ANYCAST):
        return None
    found = attributes(data, offset + RTMSG.size, end)
    raw = found.get(_RTA_DST)
    if raw is None or family not in FAMILY:
        return None
    return kind, network_of(raw, length), number(found.get(RTA_OIF))
