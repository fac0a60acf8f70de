"""Detection of routes or rules that divert packets for peers from the daemon's routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from msgspec import Struct

from flanneld.ctl import snapshot
from flanneld.ctl.snapshot import ActualState, RouteTaken
from flanneld.model import FAMILIES, IPAddress, IPNetwork
from flanneld.network.host import HostView
from flanneld.network.resource_json import parse_network
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.state.resources import Key, Route, destination_of, route_key


class ShadowingRoute(Struct, frozen=True, gc=False):
    """A peer's subnet, and the route that packets to it, or to a part of it, take instead."""

    subnet: str
    found: str
    #: Command that removes the route; empty if it is not known, or there is none.
    removal: str = ""


#: Kinds of routes that lead nowhere (linux/rtnetlink.h, RTN_*), as ip-route(8) names them.
NOWHERE = {6: "blackhole", 7: "unreachable", 8: "prohibit", 9: "throw"}


def read(
    document: Mapping[str, Any], found: ActualState, look_up_route: Callable[[IPAddress], RouteTaken]
) -> list[ShadowingRoute]:
    """Return the shadowing routes on this host. Raises ``OSError``."""
    kernel = Kernel()
    routes = [each for family in FAMILIES for each in kernel.route_keys(family)]
    names = {link.index: link.name for link in found.links}
    subnets = subnets_of(document)
    lengths = _lengths(subnets)
    shortest = {(version, min(each for other, each in lengths if other == version)) for version, _ in lengths}
    longer = (
        (destination, names.get(index, ""), NOWHERE.get(kind, ""))
        for key, index, kind in routes
        if (key[1], key[3]) not in shortest and (destination := destination_of(key)) is not None
    )
    certain = _certain(kernel, (key for key, _, _ in routes), lengths)
    return [*by_lookup(document, found, look_up_route, certain), *by_length(subnets, longer)]


def _certain(
    kernel: HostView, destinations: Iterable[Key], lengths: AbstractSet[tuple[int, int]]
) -> AbstractSet[Key]:
    """Return the destinations that need no lookup: nothing but their one route is about them.

    A lookup of each of thousands of subnets takes most of the doctor's time.
    """
    if any(not rule.is_default for family in FAMILIES for rule in kernel.rules(family)):
        return frozenset()
    local = {
        route_key(network.supernet(new_prefix=length))
        for family in FAMILIES
        for _, network, _ in kernel.local(family)
        for version, length in lengths
        if version == network.version and length <= network.prefixlen
    }
    number = Counter(destinations)
    return {key for key in number if number[key] == 1 and key not in local}


def by_lookup(
    document: Mapping[str, Any],
    found: ActualState,
    look_up_route: Callable[[IPAddress], RouteTaken],
    certain: AbstractSet[Key] = frozenset(),
) -> Iterator[ShadowingRoute]:
    """Yield subnets diverted by a route of the same length, a rule or another table (pure).

    Destinations with a key in ``certain`` are known not to be.
    """
    for peer in document.get("peers", ()):
        for text in peer["subnets"]:
            subnet = parse_network(text)
            if route_key(subnet) in certain:
                continue
            target = subnet[1 % subnet.num_addresses]
            route = wanted_route(target, peer, document)
            if route is not None and route in found.objects:
                way = look_up_route(target)
                if not follows(way, route):
                    yield ShadowingRoute(text, f"{target} {way}")


def by_length(
    subnets: AbstractSet[Key], routes: Iterable[tuple[IPNetwork, str, str]]
) -> Iterator[ShadowingRoute]:
    """Yield subnets diverted by a more specific route (pure).

    A route is its destination, its device, and the kind of route if it leads nowhere.
    """
    lengths = _lengths(subnets)
    for destination, device, nowhere in routes:
        for version, length in lengths:
            if version == destination.version and length < destination.prefixlen:
                around = destination.supernet(new_prefix=length)
                if route_key(around) in subnets:
                    text = f"{nowhere} {destination}" if nowhere else f"{destination} dev {device}"
                    removal = f"ip {'-6 ' if version == 6 else ''}route del {text}"
                    yield ShadowingRoute(str(around), f"route {text}", removal)


def subnets_of(document: Mapping[str, Any]) -> AbstractSet[Key]:
    """Return the peers' subnets, as keys of the routes to them."""
    return {route_key(parse_network(text)) for peer in document.get("peers", ()) for text in peer["subnets"]}


def _lengths(subnets: Iterable[Key]) -> AbstractSet[tuple[int, int]]:
    """Return version and prefix length of all subnets, which are few."""
    return {(int(version), int(length)) for _, version, _, length in subnets}


def wanted_route(target: IPAddress, peer: Mapping[str, Any], document: Mapping[str, Any]) -> Route | None:
    """Return the daemon's route for an address: the peer's own, else the one to all peers."""
    routes = (each for items in (peer["objects"], document.get("local")) for each in snapshot.values(items))
    return next((each for each in routes if isinstance(each, Route) and target in each.destination), None)


def follows(way: RouteTaken, route: Route) -> bool:
    """Return True if a lookup's result matches a route."""
    return (way.device, way.gateway) == (route.device, route.gateway)
