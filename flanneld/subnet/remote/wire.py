"""JSON of v0.6.2's REST API, and the leases that a server refuses (pure).

The JSON is of leases, configs, reservations and changes. Additions to v0.6.2 are IPv6, two keys of a request,
and a lease's index. They are left out if unused or not requested: then each byte is as Go flannel writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Any

from msgspec import Struct

from flanneld.compat import json as gojson
from flanneld.compat.json import Fields, GoJsonError
from flanneld.config import Config
from flanneld.errors import Refused, Retryable
from flanneld.model import FAMILIES, LeaseAttrs, LeaseKey, is_a_hosts, lies_in, name_of, overlap
from flanneld.subnet.codec import format_attrs, format_key, parse_attrs, parse_key

#: Request header that asks for the index of each lease. Go flannel ignores it.
INDEX = "X-Flannel-Index"
#: Request header with the secret of a node. Servers of earlier versions ignore it.
SECRET = "X-Flannel-Node"  # noqa: S105 - a name
#: A reservation's expiration, Go's zero time.
NEVER = "0001-01-01T00:00:00Z"
_NANO = 1_000_000_000
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
#: Lease of an event that has none: of a network, or of a lease that was removed.
_NO_LEASE = ("0.0.0.0/0", '{"PublicIP":"0.0.0.0"}')
_CHECK = "is that a server of flannel?"


class WireLease(Struct, frozen=True, gc=False):
    """Lease on the wire. ``expires_ns`` is in nanoseconds of Unix time, None for a reservation.

    ``index`` is the store's index of its last change, ``created`` the order of its creation, each 0 if it is
    not transmitted.
    """

    attrs: LeaseAttrs
    key: LeaseKey
    expires_ns: int | None = None
    index: int = 0
    created: int = 0


class WireEvent(Struct, frozen=True, gc=False):
    """Change of a network if it names one, else of a lease. A removed lease has only its key."""

    is_added: bool
    lease: WireLease | None = None
    key: LeaseKey = (None, None)
    network: str = ""


class WatchResult(Struct, frozen=True, gc=False):
    """Answer to a watch: ``snapshot`` is None if there are events instead."""

    cursor: str
    events: tuple[WireEvent, ...] = ()
    snapshot: tuple[WireLease, ...] | None = None
    unreadable: frozenset[LeaseKey] = frozenset()


class Reservation(Struct, frozen=True, gc=False):
    """Reservation: a subnet that a node keeps without renewals."""

    subnet: IPv4Network
    public_ip: IPv4Address


# ---- writing ------------------------------------------------------------------------------------


def format_lease(lease: WireLease) -> str:
    subnet, ipv6_subnet = lease.key
    more = f',"IPv6Subnet":"{ipv6_subnet}"' if ipv6_subnet else ""
    with_ipv6 = lease.attrs.public_ipv6 is not None or ipv6_subnet is not None
    attrs = format_attrs(lease.attrs, with_ipv6=with_ipv6)
    index = f',"Index":{lease.index}' if lease.index else ""
    index += f',"Created":{lease.created}' if lease.created else ""
    return _lease(str(subnet or "0.0.0.0/0"), more, attrs, _format_time(lease.expires_ns), index)


def format_snapshot(leases: list[WireLease], cursor: int) -> str:
    return f'{{"events":null,"snapshot":[{",".join(map(format_lease, leases))}],"cursor":"{cursor}"}}'


def format_networks(names: list[str], cursor: int) -> str:
    return f'{{"events":null,"snapshot":{gojson.compact(names)},"cursor":"{cursor}"}}'


def format_events(events: list[WireEvent], cursor: int) -> str:
    return f'{{"events":[{",".join(map(_format_event, events))}],"snapshot":null,"cursor":"{cursor}"}}'


def format_config(config: Config) -> str:
    """Write a config with its defaults filled in, as Go's ``Config`` is written."""
    top = Fields(gojson.parse(config.source))
    value: dict[str, Any] = {}
    four = config.range(4)
    if four is None:
        value["EnableIPv4"] = False
    for prefix, pool in (("", four), ("IPv6", config.range(6))):
        if pool is not None:
            value |= {"EnableIPv6": True} if prefix else {}
            value |= {
                f"{prefix}Network": str(pool.network),
                f"{prefix}SubnetMin": str(pool.subnet_min),
                f"{prefix}SubnetMax": str(pool.subnet_max),
                f"{prefix}SubnetLen": pool.subnet_len,
            }
    if config.enable_nftables:
        value["EnableNFTables"] = True
    value |= {name: top.raw(name) for name in ("MasqueradeExceptions", "Backend") if top.has(name)}
    return gojson.compact(value)


def format_reservation(reservation: Reservation) -> str:
    return gojson.compact({"Subnet": str(reservation.subnet), "PublicIP": str(reservation.public_ip)})


def format_reservations(reservations: list[Reservation]) -> str:
    return f"[{','.join(map(format_reservation, reservations))}]"


class Acquisition(Struct, frozen=True, gc=False):
    """Request for a lease. ``strangers`` are other nodes' leases with the same public IP."""

    attrs: LeaseAttrs
    previous: LeaseKey = (None, None)
    strangers: frozenset[LeaseKey] = frozenset()


def format_acquisition(wanted: Acquisition) -> str:
    """Write the body of POST leases; v0.6.2's server ignores ``PreviousSubnet`` and ``Strangers``."""
    attrs, previous = wanted.attrs, wanted.previous
    body = format_attrs(attrs, with_ipv6=attrs.public_ipv6 is not None)
    named = {"PreviousSubnet": previous[0], "PreviousIPv6Subnet": previous[1]}
    more = "".join(f',"{name}":"{net}"' for name, net in named.items() if net is not None)
    if wanted.strangers:
        more += f',"Strangers":{gojson.compact(sorted(map(format_key, wanted.strangers)))}'
    return f"{body[:-1]}{more}}}"


def format_renewal(lease: WireLease, former: LeaseAttrs | None) -> str:
    """Write the body of PUT leases; v0.6.2's server ignores ``Former``, the attributes to replace."""
    body = format_lease(lease)
    if former is None or former == lease.attrs:
        return body
    return f'{body[:-1]},"Former":{format_attrs(former, with_ipv6=former.public_ipv6 is not None)}}}'


def _lease(subnet: str, more: str, attrs: str, expiration: str, index: str = "") -> str:
    return f'{{"Subnet":"{subnet}"{more},"Attrs":{attrs},"Expiration":"{expiration}"{index}}}'


def _format_event(event: WireEvent) -> str:
    kind = "added" if event.is_added else "removed"
    if event.lease is not None:
        lease = format_lease(event.lease)
    else:
        subnet, ipv6_subnet = event.key
        more = f',"IPv6Subnet":"{ipv6_subnet}"' if ipv6_subnet else ""
        lease = _lease(str(subnet or _NO_LEASE[0]), more, _NO_LEASE[1], NEVER)
    network = f',"network":{gojson.compact(event.network)}' if event.network else ""
    return f'{{"type":"{kind}","lease":{lease}{network}}}'


def _format_time(unix_ns: int | None) -> str:
    """Write a time as Go does: up to nine digits of the second, no zeros at their end."""
    if unix_ns is None:
        return NEVER
    seconds, rest = divmod(unix_ns, _NANO)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}{fraction}Z"


# ---- reading ------------------------------------------------------------------------------------


def parse_lease(value: object) -> WireLease:
    """Read a decoded lease. Raises ``Refused``."""
    try:
        fields = Fields(value)
        key = _key(fields, "Subnet", "IPv6Subnet")
        ends = _parse_time(fields.string("Expiration", NEVER))
        index, created = fields.integer("Index", 0), fields.integer("Created", 0)
        return WireLease(_attrs(fields.raw("Attrs")), key, ends, index, created)
    except GoJsonError as error:
        raise Refused(f"a lease is wrong: {error}", _CHECK) from None


def parse_result(text: bytes) -> WatchResult:
    """Read the answer to a watch of leases. An unreadable lease is left out. Raises ``Refused``."""
    try:
        fields = Fields(gojson.parse(text))
        cursor = fields.raw("cursor")
        if not isinstance(cursor, str):
            raise Refused("watch returned non-string cursor", _CHECK)
        snapshot = fields.raw("snapshot")
        if snapshot is None:
            events = fields.raw("events")
            return WatchResult(cursor, tuple(_parse_events(_list(events))))
        return _parse_snapshot(cursor, _list(snapshot))
    except GoJsonError as error:
        raise Refused(f"the answer to a watch is wrong: {error}", _CHECK) from None


def parse_acquisition(value: object) -> Acquisition:
    """Read the body of POST leases, decoded. Raises ``Refused``."""
    try:
        fields = Fields(value)
        strangers = frozenset(parse_key(str(each)) for each in _list(fields.raw("Strangers")))
        return Acquisition(_attrs(value), _key(fields, "PreviousSubnet", "PreviousIPv6Subnet"), strangers)
    except GoJsonError as error:
        raise Refused(str(error)) from None


def parse_renewal(value: object) -> tuple[WireLease, LeaseAttrs | None]:
    """Read the body of PUT leases, decoded: the lease, and the attributes that it replaces if named."""
    lease = parse_lease(value)
    former = Fields(value).raw("Former")
    return lease, None if former is None else _attrs(former)


def parse_reservation(value: object) -> Reservation:
    """Read the body of POST reservations, decoded. Raises ``Refused``."""
    try:
        fields = Fields(value)
        subnet = fields.network("Subnet", IPv4Network)
        public_ip = fields.address("PublicIP", IPv4Address)
    except GoJsonError as error:
        raise Refused(str(error)) from None
    if subnet is None or public_ip is None:
        raise Refused("a reservation needs Subnet and PublicIP")
    return Reservation(subnet, public_ip)


def parse_reservations(text: bytes) -> list[Reservation]:
    """Read the answer to GET reservations. Raises ``Refused``."""
    try:
        return [parse_reservation(each) for each in _list(gojson.parse(text))]
    except GoJsonError as error:
        raise Refused(f"the answer about reservations is wrong: {error}", _CHECK) from None


def _parse_snapshot(cursor: str, values: list[Any]) -> WatchResult:
    leases, unreadable = [], set()
    for each in values:
        try:
            leases.append(parse_lease(each))
        except Refused:
            unreadable.add(_key(Fields(each), "Subnet", "IPv6Subnet"))
    return WatchResult(cursor, snapshot=tuple(leases), unreadable=frozenset(unreadable - {(None, None)}))


def _parse_events(values: list[Any]) -> Iterator[WireEvent]:
    """Read events. An unreadable lease yields none: its last readable value stays."""
    for each in values:
        fields = Fields(each, "event")
        kind = fields.string("type", "")
        if kind == "added":
            with suppress(Refused):
                yield WireEvent(is_added=True, lease=parse_lease(fields.raw("lease")))
        elif kind == "removed":
            lease = Fields(fields.raw("lease"), "lease")
            yield WireEvent(is_added=False, key=_key(lease, "Subnet", "IPv6Subnet"))
        else:
            raise Refused(f"unknown event type {gojson.compact(kind[:40])}", _CHECK)


def _key(fields: Fields, name: str, ipv6_name: str) -> LeaseKey:
    return fields.network(name, IPv4Network), fields.network(ipv6_name, IPv6Network)


def _attrs(value: object) -> LeaseAttrs:
    return parse_attrs(gojson.compact(value if value is not None else {}))


def _list(value: object) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise GoJsonError("an array is expected")
    return value or []


def _parse_time(text: str) -> int | None:
    found = _TIME.fullmatch(text)
    if not found:
        raise GoJsonError(f"{gojson.compact(text[:40])} is no time")
    if text == NEVER:
        return None
    seconds, fraction, zone = found.groups()
    try:
        when = datetime.fromisoformat(seconds + ("+00:00" if zone == "Z" else zone))
        return int(when.timestamp()) * _NANO + int((fraction or "0").ljust(9, "0"))
    except (ValueError, OverflowError):
        raise GoJsonError(f"{text} is no time") from None


# ---- what a server refuses --------------------------------------------------------------------------


def check_claim(config: Config, wanted: WireLease, named: LeaseKey) -> None:
    """Raise ``Refused`` for a lease that no node would follow, or that the request's path does not name."""
    if named != wanted.key:
        names = f"the body is of the lease {name_of(wanted.key)}, the path of {name_of(named) or 'none'}"
        raise Refused(names, "make them equal")
    remedy = "restart flanneld on its node"
    for pool, net in zip(map(config.range, FAMILIES), wanted.key, strict=True):
        if net is not None and (pool is None or not lies_in(net, pool.network)):
            raise Refused(f"the subnet {net} is outside the network", remedy)
        if net is not None and pool is not None and net.prefixlen != pool.subnet_len:
            raise Refused(f"the subnet {net} is no /{pool.subnet_len}", remedy)
    check_address(wanted.attrs)


def check_address(attrs: LeaseAttrs) -> None:
    """Raise ``Refused`` for a public IP that no host can have."""
    for public_ip in attrs.public_ips:
        if not is_a_hosts(public_ip):
            raise Refused(f"the public IP {public_ip} is no host's", "correct -public-ip on its node")


def check_fits(config: Config, subnet: IPv4Network) -> None:
    """Raise ``Retryable``, in the words of v0.6.2, for a reservation that the network cannot hold."""
    pool = config.range(4)
    if pool is None or subnet.prefixlen != pool.subnet_len:
        raise Retryable("reservation subnet has mask incompatible with network config")
    if not overlap(subnet, pool.network):
        raise Retryable("reservation subnet is outside of flannel network")
