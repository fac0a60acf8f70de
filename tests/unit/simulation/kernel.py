"""Model of a host's kernel: interfaces, addresses, neighbours, FDB and routes, and forwarding by them.

Semantics are those of Linux: what is made is made exclusively, or replaces what has its key; with a device
goes all that stands on it, and routes need it up; a prefix has several routes, ordered by metric.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family, IPAddress, IPNetwork, network_around, single
from flanneld.network.routing import RTN_BROADCAST, RTN_LOCAL, LookupResult, SeenHostRoute
from flanneld.network.rtnetlink.domain import NOTHING, Domain, SeenRoute
from flanneld.network.rtnetlink.kernel import Notification
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import RTN_UNICAST, SeenAddress
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    Blackhole,
    FdbEntry,
    ForeignLink,
    Key,
    Link,
    Neighbor,
    Resource,
    Route,
    Vxlan,
)

EEXIST, ENODEV, ENOENT, ENETUNREACH = (
    "File exists",
    "No such device",
    "No such file",
    "Network is unreachable",
)
_PERMANENT = 0x80
_UPLINK_MTU = 1500


class KernelError(OSError):
    """Refusal of a change."""


class KernelRoute(Struct, frozen=True, gc=False):
    """A route as the kernel holds it. Without a gateway it is connected."""

    route: Route
    protocol: int
    metric: int = 0


class Monitor:
    """Notifications of what other programs changed; ``wake`` is called when there are some."""

    missed = False

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._news: list[Notification] = []

    def tell(self, *news: Notification) -> None:
        self._news.extend(news)
        self.wake()

    def fileno(self) -> int:
        return -1

    def read(self, name_of: Callable[[int], str | None]) -> list[Notification]:
        del name_of
        news, self._news = self._news, []
        return news


class Kernel:
    """The network configuration of one host. Other programs use its methods, the daemon its tables."""

    def __init__(self, uplink: str, *addresses: tuple[IPAddress, int]) -> None:
        self.uplink = uplink
        self.domain: Domain = NOTHING
        self.monitor = Monitor()
        self._indexes = itertools.count(2)
        self.devices: dict[str, Link | ForeignLink] = {}
        self.indexes: dict[str, int] = {}
        self.up: set[str] = set()
        #: Interfaces in other network namespaces, by their numbers.
        self.elsewhere: dict[tuple[int, int], SeenLink] = {}
        self.addresses_held: dict[Key, tuple[str, IPAddress, int]] = {}
        self.neighbors: dict[Key, Neighbor] = {}
        self.fdb: dict[Key, FdbEntry] = {}
        #: By family and prefix length, then by network address, lowest metric first.
        self.routes: dict[tuple[int, int], dict[int, list[KernelRoute]]] = {}
        #: Ours; behind a route to the same prefix.
        self.blackholes: dict[Key, Blackhole] = {}
        #: What a backend's table of this name keeps, in the kernel or in a program.
        self.beside: dict[str, dict[Key, Resource]] = defaultdict(dict)
        self.add_link(ForeignLink(uplink, "uplink"))
        for address, length in addresses:
            self.add_address(uplink, address, length)
        #: Called before each single write of the daemon; it may raise.
        self.before_write: Callable[[], None] = lambda: None
        #: Called after each; it may raise, too.
        self.after_write: Callable[[], None] = lambda: None
        #: Is told of each of them.
        self.log: Callable[[str], None] = lambda _: None

    # ---- changes ---------------------------------------------------------------------------------

    def add_link(self, link: Link | ForeignLink) -> None:
        if link.name in self.devices:
            raise KernelError(EEXIST)
        self.devices[link.name] = link
        self.indexes[link.name] = next(self._indexes)
        self.up.add(link.name)

    def delete_link(self, name: str) -> None:
        self._check(name)
        del self.devices[name], self.indexes[name]
        self.up.discard(name)
        self.addresses_held = {k: each for k, each in self.addresses_held.items() if each[0] != name}
        on_it: Iterable[dict[Key, Any]] = (self.neighbors, self.fdb, *self.beside.values())
        for held in on_it:
            for key in [key for key, each in held.items() if getattr(each, "device", None) == name]:
                del held[key]
        self._flush_routes(lambda route: route.device == name)

    def set_link(self, link: Link) -> None:
        """Change properties of a device that is there."""
        self._check(link.name)
        self.devices[link.name] = link

    def rename_link(self, name: str, new: str) -> None:
        """Rename a device, with all that stands on it."""
        self._check(name)
        index, is_up = self.indexes.pop(name), name in self.up
        self.devices[new] = replace(self.devices.pop(name), name=new)
        self.indexes[new] = index
        self.up = {*self.up - {name}, *([new] if is_up else [])}
        addresses = [
            (new if each[0] == name else each[0], *each[1:]) for each in self.addresses_held.values()
        ]
        self.addresses_held = {Address(each[0], each[1]).key: each for each in addresses}
        self.neighbors = {each.key: each for each in _renamed(self.neighbors.values(), name, new)}
        self.fdb = {each.key: each for each in _renamed(self.fdb.values(), name, new)}
        for held in list(self.all_routes()):
            if held.route.device == name:
                there = self.at(held.route.destination)
                there[there.index(held)] = replace(held, route=replace(held.route, device=new))

    def set_down(self, name: str) -> None:
        """Its routes go, its addresses and entries stay."""
        self._check(name)
        self.up.discard(name)
        self._flush_routes(lambda route: route.device == name)

    def set_up(self, name: str) -> None:
        self._check(name)
        self.up.add(name)

    def add_address(self, device: str, address: IPAddress, length: int) -> None:
        """With one that is no single host's comes a route to its network."""
        self._check(device)
        key = Address(device, address).key
        if key in self.addresses_held:
            raise KernelError(EEXIST)
        self.addresses_held[key] = (device, address, length)
        if length < address.max_prefixlen:
            self.add_route(Route(ip_network((address, length), strict=False), device), 2, 100)

    def delete_address(self, device: str, address: IPAddress) -> None:
        """With the last one of its family go all routes of this family through the device."""
        if self.addresses_held.pop(Address(device, address).key, None) is None:
            raise KernelError(ENOENT)
        held = self.addresses_held.values()
        if not any((name, each.version) == (device, address.version) for name, each, _ in held):
            family = address.version
            self._flush_routes(lambda route: route.device == device and route.destination.version == family)

    def replace_neighbor(self, neighbor: Neighbor) -> None:
        self._check(neighbor.device)
        self.neighbors[neighbor.key] = neighbor

    def replace_fdb(self, entry: FdbEntry) -> None:
        self._check(entry.device)
        self.fdb[entry.key] = entry

    def add_route(
        self,
        route: Route,
        protocol: int,
        metric: int = 0,
        *,
        over: bool = False,
        in_front: bool = False,
    ) -> None:
        """Add a route: exclusively, over the first one with its prefix and metric, or before that one."""
        self._check(route.device)
        if route.device not in self.up:
            raise KernelError("Network is down")
        if route.gateway is not None and not route.onlink and self._link_to(route.gateway) != route.device:
            raise KernelError(ENETUNREACH)
        there = self.at(route.destination)
        same = [number for number, each in enumerate(there) if each.metric == metric]
        if same and not (over or in_front):
            raise KernelError(EEXIST)
        if same and over:
            del there[same[0]]
        there.insert(same[0] if same else len(there), KernelRoute(route, protocol, metric))
        there.sort(key=lambda each: each.metric)

    def delete_route(self, route: Route, metric: int = 0) -> None:
        """The one with this prefix, metric, device and gateway."""
        there = self.at(route.destination)
        for number, each in enumerate(there):
            if (each.metric, each.route.device, each.route.gateway) == (metric, route.device, route.gateway):
                del there[number]
                return
        raise KernelError(ENOENT)

    def at(self, destination: IPNetwork) -> list[KernelRoute]:
        """Return the routes to one prefix, which may be changed."""
        by_network = self.routes.setdefault((destination.version, destination.prefixlen), {})
        return by_network.setdefault(int(destination.network_address), [])

    def _flush_routes(self, goes: Callable[[Route], bool]) -> None:
        for by_network in self.routes.values():
            for network, there in list(by_network.items()):
                if any(goes(each.route) for each in there):
                    by_network[network] = [each for each in there if not goes(each.route)]

    def _check(self, device: str) -> None:
        if device not in self.devices:
            raise KernelError(ENODEV)

    # ---- questions of the test -------------------------------------------------------------------

    def all_routes(self) -> Iterator[KernelRoute]:
        for by_network in self.routes.values():
            for there in by_network.values():
                yield from there

    def route_to(self, target: IPAddress) -> Route | None:
        """Longest prefix, then lowest metric."""
        number, bits = int(target), target.max_prefixlen
        guards = [each.destination for each in self.blackholes.values() if target in each.destination]
        guarded = max((each.prefixlen for each in guards), default=-1)
        for family, length in sorted(self.routes, reverse=True):
            if family != target.version:
                continue
            if length < guarded:
                break
            there = self.routes[family, length].get(number >> (bits - length) << (bits - length))
            if there:
                return there[0].route
        return None

    def foreign(self) -> list[str]:
        """What others made, in words."""
        return sorted(
            [
                *(str(link) for link in self.devices.values() if isinstance(link, ForeignLink)),
                *(
                    f"{each.route} metric {each.metric}"
                    for each in self.all_routes()
                    if each.protocol != PROTO_FLANNEL
                    and isinstance(self.devices.get(each.route.device), ForeignLink)
                ),
            ]
        )

    def owns(self, held: KernelRoute, *, adopt: bool = False) -> bool:
        return self.domain.owns_route(SeenRoute(held.route, held.protocol), adopt=adopt)

    def _link_to(self, gateway: IPAddress) -> str | None:
        route = self.route_to(gateway)
        return route.device if route is not None and route.gateway is None else None

    # ---- questions of the daemon: flanneld.network.host -------------------------------------

    def link(self, name: str) -> SeenLink | None:
        make = self.devices.get(name)
        if make is None:
            return None
        is_up = name in self.up
        if isinstance(make, ForeignLink):
            return SeenLink(self.indexes[name], name, "", _UPLINK_MTU, is_up, make)
        mac = make.mac if isinstance(make, Vxlan) else ""
        return SeenLink(self.indexes[name], name, mac, make.mtu, is_up, replace(make, up=is_up))

    def links(self) -> list[SeenLink]:
        return [seen for name in self.devices if (seen := self.link(name))]

    def take_back(self, namespace: int, index: int, is_ours: Callable[[SeenLink], bool]) -> bool:
        moved = self.elsewhere.get((namespace, index))
        if moved is None or not is_ours(moved):
            return False
        del self.elsewhere[namespace, index]
        return True

    def names(self) -> dict[int, str]:
        return {index: name for name, index in self.indexes.items()}

    def name_of(self, index: int) -> str | None:
        return self.names().get(index)

    def addresses(self, family: Family, index: int = 0) -> list[SeenAddress]:
        return [
            SeenAddress(self.indexes[name], address, length, _PERMANENT)
            for name, address, length in self.addresses_held.values()
            if address.version == family and index in (0, self.indexes[name])
        ]

    def look_up_route(self, target: IPAddress) -> LookupResult | None:
        for name, address, _ in self.addresses_held.values():
            if address == target:
                return LookupResult(self.indexes[name], target, None, RTN_LOCAL)
        route = self.route_to(target)
        if route is None:
            return None
        index = self.indexes[route.device]
        source = next((each.address for each in self.addresses(target.version, index)), None)
        return LookupResult(index, source, route.gateway, RTN_UNICAST)

    def matching_route(self, target: IPAddress) -> SeenHostRoute | None:
        route = self.route_to(target)
        if route is None:
            return None
        held = self.at(route.destination)[0]
        destination = route.destination if route.destination.prefixlen else None
        return SeenHostRoute(destination, held.protocol, ((self.indexes[route.device], route.gateway),))

    def default_routes(self, family: Family) -> list[int]:
        there = self.routes.get((family, 0), {}).get(0, [])
        return [self.indexes[each.route.device] for each in there]

    def ways(self, family: Family, own: Iterable[int] = ()) -> Iterator[SeenHostRoute]:
        names = {name for name, index in self.indexes.items() if index in set(own)}
        for each in self.all_routes():
            route = each.route
            if each.protocol == PROTO_FLANNEL or route.device in names or route.destination.version != family:
                continue
            destination = route.destination if route.destination.prefixlen else None
            yield SeenHostRoute(destination, each.protocol, ((self.indexes[route.device], route.gateway),))

    def local(self, family: Family) -> Iterator[tuple[int, IPNetwork, int]]:
        for name, address, length in self.addresses_held.values():
            if address.version != family:
                continue
            yield RTN_LOCAL, single(address), self.indexes[name]
            if family == 4 and length < 31:
                last = ip_network((address, length), strict=False).broadcast_address
                yield RTN_BROADCAST, network_around(last, 32), self.indexes[name]

    def left_behind(self, domain: Domain) -> list[Resource]:
        guards = self.blackholes.values()
        found: list[Resource] = [each for each in guards if domain.owns_blackhole(each, adopt=True)]
        for each in self.all_routes():
            is_unmarked = each.protocol == PROTO_BOOT and domain.owns_route(
                SeenRoute(each.route, each.protocol), adopt=True
            )
            if each.protocol == PROTO_FLANNEL or is_unmarked:
                found.append(each.route)
        return found


Entry = TypeVar("Entry", Neighbor, FdbEntry)


def _renamed(entries: Iterable[Entry], name: str, new: str) -> Iterator[Entry]:
    for each in entries:
        yield replace(each, device=new) if each.device == name else each
