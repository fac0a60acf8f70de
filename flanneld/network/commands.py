"""Resources as the commands of iproute2 that make or remove them (pure).

Each line does to the kernel what the daemon's own messages do, so that a plan can be carried out by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flanneld.network.links import Step, step
from flanneld.network.resources import (
    PROTO_FLANNEL,
    Address,
    Blackhole,
    FdbEntry,
    ForeignLink,
    Ipip,
    Link,
    Neighbor,
    Resource,
    Route,
    Tun,
    Vxlan,
)
from flanneld.network.rtnl import BLACKHOLE_METRIC


def put(resource: Resource, links: Collection[str]) -> str:
    """What makes a resource; ``links`` are the devices that are ours. Empty for what has no command."""
    match resource:
        case Route():
            return f"{_ip(resource.destination.version)} route replace {_whole(resource, links)}"
        case Blackhole():
            return f"{_ip(resource.destination.version)} route replace {_blackhole(resource)}"
        case Address():
            length = resource.address.max_prefixlen
            return f"ip address replace {resource.address}/{length} dev {resource.device}"
        case Neighbor():
            where = f"{resource.address} lladdr {resource.mac} dev {resource.device}"
            return f"ip neigh replace {where} nud permanent"
        case FdbEntry():
            return f"bridge fdb replace {_entry(resource)} self permanent"
    return ""


def bring_to_front(route: Route, links: Collection[str]) -> Iterator[str]:
    """What makes an IPv4 route that is there the first of those to its network."""
    yield drop(route)
    yield f"ip route prepend {_whole(route, links)}"


def drop(resource: Resource) -> str:
    """What removes a resource. Empty for what has no command."""
    match resource:
        case Route():
            return f"{_ip(resource.destination.version)} route del {_way(resource)}"
        case Blackhole():
            return f"{_ip(resource.destination.version)} route del {_blackhole(resource)}"
        case Address():
            return f"ip address del {resource.address}/{resource.address.max_prefixlen} dev {resource.device}"
        case Neighbor():
            return f"ip neigh del {resource.address} dev {resource.device}"
        case FdbEntry():
            return f"bridge fdb del {_entry(resource)} self"
        case Vxlan() | Ipip() | Tun():
            return f"ip link del {resource.name}"
    return ""


def link(wanted: Link, actual: Link | ForeignLink | None, parent: str) -> Iterator[str]:
    """What turns one device, None for none, into another; ``parent`` is the device under it."""
    if actual is not None and not isinstance(actual, ForeignLink) and step(wanted, actual) is Step.SET:
        yield from _set(wanted, actual)
        return
    if actual is not None:
        yield f"ip link del {wanted.name}"
    yield from _make(wanted, parent)
    yield f"ip link set {wanted.name} up"


def _make(wanted: Link, parent: str) -> Iterator[str]:
    match wanted:
        case Vxlan():
            learning = "learning" if wanted.learning else "nolearning"
            flags = f"{learning} gbp" if wanted.gbp else learning
            yield (
                f"ip link add {wanted.name} address {wanted.mac} mtu {wanted.mtu} txqueuelen 0 type vxlan"
                f" id {wanted.vni} dev {parent} local {wanted.local} dstport {wanted.port} {flags}"
            )
        case Ipip():
            ends = f"local {wanted.local or 'any'} remote {wanted.remote or 'any'}"
            yield (
                f"ip link add {wanted.name} mtu {wanted.mtu} txqueuelen 0 type ipip {ends}"
                " ttl inherit nopmtudisc"
            )
        case Tun():
            yield f"ip tuntap add dev {wanted.name} mode tun"
            yield f"ip link set {wanted.name} mtu {wanted.mtu}"


def _set(wanted: Link, actual: Link) -> Iterator[str]:
    if isinstance(wanted, Vxlan) and isinstance(actual, Vxlan):
        if actual.mac != wanted.mac:
            yield f"ip link set {wanted.name} address {wanted.mac}"
        if actual.learning != wanted.learning:
            flag = "learning" if wanted.learning else "nolearning"
            yield f"ip link set {wanted.name} type vxlan id {wanted.vni} {flag}"
    if actual.mtu != wanted.mtu:
        yield f"ip link set {wanted.name} mtu {wanted.mtu}"
    if actual.up != wanted.up:
        yield f"ip link set {wanted.name} {'up' if wanted.up else 'down'}"


def _ip(family: int) -> str:
    return "ip" if family == 4 else "ip -6"


def _way(route: Route) -> str:
    via = f" via {route.gateway}" if route.gateway else ""
    return f"{route.destination}{via} dev {route.device}{' onlink' if route.onlink else ''}"


def _whole(route: Route, links: Collection[str]) -> str:
    mark = "" if route.device in links else f" proto {PROTO_FLANNEL}"
    # Left to itself, ip gives an IPv4 route without a gateway the scope of its link.
    scope = " scope global" if route.gateway is None and route.destination.version == 4 else ""
    return f"{_way(route)}{mark}{scope}"


def _blackhole(resource: Blackhole) -> str:
    return f"blackhole {resource.destination} proto {PROTO_FLANNEL} metric {BLACKHOLE_METRIC}"


def _entry(entry: FdbEntry) -> str:
    return f"{entry.mac} dev {entry.device} dst {entry.remote}"
