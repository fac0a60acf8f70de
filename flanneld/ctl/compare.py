"""The kernel's objects, compared with the desired ones; routes and rules that divert packets from them."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.diagnostics.status import ObjectStatus, PeerStatus, Status, known, networks, resources
from flanneld.model import FAMILIES, IPAddress, IPNetwork
from flanneld.network.host import HostView
from flanneld.network.routing import RTN_LOCAL
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import Behind, Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.network.rtnetlink.messages import RTN_UNICAST
from flanneld.network.rtnetlink.netlink import DumpInterrupted
from flanneld.network.rtnetlink.tables import tables
from flanneld.reconcile.counters import kind_of
from flanneld.state.resources import (
    ForeignLink,
    Key,
    Kind,
    Link,
    Resource,
    Route,
    Vxlan,
)
from flanneld.state.table import Claim, Scope, Seen, Table


class ActualState(Struct, frozen=True, gc=False):
    """Actual objects with our objects' keys or on our devices, each with True if it is ours.

    Those in ``right`` are as desired, and known by their text alone. ``left`` are the other desired ones.
    """

    objects: Mapping[Resource, bool]
    links: tuple[SeenLink, ...]
    right: AbstractSet[str] = frozenset()
    left: Sequence[DesiredObject] = ()

    def has(self, resource: Resource) -> bool:
        return resource in self.objects or str(resource) in self.right

    def link(self, name: str) -> SeenLink | None:
        return next((each for each in self.links if each.name == name), None)

    def name_of(self, index: object) -> str:
        """Return the name of an interface, or its index if there is none."""
        return next((each.name for each in self.links if each.index == index), f"interface {index}")


class RouteTaken(Struct, frozen=True, gc=False):
    """Result of a route lookup. ``device`` is empty without a route; ``is_here`` means a local address."""

    device: str
    gateway: IPAddress | None = None
    is_here: bool = False

    def __str__(self) -> str:
        if self.is_here:
            return "this host"
        if not self.device:
            return "nowhere"
        return f"via {self.gateway} dev {self.device}" if self.gateway else f"dev {self.device}"


#: A described object, and its owner.
DesiredObject = tuple[str, ObjectStatus]


class Difference(Struct, frozen=True, gc=False):
    """A differing property of an object: its name and both values, as text."""

    name: str
    found: str
    desired: str

    def __str__(self) -> str:
        return f"has {self.name} {self.found}, wanted {self.desired}"


class Comparison(Struct, frozen=True, gc=False):
    """Result of comparing one object.

    ``state`` is ``ok``, ``missing``, ``different`` (``other`` is the actual object with its key), ``not
    wanted``, or ``found`` if the desired state is unknown.
    """

    value: Resource
    state: str
    owner: str = ""
    other: Resource | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def kind(self) -> str:
        return kind_of(self.value)

    @property
    def device(self) -> str:
        return str(getattr(self.value, "device", "") or getattr(self.value, "name", ""))

    def __str__(self) -> str:
        return "; ".join((str(self.value), *map(str, self.differences)))


class _Rest(Kernel):
    """This host's kernel without the objects that have a text of ``told``; ``left`` are the other texts.

    So out of thousands of objects only a few are made, on either side of the comparison.
    """

    def __init__(self, told: AbstractSet[str]) -> None:
        super().__init__()
        self.left = set(told)
        self._told = told
        self._name_of = cache(self.name_of)
        self._read: dict[tuple[int, bytes], list[tuple[bytes, int, int]]] = {}

    def stream(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        """Return the messages of a dump, which is read once. Raises ``DumpInterrupted``."""
        if (kind, body) not in self._read:
            rest = []
            for item in super().stream(kind, body):
                text = rtnl.plain_text(kind, *item, self._name_of)
                if text in self._told:
                    self.left.discard(text)
                else:
                    rest.append(item)
            self._read[kind, body] = rest
        return iter(self._read[kind, body])


def read(told: Status) -> ActualState:
    """Return the kernel's objects. Raises ``OSError``."""
    # Without all leases any object of ours is to be named.
    texts = {item.text for _, item in desired_objects(told) if told.knows_peers}
    kernel = _Rest(texts)
    should = {value.name: value for value in resources(told.local) if isinstance(value, Link)}
    # rtnetlink does not tell all properties of a device.
    present = tuple(
        replace(link, make=links.completed(should[link.name], link.make)) if link.name in should else link
        for link in kernel.links()
    )
    devices = known(told.devices) or [
        link.name
        for link in present
        # With the backend extension its commands make the devices, whatever their names.
        if is_flannels(link) and told.backend != "extension"
    ]
    ours = {link.name: link.make for link in present if link.name in devices}
    bridging = frozenset(name for name, make in ours.items() if isinstance(make, Vxlan))
    kernel.domain = Domain(told.uplink_name, frozenset(devices), tuple(told.ranges), bridging=bridging)
    for table in tables(kernel):
        with suppress(DumpInterrupted):
            next(iter(table.read(Scope({}))), None)  # which dumps it
    desired = desired_objects(told)
    left = [each for each in desired if each[1].text in kernel.left or not told.knows_peers]
    by_table: dict[object, dict[Key, Resource]] = defaultdict(dict)
    for value in resources(item for _, item in left):
        if not isinstance(value, Link):
            by_table[value.key[0]][value.key] = value
    # With known peers, an administrator's route must not count as left over.
    adopt = not told.knows_peers
    objects: dict[Resource, bool] = dict.fromkeys(ours.values(), True)
    for table in tables(kernel):
        for seen in _held_still(table, Scope(by_table[table.name], adopt=adopt)):
            it = seen.resource.route if isinstance(seen.resource, Behind) else seen.resource
            objects[it] = seen.claim is not Claim.FOREIGN
    return ActualState(objects, present, texts - kernel.left, left)


def _held_still(table: Table, scope: Scope) -> list[Seen]:
    """Return a table, read again if it changes meanwhile, as at a start. Raises ``OSError``."""
    for _ in range(4):
        with suppress(DumpInterrupted):
            return list(table.read(scope))
    return list(table.read(scope))


def route_lookup() -> Callable[[IPAddress], RouteTaken]:
    """Return a function for route lookups on one socket. It raises ``OSError``."""
    view, name_of = HostView(), cache(socket.if_indextoname)

    def look_up(target: IPAddress) -> RouteTaken:
        way = view.look_up_route(target)
        if way is not None and way.kind in (RTN_UNICAST, RTN_LOCAL):
            with suppress(OSError):  # the interface is gone
                return RouteTaken(name_of(way.index), way.gateway, is_here=way.kind == RTN_LOCAL)
        return RouteTaken("")

    return look_up


def desired_objects(told: Status) -> Iterator[DesiredObject]:
    """Yield each object that should be in this kernel, or in a backend's own table."""
    yield from (("this node", item) for item in known(told.local) or ())
    for peer in told.each_peer:
        name = peer.name
        for item in peer.objects:
            yield name, item


def compare(told: Status, desired: Iterable[DesiredObject], found: ActualState) -> list[Comparison]:
    """Return the desired objects of this kernel, then our surplus ones (pure).

    Out of all ``found.left`` may be compared alone: the others are right.
    """
    ours = [value for value, is_ours in found.objects.items() if is_ours]
    if not told.knows_peers:
        return [Comparison(value, "found") for value in ours]
    contested = {value for peer in told.each_peer if peer.conflicts for value in resources(peer.objects)}
    at_key = {value.key: value for value in ours}
    values: set[Resource] = set()
    replaced: set[Key] = set()
    entries = []
    for owner, item in desired:
        value = item.resource
        if value is None:
            continue
        values.add(value)
        other = at_key.get(value.key)
        if item.text in found.right or value in found.objects:
            entries.append(Comparison(value, "ok", owner))
        elif value in contested:
            continue
        elif other is None:
            entries.append(Comparison(value, "missing", owner))
        else:
            replaced.add(other.key)
            drift = tuple(differences(value, other, found))
            entries.append(Comparison(value, "different", owner, other, drift))
    surplus = (each for each in ours if each not in values and str(each) not in found.right)
    extra = [value for value in surplus if value.key not in replaced]
    return entries + [Comparison(value, "not wanted") for value in extra]


class Outside(Struct, frozen=True, gc=False):
    """Object in a backend's own table, outside this kernel: a process, or a cloud's route."""

    text: str
    table: str = ""
    kind: ClassVar[Kind] = Kind.REMOTE

    @property
    def key(self) -> Key:
        return (self.table, self.text)

    def __str__(self) -> str:
        return self.text


def outside(told: Status) -> Iterator[Comparison]:
    """Yield the desired objects outside the kernel. Only the daemon knows their actual state (pure)."""
    for owner, item in desired_objects(told):
        if item.value is None:
            found = Outside(item.text, known(item.table) or "")
            yield Comparison(found, "ok" if item.in_kernel else "missing", owner)


def described(entry: Comparison) -> dict[str, Any]:
    """Return an entry as JSON."""
    return {
        "kind": entry.kind,
        "text": str(entry.value),
        "state": entry.state,
        "owner": entry.owner,
        "differences": [
            {"property": each.name, "found": each.found, "wanted": each.desired} for each in entry.differences
        ],
    }


def differences(value: Resource, other: Resource, found: ActualState) -> Iterator[Difference]:
    """Yield the differences between an actual object and the desired one (pure)."""
    if value == other:
        return
    if not (isinstance(value, Link) and isinstance(other, Link | ForeignLink)):
        yield Difference("value", str(other), str(value))
        return
    for name, has, wants in links.drift(value, other):
        if name == "parent":
            yield Difference(name, found.name_of(has), found.name_of(wants))
        else:
            yield Difference(name, _shown(has), _shown(wants))


def _shown(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


class ShadowingRoute(Struct, frozen=True, gc=False):
    """A peer's subnet, and the route that packets to it, or to a part of it, take instead."""

    subnet: str
    found: str
    #: Command that removes the route; empty if it is not known, or there is none.
    removal: str = ""


#: Kinds of routes that lead nowhere (linux/rtnetlink.h, RTN_*), as ip-route(8) names them.
NOWHERE = {6: "blackhole", 7: "unreachable", 8: "prohibit", 9: "throw"}


def shadowing_routes(
    told: Status, found: ActualState, look_up_route: Callable[[IPAddress], RouteTaken]
) -> list[ShadowingRoute]:
    """Return the shadowing routes on this host. Raises ``OSError``."""
    kernel = Kernel()
    routes = [each for family in FAMILIES for each in kernel.destinations(family)]
    names = {link.index: link.name for link in found.links}
    subnets = subnets_of(told)
    lengths = lengths_of(subnets)
    # Then no peer's subnet lies in that of another.
    is_plain = len(lengths) == len({version for version, _ in lengths})
    longer = (
        (network, names.get(index, ""), NOWHERE.get(kind, ""))
        for destination, index, kind in routes
        if not (is_plain and destination in subnets)
        for network in networks([destination])
    )
    doubtful = _doubtful(kernel, [destination for destination, _, _ in routes], subnets, lengths)
    return [
        *by_lookup(told, found, look_up_route, doubtful),
        *by_length(subnets, lengths, longer),
    ]


def _doubtful(
    kernel: HostView,
    destinations: Sequence[str],
    subnets: AbstractSet[str],
    lengths: AbstractSet[tuple[int, int]],
) -> AbstractSet[str]:
    """Return the subnets that need a lookup: something beside their one route is about them.

    A lookup of each of thousands of subnets takes most of the doctor's time.
    """
    if any(not rule.is_default for family in FAMILIES for rule in kernel.rules(family)):
        return subnets
    local = {
        str(network.supernet(new_prefix=length))
        for family in FAMILIES
        for _, network, _ in kernel.local(family)
        for version, length in lengths
        if version == network.version and length <= network.prefixlen
    }
    once = set(destinations)
    several = (
        {each for each, number in Counter(destinations).items() if number > 1}
        if len(once) < len(destinations)
        else set()
    )
    return (subnets - once) | (subnets & (local | several))


def by_lookup(
    told: Status,
    found: ActualState,
    look_up_route: Callable[[IPAddress], RouteTaken],
    subnets: AbstractSet[str],
) -> Iterator[ShadowingRoute]:
    """Yield those ``subnets`` diverted by a route of the same length, a rule or another table (pure)."""
    each_peer = told.each_peer if subnets else ()
    doubtful = ((peer, [net for net in peer.subnets if net in subnets]) for peer in each_peer)
    for peer, subnet in ((peer, each) for peer, texts in doubtful for each in networks(texts)):
        target = subnet[1 % subnet.num_addresses]
        route = wanted_route(target, peer, told)
        if route is not None and found.has(route):
            way = look_up_route(target)
            if not follows(way, route):
                yield ShadowingRoute(str(subnet), f"{target} {way}")


def by_length(
    subnets: AbstractSet[str],
    lengths: AbstractSet[tuple[int, int]],
    routes: Iterable[tuple[IPNetwork, str, str]],
) -> Iterator[ShadowingRoute]:
    """Yield subnets diverted by a more specific route (pure).

    A route is its destination, its device, and the kind of route if it leads nowhere.
    """
    for destination, device, nowhere in routes:
        for version, length in lengths:
            if version == destination.version and length < destination.prefixlen:
                around = destination.supernet(new_prefix=length)
                if str(around) in subnets:
                    text = f"{nowhere} {destination}" if nowhere else f"{destination} dev {device}"
                    removal = f"ip {'-6 ' if version == 6 else ''}route del {text}"
                    yield ShadowingRoute(str(around), f"route {text}", removal)


def subnets_of(told: Status) -> AbstractSet[str]:
    """Return the subnets of the peers as texts: thousands of networks take a tenth of a second to parse."""
    return {subnet for peer in told.each_peer for subnet in peer.subnets}


def lengths_of(subnets: Iterable[str]) -> AbstractSet[tuple[int, int]]:
    """Return version and prefix length of all subnets, which are few. Raises ``NotUnderstood``."""
    alike = {(":" in each, each.rpartition("/")[2]): each for each in subnets}
    return {(each.version, each.prefixlen) for each in networks(alike.values())}


def wanted_route(target: IPAddress, peer: PeerStatus, told: Status) -> Route | None:
    """Return the daemon's route for an address: the peer's own, else the one to all peers."""
    routes = (each for items in (peer.objects, told.local) for each in resources(items))
    return next((each for each in routes if isinstance(each, Route) and target in each.destination), None)


def follows(way: RouteTaken, route: Route) -> bool:
    """Return True if a lookup's result matches a route."""
    return (way.device, way.gateway) == (route.device, route.gateway)
