"""Model of a host's kernel: links, addresses, neighbours, FDB and routes as tables, and forwarding by them.

Semantics are those of Linux: what is made is made exclusively, or replaces what has its key; with a device
goes all that stands on it, and routes need it up; IPv4 has several routes to one prefix, ordered by metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from flanneld.errors import Retryable
from flanneld.model import IPAddress, IPNetwork
from flanneld.state.report import Failure, Report
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    FdbEntry,
    ForeignLink,
    Key,
    Neighbor,
    Resource,
    Route,
    Vxlan,
)
from flanneld.state.table import Changes, Claim, Put, Scope, Seen

EEXIST, ENODEV, ENOENT, ENETUNREACH = (
    "File exists",
    "No such device",
    "No such file",
    "Network is unreachable",
)


class KernelError(OSError):
    """Refusal of a change."""


class KernelRoute(Struct, frozen=True, gc=False):
    """A route as the kernel holds it. Without a gateway it is connected."""

    route: Route
    protocol: int
    metric: int = 0


class Kernel:
    """The network configuration of one host. Other programs use its methods, the daemon its tables."""

    def __init__(self, uplink: str, address: IPAddress) -> None:
        self.uplink = uplink
        self.address = address
        self.links: dict[str, Vxlan | ForeignLink] = {uplink: ForeignLink(uplink, "uplink")}
        self.up = {uplink}
        self.addresses: dict[Key, Address] = {}
        self.neighbors: dict[Key, Neighbor] = {}
        self.fdb: dict[Key, FdbEntry] = {}
        #: By prefix length and network address, lowest metric first.
        self.routes: dict[int, dict[int, list[KernelRoute]]] = {}
        self.tables = {name: table(self) for name, table in _TABLES.items()}
        #: Called before each single write of the daemon; it may raise.
        self.before_write: Callable[[], None] = lambda: None
        #: Is told of each of them.
        self.log: Callable[[str], None] = lambda _: None

    # ---- changes ---------------------------------------------------------------------------------

    def add_link(self, link: Vxlan | ForeignLink) -> None:
        if link.name in self.links:
            raise KernelError(EEXIST)
        self.links[link.name] = link
        self.up.add(link.name)

    def delete_link(self, name: str) -> None:
        if name not in self.links:
            raise KernelError(ENODEV)
        del self.links[name]
        self.up.discard(name)
        for held in (self.addresses, self.neighbors, self.fdb):
            for key in [key for key, each in held.items() if each.device == name]:
                del held[key]
        self._flush_routes(name)

    def set_down(self, name: str) -> None:
        """Its routes go, its addresses and entries stay."""
        self.up.discard(name)
        self._flush_routes(name)

    def set_up(self, name: str) -> None:
        self._check(name)
        self.up.add(name)

    def add_address(self, address: Address) -> None:
        self._check(address.device)
        if address.key in self.addresses:
            raise KernelError(EEXIST)
        self.addresses[address.key] = address

    def replace_neighbor(self, neighbor: Neighbor) -> None:
        self._check(neighbor.device)
        self.neighbors[neighbor.key] = neighbor

    def replace_fdb(self, entry: FdbEntry) -> None:
        self._check(entry.device)
        self.fdb[entry.key] = entry

    def add_route(self, route: Route, protocol: int, metric: int = 0, *, replace: bool = False) -> None:
        """Exclusively, or in the place of the first one with this prefix and metric."""
        self._check(route.device)
        if route.device not in self.up:
            raise KernelError("Network is down")
        if route.gateway is not None and not route.onlink and self._link_to(route.gateway) != route.device:
            raise KernelError(ENETUNREACH)
        there = self._at(route.destination)
        same = [number for number, each in enumerate(there) if each.metric == metric]
        if same and not replace:
            raise KernelError(EEXIST)
        if same:
            del there[same[0]]
        there.append(KernelRoute(route, protocol, metric))
        there.sort(key=lambda each: each.metric)

    def delete_route(self, route: Route, metric: int = 0) -> None:
        """The one with this prefix, metric, device and gateway."""
        there = self._at(route.destination)
        for number, each in enumerate(there):
            if (each.metric, each.route.device, each.route.gateway) == (metric, route.device, route.gateway):
                del there[number]
                return
        raise KernelError(ENOENT)

    def tell(self, *tables: str) -> None:
        """Notify the daemon of a change that another program made."""
        for name in tables or self.tables:
            self.tables[name].news.append(Changes("vandal"))

    # ---- questions -------------------------------------------------------------------------------

    def all_routes(self) -> Iterator[KernelRoute]:
        for by_network in self.routes.values():
            for there in by_network.values():
                yield from there

    def route_to(self, target: IPAddress) -> Route | None:
        """Longest prefix, then lowest metric."""
        number = int(target)
        for length in sorted(self.routes, reverse=True):
            there = self.routes[length].get(number >> (32 - length))
            if there:
                return there[0].route
        return None

    def mac_of(self, name: str) -> str | None:
        link = self.links.get(name)
        return link.mac if isinstance(link, Vxlan) else None

    def is_ours(self, held: KernelRoute) -> bool:
        return held.protocol == PROTO_FLANNEL or isinstance(self.links.get(held.route.device), Vxlan)

    def foreign(self) -> list[str]:
        """What others made, in words."""
        return sorted(
            [
                *(str(link) for link in self.links.values() if isinstance(link, ForeignLink)),
                *(
                    f"{each.route} metric {each.metric}"
                    for each in self.all_routes()
                    if not self.is_ours(each)
                ),
            ]
        )

    def _link_to(self, gateway: IPAddress) -> str | None:
        route = self.route_to(gateway)
        return route.device if route is not None and route.gateway is None else None

    def _at(self, destination: IPNetwork) -> list[KernelRoute]:
        length = destination.prefixlen
        by_network = self.routes.setdefault(length, {})
        return by_network.setdefault(int(destination.network_address) >> (32 - length), [])

    def _flush_routes(self, device: str) -> None:
        for by_network in self.routes.values():
            for network in [
                key for key, there in by_network.items() if any(r.route.device == device for r in there)
            ]:
                by_network[network] = [each for each in by_network[network] if each.route.device != device]

    def _check(self, device: str) -> None:
        if device not in self.links:
            raise KernelError(ENODEV)


class KernelTable:
    """``Table`` over one part of a kernel."""

    name = ""
    worker = "kernel"
    vital = True
    needs: frozenset[str] = frozenset()

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.what = f"the {self.name}"
        self.audit: float | None = 30.0
        self.news: list[Changes] = []
        self.unreadable = False
        self.writes = 0

    def read(self, scope: Scope) -> Iterable[Seen]:
        del scope
        if self.unreadable:
            raise Retryable("the dump was interrupted")
        return list(self._seen())

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            self._kernel.before_write()
            try:
                self._put(put)
            except KernelError as refusal:
                report.failed.append(Failure(put.want, str(refusal), is_taken=str(refusal) == EEXIST))
            else:
                self.writes += 1
                self._kernel.log(f"wrote {put.want}")
                report.made.append(put.want)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        for each in found:
            self._kernel.before_write()
            try:
                self._drop(each)
            except KernelError:
                continue  # it is gone already
            self.writes += 1
            self._kernel.log(f"removed {each}")
            report.removed.append(each)
        return report

    def close(self, *, remove: bool) -> None:
        del remove

    def fileno(self) -> int:
        return -1

    def changes(self) -> list[Changes]:
        news, self.news = self.news, []
        return news

    def _seen(self) -> Iterator[Seen]:
        raise NotImplementedError

    def _put(self, put: Put) -> None:
        raise NotImplementedError

    def _drop(self, resource: Resource) -> None:
        raise NotImplementedError


class Links(KernelTable):
    name = "links"

    def _seen(self) -> Iterator[Seen]:
        for name, link in self._kernel.links.items():
            if isinstance(link, Vxlan):
                yield Seen(link if name in self._kernel.up else _down(link))
            else:
                yield Seen(link, Claim.FOREIGN)

    def _put(self, put: Put) -> None:
        want = put.want
        assert isinstance(want, Vxlan)
        if isinstance(put.was, ForeignLink):
            raise KernelError(EEXIST)
        if isinstance(put.was, Vxlan) and put.was == _down(want):
            self._kernel.set_up(want.name)
            self._kernel.tell("routes")
            return
        if put.was is not None:
            self._kernel.delete_link(want.name)
        self._kernel.add_link(want)
        self._kernel.tell("addresses", "neighbors", "fdb", "routes")

    def _drop(self, resource: Resource) -> None:
        assert isinstance(resource, Vxlan)
        self._kernel.delete_link(resource.name)


def _down(link: Vxlan) -> Vxlan:
    return Vxlan(**{name: getattr(link, name) for name in link.__struct_fields__ if name != "up"}, up=False)


class Addresses(KernelTable):
    name = "addresses"
    needs = frozenset({"links"})

    def _seen(self) -> Iterator[Seen]:
        for address in self._kernel.addresses.values():
            yield Seen(address, _claim(self._kernel, address.device))

    def _put(self, put: Put) -> None:
        assert isinstance(put.want, Address)
        self._kernel.add_address(put.want)

    def _drop(self, resource: Resource) -> None:
        if self._kernel.addresses.pop(resource.key, None) is None:
            raise KernelError(ENOENT)


class Neighbors(KernelTable):
    name = "neighbors"
    needs = frozenset({"links"})

    def _seen(self) -> Iterator[Seen]:
        for neighbor in self._kernel.neighbors.values():
            yield Seen(neighbor, _claim(self._kernel, neighbor.device))

    def _put(self, put: Put) -> None:
        assert isinstance(put.want, Neighbor)
        self._kernel.replace_neighbor(put.want)

    def _drop(self, resource: Resource) -> None:
        if self._kernel.neighbors.pop(resource.key, None) is None:
            raise KernelError(ENOENT)


class Fdb(KernelTable):
    name = "fdb"
    needs = frozenset({"links"})

    def _seen(self) -> Iterator[Seen]:
        for entry in self._kernel.fdb.values():
            yield Seen(entry, _claim(self._kernel, entry.device))

    def _put(self, put: Put) -> None:
        assert isinstance(put.want, FdbEntry)
        self._kernel.replace_fdb(put.want)

    def _drop(self, resource: Resource) -> None:
        if self._kernel.fdb.pop(resource.key, None) is None:
            raise KernelError(ENOENT)


class Routes(KernelTable):
    name = "routes"
    needs = frozenset({"links"})

    def _seen(self) -> Iterator[Seen]:
        for held in self._kernel.all_routes():
            if held.metric == 0:
                yield Seen(held.route, Claim.OURS if self._kernel.is_ours(held) else Claim.FOREIGN)

    def _put(self, put: Put) -> None:
        """What stands there is replaced if it is ours, never otherwise."""
        want = put.want
        assert isinstance(want, Route)
        there = [each for each in self._kernel._at(want.destination) if each.metric == 0]
        ours = bool(there) and put.was is not None and self._kernel.is_ours(there[0])
        self._kernel.add_route(want, _protocol(self._kernel, want), replace=ours)

    def _drop(self, resource: Resource) -> None:
        assert isinstance(resource, Route)
        self._kernel.delete_route(resource)


def _claim(kernel: Kernel, device: str) -> Claim:
    return Claim.OURS if isinstance(kernel.links.get(device), Vxlan) else Claim.FOREIGN


def _protocol(kernel: Kernel, route: Route) -> int:
    return PROTO_BOOT if isinstance(kernel.links.get(route.device), Vxlan) else PROTO_FLANNEL


_TABLES = {table.name: table for table in (Links, Addresses, Neighbors, Fdb, Routes)}


def by_table(resources: Iterable[Resource]) -> dict[str, dict[Key, Resource]]:
    """Return a part of the desired state for each table."""
    state: dict[str, dict[Key, Resource]] = {name: {} for name in _TABLES}
    for resource in resources:
        state[str(resource.key[0])][resource.key] = resource
    return state
