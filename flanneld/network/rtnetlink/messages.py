"""Resources as rtnetlink messages (linux/rtnetlink.h, linux/neighbour.h, linux/if_addr.h).

Encoders and decoders only; ``kernel`` does the I/O. Decoders take the data and the start and end of one
message's body, and raise ``MalformedNetlink`` for an invalid message.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork, dotted
from flanneld.network.rtnetlink.domain import SeenRoute
from flanneld.network.rtnetlink.netlink import (
    HEADER,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
    MalformedNetlink,
    attributes,
    u32,
    unpack,
)
from flanneld.state.resources import (
    FDB,
    NEIGHBORS,
    ROUTES,
    Address,
    Blackhole,
    FdbEntry,
    Key,
    Neighbor,
    Resource,
    Route,
    fdb_text,
    neighbor_text,
    route_text,
)

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30

# Multicast groups, RTNLGRP_*.
GROUP_LINK, GROUP_NEIGH = 1, 3
GROUP_IPV4_ADDRESS, GROUP_IPV4_ROUTE, GROUP_IPV6_ADDRESS, GROUP_IPV6_ROUTE = 5, 7, 9, 11

AF_BRIDGE = 7
AF: dict[Family, int] = {4: 2, 6: 10}
FAMILY: dict[int, Family] = {2: 4, 10: 6}

NUD_PERMANENT, NTF_SELF = 0x80, 0x02
NUD_VALID = 0xDE  # it has a MAC address (net/neighbour.h)
_NUD_UNRESOLVED = 0x01 | 0x20  # incomplete or failed
RTN_UNICAST, RTN_BLACKHOLE, RTN_UNREACHABLE = 1, 6, 7
RT_TABLE_MAIN, RTNH_F_ONLINK = 254, 4
RT_SCOPE_UNIVERSE, RT_SCOPE_NOWHERE = 0, 255
#: Lowest priority: any other route is preferred, above all the connected one of the containers' bridge.
BLACKHOLE_METRIC = 65535
_RTM_F_CLONED = 0x200
_RTA_DST, RTA_OIF, RTA_GATEWAY, _RTA_PRIORITY, RTA_TABLE = 1, 4, 5, 6, 15
_NDA_DST, _NDA_LLADDR, _NDA_CACHEINFO, _NDA_PROBES, _NDA_PORT, _NDA_VNI, _NDA_IFINDEX = 1, 2, 3, 4, 6, 7, 8
#: Attributes that the kernel only sends if they differ from the device's (drivers/net/vxlan, vxlan_fdb_info).
_OVERRIDES = frozenset({_NDA_PORT, _NDA_VNI, _NDA_IFINDEX})
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
#: Flag of an IPv6 address that another host has (linux/if_addr.h).
IFA_F_DADFAILED = 0x08
#: Metric that IPv6 substitutes for 0 (linux/ipv6_route.h, IP6_RT_PRIO_USER).
IPV6_DEFAULT_METRIC = 1024

RTMSG = struct.Struct("=BBBBBBBBI")
_NDMSG = struct.Struct("=BxxxiHBB")
_IFADDRMSG = struct.Struct("=BBBBi")

# Precomputed attribute headers by payload size: 4 and 16 for addresses, 6 for a MAC.
_ATTR = struct.Struct("=HH")
DST = {size: _ATTR.pack(4 + size, 1) for size in (4, 16)}
_GATEWAY = {size: _ATTR.pack(4 + size, RTA_GATEWAY) for size in (4, 16)}
_LOCAL = {size: _ATTR.pack(4 + size, _IFA_LOCAL) for size in (4, 16)}
_LLADDR = _ATTR.pack(10, _NDA_LLADDR)
_CACHEINFO = _ATTR.pack(20, _NDA_CACHEINFO)
_OIF = struct.Struct("=HHI")
_IPV6_METRIC = struct.pack("=HHI", 8, _RTA_PRIORITY, IPV6_DEFAULT_METRIC)

IndexOf = Callable[[str], int]
NameOf = Callable[[int], str | None]


def mac_bytes(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def mac_text(raw: bytes) -> str:
    return raw.hex(":")


def address_of(raw: bytes) -> IPAddress:
    """Return an address from 4 or 16 bytes in network order. Raises ``MalformedNetlink``."""
    if len(raw) == 4:
        return IPv4Address(raw)
    if len(raw) == 16:
        return IPv6Address(raw)
    raise MalformedNetlink


def network_of(raw: bytes, length: int) -> IPNetwork:
    """Return a network from address and prefix length, without host bits. Raises ``MalformedNetlink``."""
    if length > 8 * len(raw):
        raise MalformedNetlink
    number = int(address_of(raw))
    kind = IPv4Network if len(raw) == 4 else IPv6Network
    return kind((number, length), strict=False)


# ---- encoding --------------------------------------------------------------------------------


class CreateMode(Enum):
    """Mode of creation: replace what has the same key, fail if it exists, or insert in front."""

    REPLACE = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_REPLACE
    EXCLUSIVE = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL
    #: Only IPv4 has several routes to a network; the first one is used.
    IN_FRONT = NLM_F_REQUEST | NLM_F_CREATE


def encode(
    resource: Resource,
    index_of: IndexOf,
    protocol: int,
    seq: int,
    *,
    drop: bool,
    mode: CreateMode = CreateMode.REPLACE,
) -> bytes:
    """Return the message that creates or removes a resource, except links (see ``devices``).

    ``protocol`` is the route's RTPROT_* number. Raises ``KeyError`` for an unknown device.
    """
    match resource:
        case Neighbor():
            kind, body = RTM_NEWNEIGH, _neighbor(resource, index_of(resource.device))
        case FdbEntry():
            kind, body = RTM_NEWNEIGH, _fdb_entry(resource, index_of(resource.device), drop=drop)
        case Route():
            kind, body = RTM_NEWROUTE, _route(resource, index_of(resource.device), protocol, drop=drop)
        case Blackhole():
            kind, body = RTM_NEWROUTE, _blackhole(resource, protocol, drop=drop)
        case Address():
            kind, body = RTM_NEWADDR, _address(resource, index_of(resource.device))
        case _:
            raise TypeError(f"no rtnetlink message for {resource!r}")
    flags = NLM_F_REQUEST if drop else mode.value
    return HEADER.pack(HEADER.size + len(body), kind + drop, flags, seq, 0) + body


def _neighbor(entry: Neighbor, index: int) -> bytes:
    raw = entry.address.packed
    return b"".join(
        (
            _NDMSG.pack(AF[entry.address.version], index, NUD_PERMANENT, 0, RTN_UNICAST),
            DST[len(raw)],
            raw,
            _LLADDR,
            mac_bytes(entry.mac),
            b"\0\0",
        )
    )


def _fdb_entry(entry: FdbEntry, index: int, *, drop: bool) -> bytes:
    raw = entry.remote.packed
    # With a remote, the kernel would look for an entry with the device's own port and VNI.
    target = () if drop and entry.has_overrides else (DST[len(raw)], raw)
    return b"".join(
        (
            _NDMSG.pack(AF_BRIDGE, index, NUD_PERMANENT, NTF_SELF, 0),
            *target,
            _LLADDR,
            mac_bytes(entry.mac),
            b"\0\0",
        )
    )


def _route(route: Route, index: int, protocol: int, *, drop: bool) -> bytes:
    """Encode a route. A removal leaves protocol and scope open, so that it matches any creator's route.

    It names IPv6's default metric: without one the kernel would take another program's route of a lower one.
    IPv4 cannot name metric 0, but comes to that route first.
    """
    raw = route.destination.network_address.packed
    flags = RTNH_F_ONLINK if route.onlink else 0
    parts = [
        RTMSG.pack(
            AF[route.destination.version],
            route.destination.prefixlen,
            0,
            0,
            RT_TABLE_MAIN,
            0 if drop else protocol,
            RT_SCOPE_NOWHERE if drop else RT_SCOPE_UNIVERSE,
            RTN_UNICAST,
            flags,
        ),
        DST[len(raw)],
        raw,
    ]
    if route.gateway is not None:
        gateway = route.gateway.packed
        parts += (_GATEWAY[len(gateway)], gateway)
    parts.append(_OIF.pack(8, RTA_OIF, index))
    if drop and route.destination.version == 6:
        parts.append(_IPV6_METRIC)
    return b"".join(parts)


def _blackhole(route: Blackhole, protocol: int, *, drop: bool) -> bytes:
    destination, kind = route.destination, RTN_UNREACHABLE if route.unreachable else RTN_BLACKHOLE
    raw = destination.network_address.packed
    scope, mark = (RT_SCOPE_NOWHERE, 0) if drop else (RT_SCOPE_UNIVERSE, protocol)
    family, length = AF[destination.version], destination.prefixlen
    head = RTMSG.pack(family, length, 0, 0, RT_TABLE_MAIN, mark, scope, kind, 0)
    return head + DST[len(raw)] + raw + u32(_RTA_PRIORITY, BLACKHOLE_METRIC)


def clear_route(destination: IPNetwork, seq: int) -> bytes:
    """Return the message that removes the first route to a network with the default metric, on any device."""
    body = _route(Route(destination, ""), 0, 0, drop=True)
    return HEADER.pack(HEADER.size + len(body), RTM_DELROUTE, NLM_F_REQUEST, seq, 0) + body


def _address(entry: Address, index: int) -> bytes:
    raw = entry.address.packed
    head = _IFADDRMSG.pack(AF[entry.address.version], 8 * len(raw), 0, RT_SCOPE_UNIVERSE, index)
    return head + _LOCAL[len(raw)] + raw + DST[len(raw)] + raw


# ---- decoding --------------------------------------------------------------------------------


def routes_request(family: Family, *, protocol: int = 0) -> bytes:
    """Return the body of a dump of main-table routes. Kernels with strict checking apply the filter."""
    return RTMSG.pack(AF[family], 0, 0, 0, 0, protocol, 0, 0, 0) + u32(RTA_TABLE, RT_TABLE_MAIN)


def neighbors_request(family: Family, device: int) -> bytes:
    """Return the body of a dump of a device's ARP or NDP entries."""
    return _NDMSG.pack(AF[family], 0, 0, 0, 0) + u32(_NDA_IFINDEX, device)


def fdb_request(device: int) -> bytes:
    """Return the body of a dump of a device's forwarding entries."""
    return _NDMSG.pack(AF_BRIDGE, device, 0, 0, 0)


def addresses_request(family: Family, device: int) -> bytes:
    """Return the body of a dump of a device's addresses."""
    return _IFADDRMSG.pack(AF[family], 0, 0, 0, device)


def decode_route(data: bytes, offset: int, end: int, name_of: NameOf) -> SeenRoute | None:
    """Return a unicast main-table route through one device with the default metric, else None."""
    family, length, from_length, tos, _, protocol, _, kind, flags = unpack(RTMSG, data, offset, end)
    if kind != RTN_UNICAST or flags & _RTM_F_CLONED or family not in FAMILY or from_length or tos:
        return None
    found = attributes(data, offset + RTMSG.size, end)
    if not _is_common(family, found):
        return None
    device = name_of(number(found.get(RTA_OIF)))
    raw, gateway = found.get(_RTA_DST), found.get(RTA_GATEWAY)
    if device is None or raw is None:
        return None
    return SeenRoute(
        Route(
            network_of(raw, length),
            device,
            address_of(gateway) if gateway else None,
            onlink=bool(flags & RTNH_F_ONLINK),
        ),
        protocol,
    )


#: A route of the main table with a gateway and no other attribute, as the kernel orders them: RTA_TABLE,
#: RTA_DST, RTA_GATEWAY, RTA_OIF. Fields that are the same in each are one string of bytes.
_PLAIN_ROUTE = struct.Struct("=BB3sB2sI12sI4sI4sI")
_PLAIN_FORM = (
    AF[4],
    bytes((0, 0, RT_TABLE_MAIN)),
    bytes((RT_SCOPE_UNIVERSE, RTN_UNICAST)),
    u32(RTA_TABLE, RT_TABLE_MAIN) + DST[4],
    _GATEWAY[4],
    _ATTR.pack(8, RTA_OIF),
)


class PlainRoute(Struct, frozen=True, gc=False):
    """An IPv4 route of the main table; ``gateway`` is the address as a number."""

    key: Key
    protocol: int
    gateway: int
    index: int
    onlink: bool

    @property
    def destination(self) -> str:
        return f"{dotted(int(self.key[2]))}/{self.key[3]}"


def decode_plain_route(data: bytes, offset: int, end: int) -> PlainRoute | None:
    """Return an IPv4 route in the form in which most are, else None. It takes a tenth of ``decode_route``."""
    if end - offset != _PLAIN_ROUTE.size:
        return None
    family, length, a, protocol, b, flags, c, target, d, gateway, e, index = _PLAIN_ROUTE.unpack_from(
        data, offset
    )
    if (family, a, b, c, d, e) != _PLAIN_FORM or flags & _RTM_F_CLONED:
        return None
    key = (ROUTES, 4, socket.ntohl(target), length)
    return PlainRoute(key, protocol, socket.ntohl(gateway), index, bool(flags & RTNH_F_ONLINK))


def decode_blackhole(data: bytes, offset: int, end: int) -> Blackhole | None:
    """Return a blackhole or unreachable route with our metric, else None."""
    family, length, _, _, _, _, _, kind, _ = unpack(RTMSG, data, offset, end)
    if kind not in (RTN_BLACKHOLE, RTN_UNREACHABLE) or family not in FAMILY:
        return None
    found = attributes(data, offset + RTMSG.size, end)
    raw = found.get(_RTA_DST)
    if raw is None:
        return None
    marks = number(found.get(RTA_TABLE)), number(found.get(_RTA_PRIORITY))
    if marks != (RT_TABLE_MAIN, BLACKHOLE_METRIC):
        return None
    return Blackhole(network_of(raw, length), kind == RTN_UNREACHABLE)


def protocol_of(data: bytes, offset: int, end: int) -> int:
    """Return the RTPROT_* number of a route."""
    return unpack(RTMSG, data, offset, end)[5]


def outline(data: bytes, offset: int, end: int) -> tuple[Key, int] | None:
    """Return key and interface of a main-table route of any kind with the default metric, else None.

    The interface is 0 if there is none, or more than one.
    """
    family, length, from_length, tos, _, _, _, _, flags = unpack(RTMSG, data, offset, end)
    if flags & _RTM_F_CLONED or family not in FAMILY or from_length or tos:
        return None
    found = attributes(data, offset + RTMSG.size, end)
    raw = found.get(_RTA_DST)
    if raw is None or not _is_common(family, found):
        return None
    return (ROUTES, FAMILY[family], int.from_bytes(raw, "big"), length), number(found.get(RTA_OIF))


def _is_common(family: int, found: dict[int, bytes]) -> bool:
    metric = 0 if family == AF[4] else IPV6_DEFAULT_METRIC
    return number(found.get(RTA_TABLE)) == RT_TABLE_MAIN and number(found.get(_RTA_PRIORITY)) == metric


def decode_neighbor(
    data: bytes, offset: int, end: int, name_of: NameOf, states: int = NUD_PERMANENT
) -> Neighbor | FdbEntry | None:
    """Return a neighbour in one of the states or a unicast forwarding entry, else None."""
    family, index, state, _, _ = unpack(_NDMSG, data, offset, end)
    device = name_of(index)
    if device is None or not state & states:
        return None
    found = attributes(data, offset + _NDMSG.size, end)
    target, mac = found.get(_NDA_DST), found.get(_NDA_LLADDR)
    if target is None or mac is None or len(mac) != 6 or len(target) not in (4, 16):
        return None
    if family == AF_BRIDGE:
        has_overrides = not _OVERRIDES.isdisjoint(found)
        return FdbEntry(device, mac_text(mac), address_of(target), has_overrides) if any(mac) else None
    return Neighbor(device, address_of(target), mac_text(mac)) if family in FAMILY else None


#: A whole IPv4 neighbour without a protocol: NDA_DST, NDA_LLADDR, NDA_PROBES, NDA_CACHEINFO; and a whole
#: forwarding entry without overrides: NDA_LLADDR, NDA_DST, NDA_CACHEINFO. See neigh_fill_info in
#: net/core/neighbour.c and vxlan_fdb_info in drivers/net/vxlan/vxlan_core.c.
_PLAIN_NEIGHBOR = struct.Struct("=BxxxiHxx4sI4s6sxx4s4x4s16x")
_NEIGHBOR_FORM = (AF[4], DST[4], _LLADDR, _ATTR.pack(8, _NDA_PROBES), _CACHEINFO)
_PLAIN_FDB_ENTRY = struct.Struct("=BxxxiHxx4s6sxx4sI4s16x")
_FDB_ENTRY_FORM = (AF_BRIDGE, _LLADDR, DST[4], _CACHEINFO)


def decode_plain_neighbor(
    data: bytes, offset: int, end: int, name_of: NameOf
) -> tuple[Key, str | int | None]:
    """Return the key of a permanent entry, and a neighbour's MAC or a forwarding entry's remote as a number.

    It takes a third of ``decode_neighbor`` for IPv4 entries in their common form. Others have no key.
    """
    if end - offset == _PLAIN_FDB_ENTRY.size:
        family, index, state, a, mac, b, target, c = _PLAIN_FDB_ENTRY.unpack_from(data, offset)
        if (family, a, b, c) == _FDB_ENTRY_FORM and state & NUD_PERMANENT:
            return (FDB, name_of(index) or "", mac_text(mac)), socket.ntohl(target)
    if end - offset == _PLAIN_NEIGHBOR.size:
        family, index, state, a, target, b, mac, c, d = _PLAIN_NEIGHBOR.unpack_from(data, offset)
        if (family, a, b, c, d) == _NEIGHBOR_FORM and state & NUD_PERMANENT:
            return (NEIGHBORS, name_of(index) or "", 4, socket.ntohl(target)), mac_text(mac)
    return (), None


def plain_text(kind: int, data: bytes, offset: int, end: int, name_of: NameOf) -> str:
    """Return the text of the resource of an IPv4 object in its common form, empty for others.

    ``kind`` is that of the dump. It takes a tenth of making the resource.
    """
    if kind == RTM_GETROUTE:
        route = decode_plain_route(data, offset, end)
        if route is None:
            return ""
        device = name_of(route.index) or ""
        return route_text(route.destination, dotted(route.gateway), device, onlink=route.onlink)
    key, leads_to = decode_plain_neighbor(data, offset, end, name_of)
    if isinstance(leads_to, int):
        return fdb_text(key[2], dotted(leads_to), key[1])
    return neighbor_text(dotted(int(key[3])), leads_to, key[1]) if leads_to else ""


def decode_unresolved(data: bytes, offset: int, end: int) -> IPAddress | None:
    """Return the address of a neighbour that answered no ARP or NDP, else None."""
    state = unpack(_NDMSG, data, offset, end)[2]
    target = attributes(data, offset + _NDMSG.size, end).get(_NDA_DST, b"")
    return address_of(target) if state & _NUD_UNRESOLVED and len(target) in (4, 16) else None


def decode_gone_neighbor(data: bytes, offset: int, end: int, name_of: NameOf) -> Key | None:
    """Return the key of a removed entry. The kernel then sends neither state nor MAC of a neighbour."""
    family, index, _, _, _ = unpack(_NDMSG, data, offset, end)
    device = name_of(index)
    if device is None:
        return None
    found = attributes(data, offset + _NDMSG.size, end)
    target, mac = found.get(_NDA_DST), found.get(_NDA_LLADDR)
    if target is None or len(target) not in (4, 16):
        return None
    if family == AF_BRIDGE:
        return FdbEntry(device, mac_text(mac), address_of(target)).key if mac else None
    return Neighbor(device, address_of(target), "").key if family in FAMILY else None


class SeenAddress(Struct, frozen=True, gc=False):
    """An address of an interface: its index, prefix length and IFA_F_* flags."""

    index: int
    address: IPAddress
    length: int
    flags: int


def decode_address(data: bytes, offset: int, end: int) -> SeenAddress | None:
    """Return an address, None for another address family. Raises ``MalformedNetlink``."""
    family, length, short_flags, _, index = unpack(_IFADDRMSG, data, offset, end)
    found = attributes(data, offset + _IFADDRMSG.size, end)
    raw = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if family not in FAMILY or raw is None:
        return None
    return SeenAddress(index, address_of(raw), length, number(found.get(_IFA_FLAGS)) or short_flags)


def number(raw: bytes | None) -> int:
    """Return a number of up to four bytes in host order, 0 if the attribute is missing."""
    return int.from_bytes(raw[:4], sys.byteorder) if raw else 0
