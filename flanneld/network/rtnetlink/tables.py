"""Reconciler tables for the kernel: devices, addresses, neighbours, forwarding entries and routes."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from ipaddress import IPv6Network

from flanneld.model import Family, IPAddress
from flanneld.network.interfaces import index_of, name_of
from flanneld.network.rtnetlink import devices, links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import (
    MANY,
    ON_OUR_DEVICES,
    RTPROT_KERNEL,
    Behind,
    in_order,
    is_connected,
)
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.messages import CreateMode
from flanneld.state.resources import (
    ADDRESSES,
    FDB,
    LINKS,
    NEIGHBORS,
    PROTO_FLANNEL,
    ROUTES,
    Address,
    FdbEntry,
    ForeignLink,
    Key,
    Link,
    Neighbor,
    Resource,
    RivalRoute,
    Route,
)
from flanneld.state.table import Claim, Failure, Put, Report, Scope, Seen, Table

log = logging.getLogger(__name__)

#: Seconds between two reads without notifications.
AUDIT_PERIOD = 30.0
#: Prefix of the device names of all flannels.
_DEVICES_OF_FLANNEL = "flannel"
#: Errors of a removal that mean the object was already gone.
_GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENODEV})
#: Errors of a route's creation that mean another route may exist. IPv6 reports EINVAL for an onlink gateway,
#: because it checks the gateway before the route.
_TAKEN = frozenset({errno.EEXIST, errno.EINVAL})
_REMEDY_FOR_BLOCKED = "remove that route if nothing needs it, or choose another Network"

#: Table names in the order of creation.
KERNEL_TABLES = (LINKS, ADDRESSES, NEIGHBORS, FDB, ROUTES)
#: Error texts of refused neighbour entries, by device and address.
RefusedEntries = dict[tuple[str, IPAddress], str]


def tables(
    kernel: Kernel, left: Callable[[], Iterable[Link]] = tuple, *, spread: bool = True
) -> tuple[Table, ...]:
    """Return the kernel's tables in the order of creation.

    ``left`` returns devices of earlier runs. ``spread`` permits several protocol numbers for many routes.
    """
    refused: RefusedEntries = {}
    return (
        LinkTable(kernel, left),
        AddressTable(kernel),
        NeighborTable(kernel, refused),
        FdbTable(kernel),
        RouteTable(kernel, refused, spread=spread),
    )


class _KernelTable(Table):
    """Behaviour common to the kernel's tables."""

    audit = AUDIT_PERIOD
    #: Objects on a device wait until the device exists.
    needs = frozenset({LINKS})

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        resources = [put.want for put in puts]
        _account(resources, self._kernel.write(resources), report)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        _account(found, self._kernel.write(found, drop=True), report, drop=True)
        return report

    def _devices(self) -> dict[int, str]:
        """Return the names of our existing devices by index."""
        return {index: name for name in self._kernel.domain.links if (index := index_of(name))}

    def _neighbors(self, request: bytes, scope: Scope, names: dict[int, str]) -> Iterator[Seen]:
        for item in self._kernel.stream(rtnl.RTM_GETNEIGH, request):
            key, leads_to = rtnl.decode_plain_neighbor(*item, names.get)
            want = scope.desired.get(key)
            entry = want if want and _end_of(want) == leads_to else rtnl.decode_neighbor(*item, names.get)
            if entry is not None:
                yield Seen(entry)


class LinkTable(_KernelTable):
    """Table of our devices."""

    name = LINKS
    what = "the devices"
    needs = frozenset()

    def __init__(self, kernel: Kernel, left: Callable[[], Iterable[Link]] = tuple) -> None:
        super().__init__(kernel)
        self._left = left

    def read(self, scope: Scope) -> Iterator[Seen]:
        for want in scope.desired.values():
            seen = self._kernel.link(want.name) if isinstance(want, Link) else None
            if seen is not None and isinstance(want, Link):
                actual = links.completed(want, seen.make)
                is_right = links.step(want, actual) is links.LinkStep.NOTHING
                yield Seen(want if is_right else actual)
        yield from (Seen(link, Claim.LEFT) for link in self._left() if link.key not in scope.desired)

    def put(self, puts: Sequence[Put]) -> Report:
        """Create or change the devices, in order. Correct ones are not touched."""
        report = Report()
        for put in puts:
            link = put.want
            assert isinstance(link, Link)
            try:
                if self._put(link, None if put.claim else put.was):
                    report.made.append(link)
            except OSError as failure:
                report.failed.append(self._refusal(link, failure))
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        for link in found:
            assert isinstance(link, Link)
            try:
                devices.drop(link.name)
                report.removed.append(link)
            except OSError as failure:
                report.failed.append(Failure(link, failure.strerror or str(failure)))
        return report

    def _put(self, link: Link, before: Resource | None) -> bool:
        """Make a device right, and return False if it is. ``before`` was desired, if that has changed."""
        actual = self._actual(link)
        if actual is not None:
            if links.step(link, actual) is links.LinkStep.NOTHING:
                return False
            if actual != before:
                log.warning("%s %s", link.name, links.differences(link, actual))
        ours = links.renamed(link, self._kernel.links()) if actual is None else None
        if ours is not None:
            log.warning("Device %s was renamed to %s: renaming it back", link.name, ours.name)
            devices.rename(ours.index, link.name)
            actual = self._actual(link)
        if actual is None or links.step(link, actual) is not links.LinkStep.NOTHING:
            devices.put(link, actual)
        return True

    def _actual(self, link: Link) -> Link | ForeignLink | None:
        seen = self._kernel.link(link.name)
        return links.completed(link, seen.make) if seen else None

    def _refusal(self, link: Link, failure: OSError) -> Failure:
        reason = failure.strerror or str(failure)
        holder, what = "", ""
        if failure.errno == errno.EEXIST:
            holder, what = links.holder(link, self._kernel.links()), "serves the same ends"
        elif failure.errno == errno.EADDRINUSE:
            from flanneld.network import processes  # rarely needed

            at_port = links.at_port_of(link, self._kernel.links())
            holder, what = processes.owner_of(getattr(link, "port", 0), devices=at_port), "has its UDP port"
        text = f"{reason}: {holder} {what}" if holder else reason
        return Failure(link, text, links.remedy(link, failure.errno, holder))


class AddressTable(_KernelTable):
    """Table of the host addresses (/32, /128) on our devices."""

    name = ADDRESSES
    what = "the addresses"

    def read(self, scope: Scope) -> Iterator[Seen]:
        domain = self._kernel.domain
        for index, name in self._devices().items():
            for family in domain.families:
                for each in self._kernel.addresses(family, index):
                    if each.length == each.address.max_prefixlen:
                        is_ours = domain.owns_address(each.address, adopt=scope.adopt)
                        yield Seen(Address(name, each.address), _claim(is_ours))


class NeighborTable(_KernelTable):
    """Table of the permanent ARP and NDP entries on our devices."""

    name = NEIGHBORS
    what = "the neighbour entries"

    def __init__(self, kernel: Kernel, refused: RefusedEntries) -> None:
        super().__init__(kernel)
        self._refused = refused

    def read(self, scope: Scope) -> Iterator[Seen]:
        names = self._devices()
        for index in names:
            for family in self._kernel.domain.families:
                yield from self._neighbors(rtnl.neighbors_request(family, index), scope, names)

    def put(self, puts: Sequence[Put]) -> Report:
        report = super().put(puts)
        for made in report.made if self._refused else ():
            assert isinstance(made, Neighbor)
            self._refused.pop((made.device, made.address), None)
        for failure in report.failed:
            assert isinstance(failure.resource, Neighbor)
            self._refused[failure.resource.device, failure.resource.address] = failure.reason
        return report


class FdbTable(_KernelTable):
    """Table of the permanent forwarding entries on our VXLAN devices."""

    name = FDB
    what = "the forwarding entries"

    def read(self, scope: Scope) -> Iterator[Seen]:
        names = self._devices()
        for index, name in names.items():
            if name in self._kernel.domain.bridging:
                yield from self._neighbors(rtnl.fdb_request(index), scope, names)


class RouteTable(_KernelTable):
    """Table of the routes to peers in the main routing table.

    ``refused`` are the neighbour entries that the kernel refused. An onlink route without its entry would
    make the kernel send ARP or NDP requests into the overlay. With ``spread`` the protocol numbers of many
    routes vary, see ``route_protocols``.
    """

    name = ROUTES
    what = "the routes"

    def __init__(
        self, kernel: Kernel, refused: Mapping[tuple[str, IPAddress], str], *, spread: bool = True
    ) -> None:
        super().__init__(kernel)
        self._refused_neighbors = refused
        self._may_spread = spread
        #: Routes that we created or adopted. All others belong to someone else and stay.
        self._ours: dict[Key, Resource] = {}

    def read(self, scope: Scope) -> Iterator[Seen]:
        found = (seen for family in self._kernel.domain.families for seen in self._found(family, scope))
        return in_order(scope.desired, found, self._ours)

    def put(self, puts: Sequence[Put]) -> Report:
        """Replace our own routes; create others only if the destination has none."""
        report = Report()
        new: list[Resource] = []
        over: dict[Resource, Resource] = {}
        behind: list[Route] = []
        for put in self._withhold(puts, report) if self._refused_neighbors else puts:
            if isinstance(put.was, Behind):
                behind.append(put.was.route)
            elif put.was is None:
                new.append(put.want)
            elif put.want.key in self._ours and not is_connected(put.was):
                over[put.want] = put.was
            elif put.claim is None:
                new.append(put.want)
            else:
                text = f"{put.was} stands there and is not flannel's"
                report.failed.append(Failure(put.want, text, _REMEDY_FOR_BLOCKED))
        spread = self._may_spread and len(self._ours) + len(new) > MANY
        self._bring_to_front(behind, report, spread=spread)
        self._replace(over, report, spread=spread)
        refused = self._kernel.write(new, mode=CreateMode.EXCLUSIVE, spread=spread)
        _account(new, refused, report, is_new=True)
        for made in report.made:
            self._ours[made.key] = made
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove our routes. An identical route that another program created stays."""
        report = super().drop([resource for resource in found if resource.key in self._ours])
        refused = {failure.resource for failure in report.failed}
        for resource in found:
            if resource not in refused:
                self._ours.pop(resource.key, None)
        return report

    def _found(self, family: Family, scope: Scope) -> Iterator[Seen]:
        """Yield routes that may be ours or occupy our place, in the kernel's order.

        A dump filtered by device would not show which of several routes comes first.
        """
        domain = self._kernel.domain
        named = cache(name_of)
        concerns_us = self._filter(scope, named)
        for item in self._kernel.stream(rtnl.RTM_GETROUTE, rtnl.routes_request(family)):
            plain = rtnl.decode_plain_route(*item)
            right = self._wanted_route(plain, scope, named) if plain is not None else None
            if right is not None:
                yield Seen(right)
                continue
            if not concerns_us(*item):
                continue
            seen = rtnl.decode_route(*item, named)
            if seen is not None and domain.is_connected(seen):
                yield Seen(RivalRoute(seen.route.key, is_connected=True), Claim.FOREIGN)
            elif seen is not None:
                yield Seen(seen.route, _claim(domain.owns_route(seen, adopt=scope.adopt)))
            elif (blackhole := rtnl.decode_blackhole(*item)) is not None:
                yield Seen(blackhole, _claim(domain.owns_blackhole(blackhole, adopt=scope.adopt)))
            elif (other := rtnl.outline(*item)) is not None:
                yield Seen(RivalRoute(other[0]), Claim.FOREIGN)

    def _filter(self, scope: Scope, named: Callable[[int], str | None]) -> Callable[[bytes, int, int], bool]:
        """Return the filter for routes that are not as desired: ours, those of the uplink, and rivals."""
        domain = self._kernel.domain
        through = {domain.uplink, *domain.links}
        through.update(route.device for route in scope.desired.values() if isinstance(route, Route))
        indexes = {index for name in through if (index := index_of(name))}

        def concerns_us(data: bytes, offset: int, end: int) -> bool:
            protocol = rtnl.protocol_of(data, offset, end)
            if protocol == PROTO_FLANNEL:
                return True
            key, index = rtnl.outline(data, offset, end) or (None, 0)
            if index in indexes or key in scope.desired:
                return True
            # Left by a run with another backend or VNI.
            left = scope.adopt and protocol in ON_OUR_DEVICES and key is not None
            return left and (named(index) or "").startswith(_DEVICES_OF_FLANNEL)

        return concerns_us

    def _wanted_route(
        self, plain: rtnl.PlainRoute, scope: Scope, named: Callable[[int], str | None]
    ) -> Resource | None:
        """Return the desired route if this route is ours and equal to it."""
        want = scope.desired.get(plain.key)
        if not isinstance(want, Route) or want.gateway is None:
            return None
        is_right = (named(plain.index), plain.gateway, plain.onlink) == (
            want.device,
            int(want.gateway),
            want.onlink,
        )
        is_ours = want.device in self._kernel.domain.links and plain.protocol != RTPROT_KERNEL
        return want if is_right and is_ours else None

    def _withhold(self, puts: Iterable[Put], report: Report) -> Iterator[Put]:
        for put in puts:
            route, refused = put.want, None
            if isinstance(route, Route) and route.gateway is not None:
                refused = self._refused_neighbors.get((route.device, route.gateway))
            if refused is None:
                yield put
            else:
                report.failed.append(Failure(route, refused))

    def _bring_to_front(self, routes: Sequence[Route], report: Report, *, spread: bool) -> None:
        """Move each route in front of another program's route to the same network, which stays behind it.

        A replace request would be refused or hit the other route. The removed route carried no packets.
        """
        if not routes:
            return
        more = f" and {len(routes) - 1} more" if len(routes) > 1 else ""
        log.warning(
            "Restored the precedence of our route to %s%s over another route", routes[0].destination, more
        )
        self._kernel.write(routes, drop=True)
        refused = self._kernel.write(routes, mode=CreateMode.IN_FRONT, spread=spread)
        _account(routes, refused, report, is_new=True)

    def _replace(self, over: Mapping[Resource, Resource], report: Report, *, spread: bool) -> None:
        """Replace routes.

        IPv6 refuses an onlink gateway that another device has a route for, even if that is the route to be
        replaced (net/ipv6/route.c, ip6_route_check_nh_onlink). Such a route is removed first.
        """
        if not over:
            return
        routes = list(over)
        refused = self._kernel.write(routes, spread=spread)
        blocked = [
            seq
            for seq, code in refused.items()
            if isinstance(route := routes[seq], Route)
            and route.destination.version == 6
            and code == errno.EINVAL
        ]
        if blocked:
            there = [over[routes[seq]] for seq in blocked]
            self._kernel.write([each for each in there if isinstance(each, Route)], drop=True)
            # The retry below shows if a route of another kind was the obstacle.
            self._kernel.clear_routes(
                route.destination
                for seq, each in zip(blocked, there, strict=True)
                if isinstance(route := routes[seq], Route) and not isinstance(each, Route)
            )
            again = self._kernel.write([routes[seq] for seq in blocked])
            for place, seq in enumerate(blocked):
                del refused[seq]
                if place in again:
                    refused[seq] = again[place]
        _account(routes, refused, report, is_new=True)


def _end_of(entry: Resource) -> str | int | None:
    """Return a neighbour's MAC, or the remote of a forwarding entry as a number."""
    match entry:
        case Neighbor():
            return entry.mac
        case FdbEntry():
            return int(entry.remote)
    return None


def _claim(is_ours: bool) -> Claim:
    return Claim.OURS if is_ours else Claim.FOREIGN


def _account(
    resources: Sequence[Resource],
    refused: Mapping[int, int],
    report: Report,
    *,
    drop: bool = False,
    is_new: bool = False,
) -> None:
    """Record the results of a write in the report. ``is_new``: an existing object may explain a refusal."""
    done = report.removed if drop else report.made
    for seq, resource in enumerate(resources):
        code = refused.get(seq)
        if code is None:
            done.append(resource)
        elif not (drop and code in _GONE):
            taken = is_new and code in _TAKEN
            text, remedy = os.strerror(code), _remedy(resource, code)
            report.failed.append(Failure(resource, text, remedy, is_taken=taken, errno=code))


def _remedy(resource: Resource, code: int) -> str:
    """Return the remedy for a refusal, if one is known.

    IPv6 takes no onlink gateway that another device has a route for, see ``RouteTable._replace``.
    """
    match resource:
        case Route(destination=IPv6Network(), onlink=True) if code == errno.EINVAL:
            return f"see `ip route get {resource.gateway}`: if it names another device, remove that route"
    return ""
