"""Packets for a peer that take another way than the daemon's: by routes or rules that others made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

from flanneld.ctl.look import Found, Way, after
from flanneld.model import IPAddress, IPNetwork
from flanneld.network.kernel import Kernel


@dataclass(frozen=True, slots=True)
class Detour:
    """A peer's subnet, and the way that packets for it, or for a part of it, take instead."""

    subnet: str
    found: str


def read(document: Mapping[str, Any], found: Found, way_to: Callable[[IPAddress], Way]) -> list[Detour]:
    """Raises ``OSError``."""
    names = {link.index: link.name for link in found.links}
    routes = (
        (destination, names.get(index, ""))
        for family in (4, 6)
        for destination, index in Kernel().routes(family)
    )
    return [*by_lookup(document, found, way_to), *by_length(document, routes)]


def by_lookup(
    document: Mapping[str, Any], found: Found, way_to: Callable[[IPAddress], Way]
) -> Iterator[Detour]:
    """What a route of the same length, a rule or another table turns aside (pure)."""
    for peer in document.get("peers", ()):
        for text in peer["subnets"]:
            subnet = ip_network(text)
            route = wanted_route(subnet[1 % subnet.num_addresses], peer, document)
            if route in found.objects:
                target = subnet[1 % subnet.num_addresses]
                way = way_to(target)
                if not follows(way, route):
                    yield Detour(text, f"{target} {way}")


def by_length(document: Mapping[str, Any], routes: Iterable[tuple[IPNetwork, str]]) -> Iterator[Detour]:
    """What a more specific route turns aside (pure)."""
    subnets = {ip_network(text) for peer in document.get("peers", ()) for text in peer["subnets"]}
    lengths = {(subnet.version, subnet.prefixlen) for subnet in subnets}
    for destination, device in routes:
        for version, length in lengths:
            if version == destination.version and length < destination.prefixlen:
                around = destination.supernet(new_prefix=length)
                if around in subnets:
                    yield Detour(str(around), f"route {destination} dev {device}")


def wanted_route(target: IPAddress, peer: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The route that the daemon wants: the peer's own, else the one to all peers; empty for none."""
    for objects in (peer["objects"], document.get("local") or ()):
        for each in objects:
            if each["kind"] == "route" and target in ip_network(each["text"].split()[1]):
                return str(each["text"])
    return ""


def follows(way: Way, route: str) -> bool:
    """Whether a packet goes where a route leads."""
    return way.device == after("dev", route) and str(way.gateway or "") == after("via", route)
