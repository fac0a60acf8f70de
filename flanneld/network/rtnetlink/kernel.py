"""Reads and writes of the kernel's objects over rtnetlink, and its notifications of changes by others.

The thread that writes to the kernel also reads the notifications, so the two never race. Our own changes are
recognised by their netlink port, or match the desired state anyway.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import FAMILIES, IPAddress, IPNetwork
from flanneld.network import routing
from flanneld.network.host import HostView
from flanneld.network.interfaces import name_of
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import NOTHING, ON_OUR_DEVICES, Domain, SeenRoute, protocol_for
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import CreateMode
from flanneld.network.rtnetlink.netlink import MalformedNetlink, NetlinkSocket, message, messages
from flanneld.state.resources import PROTO_FLANNEL, Key, Resource

_GROUPS = (
    rtnl.GROUP_LINK,
    rtnl.GROUP_NEIGH,
    rtnl.GROUP_IPV4_ADDRESS,
    rtnl.GROUP_IPV4_ROUTE,
    rtnl.GROUP_IPV6_ADDRESS,
    rtnl.GROUP_IPV6_ROUTE,
)
#: Bytes of receive buffer: room for the notifications of some thousand changes while this process is busy.
_RECEIVE_BUFFER = 8 << 20
#: Datagrams per read, so that a storm of notifications does not starve other work.
_AT_A_TIME = 1000


class ResourceChanged(Struct, frozen=True, gc=False):
    """A resource was created or changed. ``port`` is the writer's netlink port, 0 if unknown."""

    resource: Resource
    port: int = 0


class ResourceRemoved(Struct, frozen=True, gc=False):
    """The object with this key was removed. ``gateway`` is that of a route, if known."""

    key: Key
    port: int = 0
    gateway: IPAddress | None = None


class InterfaceChanged(Struct, frozen=True, gc=False):
    """An interface, its address or its default route changed or was removed. ``name`` may be unknown.

    ``address`` is the address, or the gateway of the route. ``moved`` is the number of the network namespace
    to which the interface was moved, with its index there.
    """

    index: int
    name: str | None
    port: int = 0
    address: IPAddress | None = None
    moved: tuple[int, int] | None = None


class HostRouteChanged(Struct, frozen=True, gc=False):
    """A route with none of our keys was added or removed, for example one with another metric."""

    destination: IPNetwork
    gateways: tuple[IPAddress, ...] = ()
    port: int = 0


class Overrun(Struct, frozen=True, gc=False):
    """Notifications were lost: anything may have changed."""


class Unmonitored(Struct, frozen=True, gc=False):
    """Notifications were off during our own bulk write: anything may have changed."""


Notification = ResourceChanged | ResourceRemoved | InterfaceChanged | HostRouteChanged | Overrun | Unmonitored


class Monitor:
    """Listener for link, address, route and neighbour changes, except those by netlink port ``port``."""

    def __init__(self, port: int) -> None:
        self._socket = NetlinkSocket(_GROUPS, _RECEIVE_BUFFER)
        self._socket.ignore(port)
        self._port = port
        #: True if notifications were off for a while; ``read`` reports that.
        self.missed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Turn notifications off for a bulk write, after which reading back is cheaper."""
        self._socket.stop_listening()
        try:
            yield
        finally:
            self._socket.listen()

    def read(self, name_of: Callable[[int], str | None]) -> list[Notification]:
        """Return pending news about devices known to ``name_of``, about routes and all interfaces.

        A route through another device has an empty name: it may occupy our place.
        """
        news: list[Notification] = [Unmonitored()] if self.missed else []
        self.missed = False
        for _ in range(_AT_A_TIME):
            data = self._receive()
            if data is None:
                break
            if isinstance(data, Overrun):
                news.append(data)
                continue
            for kind, _, _, port, offset, end in messages(data):
                if (
                    port != self._port
                    and (item := decode_notification(kind, data, offset, end, name_of)) is not None
                ):
                    news.append(item if isinstance(item, Overrun | Unmonitored) else replace(item, port=port))
        return news

    def _receive(self) -> bytes | Overrun | None:
        try:
            return self._socket.receive()
        except BlockingIOError:
            return None
        except OSError as failure:
            if failure.errno == errno.ENOBUFS:
                return Overrun()
            raise


def decode_notification(
    kind: int, data: bytes, offset: int, end: int, name_of: Callable[[int], str | None]
) -> Notification | None:
    """Decode one notification. A malformed one counts as an overrun: it may mean anything."""
    try:
        return _decode(kind, data, offset, end, name_of)
    except MalformedNetlink:
        return Overrun()


def _decode(
    kind: int, data: bytes, offset: int, end: int, name_of: Callable[[int], str | None]
) -> Notification | None:
    match kind:
        case rtnl.RTM_NEWLINK | rtnl.RTM_DELLINK:
            link = links.decode(data, offset, end)
            moved = links.moved_to(data, offset, end) if kind == rtnl.RTM_DELLINK else None
            return InterfaceChanged(link.index, link.name, moved=moved)
        case rtnl.RTM_NEWADDR | rtnl.RTM_DELADDR:
            seen = rtnl.decode_address(data, offset, end)
            if seen is None or seen.address.is_link_local:
                return InterfaceChanged(seen.index, name_of(seen.index)) if seen else None
            return InterfaceChanged(seen.index, name_of(seen.index), address=seen.address)
        case rtnl.RTM_NEWROUTE | rtnl.RTM_DELROUTE:
            found = rtnl.decode_route(data, offset, end, lambda index: name_of(index) or "")
            if found is not None:
                route = found.route
                gone = ResourceRemoved(route.key, gateway=route.gateway)
                return ResourceChanged(route) if kind == rtnl.RTM_NEWROUTE else gone
            return _odd_route(kind, data, offset, end, name_of)
        case rtnl.RTM_NEWNEIGH | rtnl.RTM_DELNEIGH:
            entry = rtnl.decode_neighbor(data, offset, end, name_of) if kind == rtnl.RTM_NEWNEIGH else None
            # An entry that is no longer permanent counts as removed.
            key = None if entry else rtnl.decode_gone_neighbor(data, offset, end, name_of)
            return ResourceChanged(entry) if entry else ResourceRemoved(key) if key else None
    return None


def _odd_route(
    kind: int, data: bytes, offset: int, end: int, name_of: Callable[[int], str | None]
) -> Notification | None:
    """Decode a route that cannot be ours: it may concern the uplink, or occupy our place."""
    index = routing.decode_default_route(data, offset, end)
    if index is not None:
        way = routing.decode_host_route(data, offset, end)
        gateways = [gateway for _, gateway in way.hops if gateway is not None] if way else []
        return InterfaceChanged(index, name_of(index), address=gateways[0] if gateways else None)
    blackhole = rtnl.decode_blackhole(data, offset, end)
    if blackhole is not None:
        return ResourceChanged(blackhole) if kind == rtnl.RTM_NEWROUTE else ResourceRemoved(blackhole.key)
    other = rtnl.outline(data, offset, end)
    if other is not None:
        return ResourceRemoved(other[0])
    way = routing.decode_host_route(data, offset, end)
    if way is None or way.destination is None:
        return None
    return HostRouteChanged(way.destination, tuple(gateway for _, gateway in way.hops if gateway is not None))


#: Writes per call from which on the tables are read back, instead of processing the notifications.
_BULK = 500
#: Protocols of routes that any flanneld writes.
_FLANNELS = ON_OUR_DEVICES | {PROTO_FLANNEL}


class Kernel(HostView):
    """View of this network namespace, for reading and writing. Used by one thread.

    ``domain`` tells which objects are ours.
    """

    def __init__(self, domain: Domain = NOTHING) -> None:
        super().__init__()
        self.domain = domain
        self.monitor: Monitor | None = None

    def listen(self) -> Monitor:
        """Start and return the monitor of changes by others. It reports bulk writes as a gap."""
        self.monitor = Monitor(self.port)
        return self.monitor

    def left_behind(self, domain: Domain) -> list[Resource]:
        """Return the routes of any flanneld: all marked ones, and unmarked ones that ``domain`` claims."""
        found: list[Resource] = []
        for family in FAMILIES:
            items = self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family), _may_be_flannels)
            marked = [item for item in items if rtnl.protocol_of(*item) == PROTO_FLANNEL]
            unmarked = [item for item in items if rtnl.protocol_of(*item) != PROTO_FLANNEL]
            found += filter(None, (rtnl.decode_blackhole(*item) for item in marked))
            found += [seen.route for seen in _decoded(marked)]
            found += [seen.route for seen in _decoded(unmarked) if domain.owns_route(seen, adopt=True)]
        return found

    def write(
        self,
        resources: Sequence[Resource],
        *,
        drop: bool = False,
        mode: CreateMode = CreateMode.REPLACE,
        spread: bool = False,
    ) -> dict[int, int]:
        """Write resources in batches. Return the errno of each refused one, by its position.

        With ``spread`` the protocol numbers of routes on our devices vary.
        """
        indexes: dict[str, int] = {}

        def index_of(name: str) -> int:  # functools.cache takes longer to make than to ask
            index = indexes.get(name)
            if index is None:
                index = indexes[name] = self._socket.index_of(name)
            return index

        def batch() -> Iterator[bytes]:
            for seq, resource in enumerate(resources):
                protocol = protocol_for(resource, self.domain.links, spread=spread)
                try:
                    yield rtnl.encode(resource, index_of, protocol, seq, drop=drop, mode=mode)
                except OSError as failure:
                    if failure.errno != errno.ENODEV:
                        raise
                    refused[seq] = errno.ENODEV

        refused: dict[int, int] = {}
        monitor = self.monitor if len(resources) > _BULK else None
        with monitor.paused() if monitor else nullcontext():
            for failed in self._socket.write(batch()):
                refused.update(failed)
        if monitor and len(refused) < len(resources):
            monitor.missed = True
        return refused

    def take_back(self, namespace: int, index: int, is_ours: Callable[[SeenLink], bool]) -> bool:
        """Remove an interface of another network namespace if it is ours. Return True then."""
        body = links.in_namespace(namespace, index)
        if not is_ours(links.decode(*self.ask(rtnl.RTM_GETLINK, body))):
            return False
        for failed in self._socket.write([message(rtnl.RTM_DELLINK, 0, body)]):
            for _, code in failed:
                raise OSError(code, os.strerror(code))
        return True

    def clear_routes(self, destinations: Iterable[IPNetwork]) -> None:
        """Remove the first route to each destination, of any kind. A missing one is no error."""
        for _ in self._socket.write(rtnl.clear_route(each, seq) for seq, each in enumerate(destinations)):
            pass


def _may_be_flannels(data: bytes, offset: int, end: int) -> bool:
    return rtnl.protocol_of(data, offset, end) in _FLANNELS


def _decoded(items: Iterable[tuple[bytes, int, int]]) -> Iterator[SeenRoute]:
    named = cache(name_of)
    return filter(None, (rtnl.decode_route(*item, named) for item in items))
