"""Where the kernel would send a packet, as rtnetlink tells it (linux/rtnetlink.h; pure)."""

from __future__ import annotations

from dataclasses import dataclass

from flanneld.model import IPAddress, IPNetwork
from flanneld.network.netlink import attributes, unpack
from flanneld.network.rtnl import (
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
    network_of,
    number,
)

_RTA_DST, _RTA_PREFSRC, _RTA_VIA = 1, 7, 18


def lookup_request(target: IPAddress) -> bytes:
    """Ask the kernel which way it would send a packet."""
    raw = target.packed
    return RTMSG.pack(AF[target.version], 8 * len(raw), 0, 0, 0, 0, 0, 0, 0) + DST[len(raw)] + raw


@dataclass(frozen=True, slots=True)
class Way:
    """The kernel's answer: out of which interface, from which address, through which gateway."""

    index: int
    source: IPAddress | None
    gateway: IPAddress | None
    kind: int


def decode_way(data: bytes, offset: int, end: int) -> Way:
    """The answer to a question for a route. Raises ``Malformed``."""
    kind = unpack(RTMSG, data, offset, end)[7]
    found = attributes(data, offset + RTMSG.size, end)
    source = found.get(_RTA_PREFSRC)
    # struct rtvia, the gateway of an IPv4 route through IPv6: two bytes of family, then the address.
    gateway = found.get(RTA_GATEWAY) or found.get(_RTA_VIA, b"")[2:]
    return Way(
        number(found.get(RTA_OIF)),
        address_of(source) if source else None,
        address_of(gateway) if gateway else None,
        kind,
    )


def decode_destination(data: bytes, offset: int, end: int) -> tuple[IPNetwork, int] | None:
    """The network of a main-table route, and its interface; None for a default route or another table's."""
    family, length, _, _, _, _, _, _, _ = unpack(RTMSG, data, offset, end)
    found = attributes(data, offset + RTMSG.size, end)
    raw = found.get(_RTA_DST)
    if raw is None or family not in FAMILY or number(found.get(RTA_TABLE)) != RT_TABLE_MAIN:
        return None
    return network_of(raw, length), number(found.get(RTA_OIF))


def decode_default_route(data: bytes, offset: int, end: int) -> int | None:
    """The interface of a default route, 0 when it names no single one; None for any other route."""
    family, length, _, _, _, _, _, kind, _ = unpack(RTMSG, data, offset, end)
    if length or kind != RTN_UNICAST or family not in FAMILY:
        return None
    found = attributes(data, offset + RTMSG.size, end)
    return number(found.get(RTA_OIF)) if number(found.get(RTA_TABLE)) == RT_TABLE_MAIN else None
