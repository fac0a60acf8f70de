"""iproute2 commands that create or remove resources.

Each is equivalent to the daemon's netlink message, so that a plan can be executed by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flanneld.findings import Command, command
from flanneld.network.rtnetlink.domain import protocol_for
from flanneld.network.rtnetlink.links import LinkStep, codec_for, step
from flanneld.network.rtnetlink.messages import BLACKHOLE_METRIC, IPV6_DEFAULT_METRIC
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    Blackhole,
    FdbEntry,
    ForeignLink,
    Link,
    Neighbor,
    Resource,
    Route,
)


def put(resource: Resource, links: Collection[str], *, spread: bool = False) -> Command | None:
    """Return the command that creates a resource, None if there is none.

    ``links`` are our devices; with ``spread`` the protocol numbers of the routes there vary.
    """
    match resource:
        case Route():
            whole = _whole(resource, links, spread=spread)
            return (*_ip(resource.destination.version), "route", "replace", *whole)
        case Blackhole():
            return (*_ip(resource.destination.version), "route", "replace", *_blackhole(resource))
        case Address():
            return ("ip", "address", "replace", *_address(resource))
        case Neighbor():
            where = command(resource.address, "lladdr", resource.mac, "dev", resource.device)
            return ("ip", "neigh", "replace", *where, "nud", "permanent")
        case FdbEntry():
            return ("bridge", "fdb", "replace", *_entry(resource), "self", "permanent")
    return None


def bring_to_front(route: Route, links: Collection[str], *, spread: bool = False) -> Iterator[Command]:
    """Yield the commands that move an existing IPv4 route in front of others to its network."""
    yield _drop_route(route)
    yield ("ip", "route", "prepend", *_whole(route, links, spread=spread))


def drop(resource: Resource) -> Command | None:
    """Return the command that removes a resource, None if there is none."""
    match resource:
        case Route():
            return _drop_route(resource)
        case Blackhole():
            return (*_ip(resource.destination.version), "route", "del", *_blackhole(resource))
        case Address():
            return ("ip", "address", "del", *_address(resource))
        case Neighbor():
            return command("ip", "neigh", "del", resource.address, "dev", resource.device)
        case FdbEntry():
            return ("bridge", "fdb", "del", *_entry(resource), "self")
        case Link():
            return ("ip", "link", "del", resource.name)
    return None


def link(desired: Link, actual: Link | ForeignLink | None, parent: str) -> Iterator[Command]:
    """Yield the commands that change a device into the wanted one; ``parent`` is its underlying device."""
    if actual is not None and not isinstance(actual, ForeignLink) and step(desired, actual) is LinkStep.SET:
        yield from _set(desired, actual)
        return
    if actual is not None:
        yield ("ip", "link", "del", desired.name)
    yield from codec_for(desired).make_commands(desired, parent)
    yield ("ip", "link", "set", desired.name, "up")


def set_link(name: str, *properties: object, inside: str = "") -> Command:
    """Return the command that sets properties of any device, of this host or ``inside`` a namespace."""
    return command(*entering(inside), "ip", "link", "set", "dev", name, *properties)


def entering(namespace: str) -> Command:
    """Return the words before a command that runs it in a network namespace; none for that of this host."""
    return ("nsenter", f"--net={namespace}") if namespace else ()


def _set(desired: Link, actual: Link) -> Iterator[Command]:
    change = ("ip", "link", "set", desired.name)
    yield from codec_for(desired).change_commands(desired, actual)
    if actual.mtu != desired.mtu:
        yield (*change, "mtu", str(desired.mtu))
    if actual.up != desired.up:
        yield (*change, "up" if desired.up else "down")


def _ip(family: int) -> Command:
    return ("ip",) if family == 4 else ("ip", "-6")


def _drop_route(route: Route) -> Command:
    """Return the command that removes a route. Without a metric, IPv6 removes one of any metric."""
    family = route.destination.version
    metric = command("metric", IPV6_DEFAULT_METRIC) if family == 6 else ()
    return (*_ip(family), "route", "del", *_way(route), *metric)


def _way(route: Route) -> Command:
    via = ("via", route.gateway) if route.gateway else ()
    return command(route.destination, *via, "dev", route.device, *(["onlink"] if route.onlink else []))


def _whole(route: Route, links: Collection[str], *, spread: bool) -> Command:
    protocol = protocol_for(route, links, spread=spread)
    mark = () if protocol == PROTO_BOOT else command("proto", protocol)
    # By default, ip gives an IPv4 route without a gateway the scope link.
    scope = ("scope", "global") if route.gateway is None and route.destination.version == 4 else ()
    return (*_way(route), *mark, *scope)


def _blackhole(resource: Blackhole) -> Command:
    kind = "unreachable" if resource.unreachable else "blackhole"
    return command(kind, resource.destination, "proto", PROTO_FLANNEL, "metric", BLACKHOLE_METRIC)


def _address(resource: Address) -> Command:
    return command(f"{resource.address}/{resource.address.max_prefixlen}", "dev", resource.device)


def _entry(entry: FdbEntry) -> Command:
    return command(entry.mac, "dev", entry.device, "dst", entry.remote)
