"""View of this host through its kernel: interfaces, addresses and routes."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from flanneld.compat.glog import V
from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network import interfaces, policy_rules, route_lookup
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.netlink import DumpInterrupted, NetlinkSocket
from flanneld.state.resources import PROTO_FLANNEL, Key, destination_of

log = logging.getLogger(__name__)

_DUMP_TRIES = 5


class HostView:
    """Reader of this network namespace. Used by one thread; any method may raise ``OSError``."""

    def __init__(self) -> None:
        self._socket = NetlinkSocket()

    @property
    def port(self) -> int:
        """The netlink port that notifications name as the author of our writes."""
        return self._socket.port

    def link(self, name: str) -> links.SeenLink | None:
        """Return an interface, None if there is none of this name."""
        try:
            return links.decode(*self._socket.ask(rtnl.RTM_GETLINK, links.by_name(name)))
        except OSError as failure:
            if failure.errno == errno.ENODEV:
                return None
            raise

    def links(self) -> list[links.SeenLink]:
        return [links.decode(*found) for found in self.dump(rtnl.RTM_GETLINK, links.everything())]

    def names(self) -> dict[int, str]:
        """Return the name of each interface by its index."""
        return interfaces.names()

    def name_of(self, index: int) -> str | None:
        """Return the name of one interface, None if there is none with that index."""
        return interfaces.name_of(index)

    def addresses(self, family: Family, index: int = 0) -> list[rtnl.SeenAddress]:
        """Return the addresses of one interface, or of all."""
        found = self.dump(rtnl.RTM_GETADDR, rtnl.addresses_request(family, index))
        seen = [rtnl.decode_address(*item) for item in found]
        # Before Linux 4.20 the kernel ignores the filter.
        return [each for each in seen if each is not None and index in (0, each.index)]

    def look_up_route(self, target: IPAddress) -> route_lookup.LookupResult | None:
        """Return the route the kernel would use for a packet, None if it has none."""
        try:
            return route_lookup.decode_lookup(
                *self._socket.ask(rtnl.RTM_GETROUTE, route_lookup.lookup_request(target))
            )
        except OSError as failure:
            log.log(V(4), "No route to %s: %s", target, failure)
            return None

    def matching_route(self, target: IPAddress) -> route_lookup.SeenHostRoute | None:
        """Return the unicast route that a packet would take, None if there is none."""
        try:
            return route_lookup.decode_match(
                *self._socket.ask(rtnl.RTM_GETROUTE, route_lookup.match_request(target))
            )
        except OSError as failure:
            log.log(V(4), "No route to %s: %s", target, failure)
            return None

    def lookup(
        self, target: IPAddress, source: IPAddress | None = None, arrives_by: int = 0
    ) -> route_lookup.LookupResult:
        """Return the route for a packet; for a forwarded one ``arrives_by`` is the index of its interface.

        Raises ``OSError`` if the kernel would drop it: EXDEV by the reverse path filter, EHOSTUNREACH if the
        interface does not forward, otherwise by a route of that kind or for want of one.
        """
        request = route_lookup.lookup_request(target, source, arrives_by)
        return route_lookup.decode_lookup(*self._socket.ask(rtnl.RTM_GETROUTE, request))

    def default_routes(self, family: Family) -> list[int]:
        """Return the interfaces of the main table's default routes, in the kernel's order."""
        found = self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family))
        return [index for item in found if (index := route_lookup.decode_default_route(*item)) is not None]

    def routes(self, family: Family) -> Iterator[tuple[IPNetwork, int, int]]:
        """Yield destination, interface and type (RTN_*) of each main-table route.

        The interface is 0 for none and for several.
        """
        for key, index, kind in self.route_keys(family):
            destination = destination_of(key)
            if destination is not None:
                yield destination, index, kind

    def route_keys(self, family: Family) -> Iterator[tuple[Key, int, int]]:
        """Yield the same with each destination as a route's key, which takes less time."""
        for item in self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family)):
            seen = route_lookup.decode_destination(*item)
            if seen is not None:
                yield seen

    def ways(self, family: Family, own: Iterable[int] = ()) -> Iterator[route_lookup.SeenHostRoute]:
        """Yield the main table's unicast routes of any metric, except flannel's marked ones.

        Routes of ``own`` interfaces, which may be many, are skipped by their last bytes, without decoding
        them.
        """
        endings = {route_lookup.interface_ending(index) for index in own}

        def is_others(data: bytes, offset: int, end: int) -> bool:
            ending = data[end - route_lookup.ENDING : end]
            return ending not in endings and rtnl.protocol_of(data, offset, end) != PROTO_FLANNEL

        for item in self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family), is_others):
            seen = route_lookup.decode_host_route(*item)
            if seen is not None:
                yield seen

    def local(self, family: Family) -> Iterator[tuple[int, IPNetwork, int]]:
        """Yield type (RTN_*), network and interface of local and broadcast routes."""
        for item in self.dump(rtnl.RTM_GETROUTE, route_lookup.local_request(family)):
            seen = route_lookup.decode_local(*item)
            if seen is not None:
                yield seen

    def rules(self, family: Family) -> Iterator[policy_rules.PolicyRule]:
        """Yield the policy rules for route lookups, in the kernel's order."""
        for item in self.dump(policy_rules.RTM_GETRULE, policy_rules.request(family)):
            yield policy_rules.decode(*item)

    def ask(self, kind: int, body: bytes) -> tuple[bytes, int, int]:
        """Return the answer to one request."""
        return self._socket.ask(kind, body)

    def dump(
        self, kind: int, body: bytes, concerns_us: Callable[[bytes, int, int], bool] = lambda *_: True
    ) -> list[tuple[bytes, int, int]]:
        """Return the messages of a dump that pass the filter."""
        for _ in range(_DUMP_TRIES):
            try:
                return [item for item in self._socket.dump(kind, body) if concerns_us(*item)]
            except DumpInterrupted:
                continue
            except FileNotFoundError:
                if kind != rtnl.RTM_GETROUTE:
                    raise
                return []  # The table is created with its first route.
        raise DumpInterrupted(errno.EINTR, "the kernel's table does not hold still")

    def stream(self, kind: int, body: bytes) -> Iterator[tuple[bytes, int, int]]:
        """Yield the messages of a dump as the kernel sends them. Other calls may come between.

        The kernel has one dump at a time for a socket, so each has its own. Raises ``DumpInterrupted`` at the
        end if objects may be missing.
        """
        with closing(NetlinkSocket()) as own:
            try:
                yield from own.dump(kind, body)
            except FileNotFoundError:
                if kind != rtnl.RTM_GETROUTE:
                    raise
