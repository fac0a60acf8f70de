"""What this kernel holds for us, read and written over rtnetlink."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby

from flanneld.model import FAMILIES, Family
from flanneld.network.host import HostView
from flanneld.network.rtnetlink import devices, links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.messages import Mode
from flanneld.state.diff import Plan
from flanneld.state.report import Failure, Report
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Address,
    ForeignLink,
    Kind,
    Link,
    Neighbor,
    Resource,
    RivalRoute,
    Route,
    State,
    Vxlan,
)

log = logging.getLogger(__name__)

#: What the names of the devices of all flannels begin with.
_DEVICES_OF_FLANNEL = "flannel"
#: Answers to a removal that mean it was gone already.
_GONE = frozenset({errno.ENOENT, errno.ESRCH, errno.EADDRNOTAVAIL, errno.ENODEV})
#: Answers to the making of a route that mean that there may be one. Of IPv6's onlink gateways the kernel
#: says so by EINVAL: it looks for them before it looks for the route.
_TAKEN = frozenset({errno.EEXIST, errno.EINVAL})


class Kernel(HostView):
    """What the kernel of this network namespace does for us. Used by one thread."""

    # ---- reading -----------------------------------------------------------------------------

    def read(self, domain: Domain, wanted: State) -> Iterator[tuple[Resource, bool]]:
        """What there is where the wanted objects are, links left out, each with whether it is ours.

        Raises ``OSError`` rather than leave something out.
        """
        names = {index: name for name in domain.links if (index := _index_of(name))}
        for index, name in names.items():
            for family in domain.families:
                for address in self.addresses(family, index):
                    if address.length == address.address.max_prefixlen:
                        yield Address(name, address.address), domain.owns_address(address.address)
                yield from self._neighbors(rtnl.neighbors_request(family, index), names)
            if self._has_fdb(name, wanted):
                yield from self._neighbors(rtnl.fdb_request(index), names)
        for family in domain.families:
            yield from self._routes(family, domain, wanted)

    def left_behind(self, domain: Domain) -> list[Resource]:
        """The routes of any flanneld: all marked ones, and unmarked ones as ``adopt`` tells them."""
        found: list[Resource] = []
        for family in FAMILIES:
            marked = self._dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family, protocol=PROTO_FLANNEL))
            unmarked = self._dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family, protocol=PROTO_BOOT))
            found += filter(None, (rtnl.decode_blackhole(*item) for item in marked))
            found += [seen.route for seen in _decoded(marked)]
            found += [seen.route for seen in _decoded(unmarked) if domain.owns_route(seen)]
        return found

    def _has_fdb(self, name: str, wanted: State) -> bool:
        return isinstance(wanted.get((Kind.LINK, name)), Vxlan)

    def _neighbors(self, request: bytes, names: dict[int, str]) -> Iterator[tuple[Resource, bool]]:
        for item in self._dump(rtnl.RTM_GETNEIGH, request):
            entry = rtnl.decode_neighbor(*item, names.get)
            if entry is not None:
                yield entry, True

    def _routes(self, family: Family, domain: Domain, wanted: State) -> Iterator[tuple[Resource, bool]]:
        """Those that may be ours or stand where ours should, in the kernel's order.

        It could pick those of one device by itself, but not tell then which of several comes first.
        """
        through = {domain.uplink, *domain.links}
        through.update(route.device for route in wanted.values() if isinstance(route, Route))
        indexes = {index for name in through if (index := _index_of(name))}
        name_of = cache(_name_of)

        def concerns_us(data: bytes, offset: int, end: int) -> bool:
            protocol = rtnl.protocol_of(data, offset, end)
            if protocol == PROTO_FLANNEL:
                return True
            key, index = rtnl.outline(data, offset, end) or (None, 0)
            if index in indexes or key in wanted:
                return True
            # Left by a run with another backend or VNI.
            left = domain.adopt and protocol == PROTO_BOOT and key is not None
            return left and (name_of(index) or "").startswith(_DEVICES_OF_FLANNEL)

        for item in self._dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family), concerns_us):
            seen = rtnl.decode_route(*item, name_of)
            if seen is not None and domain.is_connected(seen):
                yield RivalRoute(seen.route.key, is_connected=True), False
            elif seen is not None:
                yield seen.route, domain.owns_route(seen)
            elif (blackhole := rtnl.decode_blackhole(*item)) is not None:
                yield blackhole, domain.owns_blackhole(blackhole)
            elif (other := rtnl.outline(*item)) is not None:
                yield RivalRoute(other[0]), False

    # ---- writing -----------------------------------------------------------------------------

    def apply_links(self, wanted: Iterable[Link]) -> Report:
        """Make the devices, in order; what is right already is not touched."""
        report = Report()
        for link in wanted:
            seen = self.link(link.name)
            actual = seen.make if seen else None
            if actual is not None and links.step(link, actual) is links.Step.NOTHING:
                continue
            if actual is not None:
                log.warning("%s %s", link.name, links.differences(link, actual))
            try:
                self._put_link(link, actual)
                report.made.append(link)
            except OSError as failure:
                report.failed.append(self._refusal(link, failure))
        return report

    def _put_link(self, link: Link, actual: Link | ForeignLink | None) -> None:
        ours = links.renamed(link, self.links()) if actual is None else None
        if ours is not None:
            log.warning("%s is called %s now: giving it its name back", link.name, ours.name)
            devices.rename(ours.index, link.name)
            seen = self.link(link.name)
            actual = seen.make if seen else None
        if actual is None or links.step(link, actual) is not links.Step.NOTHING:
            devices.put(link, actual)

    def _refusal(self, link: Link, failure: OSError) -> Failure:
        reason = failure.strerror or str(failure)
        holder = links.holder(link, self.links()) if failure.errno == errno.EEXIST else ""
        text = f"{reason}: {holder} serves the same ends" if holder else reason
        return Failure(link, text, links.remedy(link, failure.errno, holder))

    def apply(self, plan: Plan, domain: Domain) -> Report:
        """Carry out a plan. One refusal does not stop the rest, save for a route to a refused neighbour."""
        report = Report()
        self._bring_to_front(plan.behind, domain, report)
        for kind, group in groupby(plan.puts, key=lambda resource: resource.kind):
            resources = list(group)
            if kind is Kind.ROUTE:
                self._put_routes(resources, plan.over, domain, report)
            else:
                self._account(resources, self._send(resources, domain, drop=False), report)
        without_links = [resource for resource in plan.drops if resource.kind is not Kind.LINK]
        self._account(without_links, self._send(without_links, domain, drop=True), report, drop=True)
        for resource in plan.drops:
            if isinstance(resource, Link):
                self._drop_link(resource, report)
        return report

    def _bring_to_front(self, routes: Sequence[Route], domain: Domain, report: Report) -> None:
        """Make each the first to its network; what was in front of it, somebody else's, stays behind it.

        Replacing would be refused, or hit the other one. What is removed meanwhile is a route that no packet
        takes.
        """
        if not routes:
            return
        more = f" and {len(routes) - 1} more" if len(routes) > 1 else ""
        log.warning(
            "Another route came before ours to %s%s, and now comes after it", routes[0].destination, more
        )
        self._send(routes, domain, drop=True)
        self._account(routes, self._send(routes, domain, drop=False, mode=Mode.IN_FRONT), report)

    def _withhold(self, routes: Sequence[Resource], report: Report) -> list[Resource]:
        """Without its neighbour entry an onlink route would make the kernel ask the overlay for the MAC."""
        lost = {
            (failure.resource.device, failure.resource.address): failure.reason
            for failure in report.failed
            if isinstance(failure.resource, Neighbor)
        }
        allowed: list[Resource] = []
        for route in routes:
            refused = None
            if isinstance(route, Route) and route.gateway is not None:
                refused = lost.get((route.device, route.gateway))
            if refused is None:
                allowed.append(route)
            else:
                report.failed.append(Failure(route, refused))
        return allowed

    def _put_routes(self, routes: Sequence[Resource], over: State, domain: Domain, report: Report) -> None:
        """Put routes in the place of ours, and make all others only where there is none."""
        if report.failed:
            routes = self._withhold(routes, report)
        replacing = [route for route in routes if route.key in over] if over else []
        if replacing:
            refused = self._send(replacing, domain, drop=False)
            if refused:
                self._clear_the_way(replacing, over, refused, domain)
            self._account(replacing, refused, report)
        new = [route for route in routes if route.key not in over] if over else routes
        self._account(new, self._send(new, domain, drop=False, mode=Mode.EXCLUSIVE), report)

    def _account(
        self, resources: Sequence[Resource], refused: dict[int, int], report: Report, *, drop: bool = False
    ) -> None:
        done = report.removed if drop else report.made
        for seq, resource in enumerate(resources):
            code = refused.get(seq)
            if code is None:
                done.append(resource)
            elif not (drop and code in _GONE):
                taken = code in _TAKEN and resource.kind is Kind.ROUTE
                report.failed.append(Failure(resource, os.strerror(code), is_taken=taken))

    def _clear_the_way(
        self, resources: Sequence[Resource], over: State, refused: dict[int, int], domain: Domain
    ) -> None:
        """Remove the routes to replace and make the new ones; ``refused`` then says what came of that.

        IPv6 refuses an onlink gateway for which there is a route through another device, even if that
        is the very route to be replaced (net/ipv6/route.c, ip6_route_check_nh_onlink).
        """
        blocked = {
            seq: resource
            for seq, code in refused.items()
            if isinstance(resource := resources[seq], Route)
            and resource.destination.version == 6
            and code == errno.EINVAL
        }
        routes = tuple(blocked.values())
        in_place = [over[route.key] for route in routes]
        self._send([there for there in in_place if isinstance(there, Route)], domain, drop=True)
        odd = [route for route, there in zip(routes, in_place, strict=True) if not isinstance(there, Route)]
        for _ in self._socket.write(rtnl.clear_route(each.destination, seq) for seq, each in enumerate(odd)):
            pass  # Whether that was the obstacle, the next answer tells.
        again = self._send(routes, domain, drop=False)
        for place, seq in enumerate(blocked):
            if place in again:
                refused[seq] = again[place]
            else:
                del refused[seq]

    def _send(
        self, resources: Sequence[Resource], domain: Domain, *, drop: bool, mode: Mode = Mode.REPLACE
    ) -> dict[int, int]:
        """Write, many at a time. Returns the errno of each that was refused, by its place."""
        indexes: dict[str, int] = {}

        def index_of(name: str) -> int:
            index = indexes.get(name)
            if index is None:
                index = indexes[name] = socket.if_nametoindex(name)
            return index

        def batch() -> Iterator[bytes]:
            for seq, resource in enumerate(resources):
                unmarked = isinstance(resource, Route) and resource.device in domain.links
                protocol = PROTO_BOOT if unmarked else PROTO_FLANNEL
                try:
                    yield rtnl.encode(resource, index_of, protocol, seq, drop=drop, mode=mode)
                except OSError:
                    refused[seq] = errno.ENODEV

        refused: dict[int, int] = {}
        for failed in self._socket.write(batch()):
            refused.update(failed)
        return refused

    def _drop_link(self, link: Link, report: Report) -> None:
        try:
            devices.drop(link.name)
            report.removed.append(link)
        except OSError as failure:
            report.failed.append(Failure(link, failure.strerror or str(failure)))


def _decoded(items: Iterable[tuple[bytes, int, int]]) -> Iterator[rtnl.SeenRoute]:
    name_of = cache(_name_of)
    return filter(None, (rtnl.decode_route(*item, name_of) for item in items))


def _index_of(name: str) -> int:
    """Zero for an interface that is not there."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def _name_of(index: int) -> str | None:
    try:
        return socket.if_indextoname(index)
    except OSError:
        return None
