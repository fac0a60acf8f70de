"""Notifications of changes that others make to this kernel.

The thread that writes to the kernel also reads this socket, so the two never race. Our own changes are
recognised by their netlink port, or match the desired state anyway.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import IPAddress, IPNetwork
from flanneld.network import lookups
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.netlink import MalformedNetlink, NetlinkSocket, messages
from flanneld.state.resources import Key, Resource

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
                if port != self._port and (item := decode(kind, data, offset, end, name_of)) is not None:
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


def decode(
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
    index = lookups.decode_default_route(data, offset, end)
    if index is not None:
        way = lookups.decode_host_route(data, offset, end)
        gateways = [gateway for _, gateway in way.hops if gateway is not None] if way else []
        return InterfaceChanged(index, name_of(index), address=gateways[0] if gateways else None)
    blackhole = rtnl.decode_blackhole(data, offset, end)
    if blackhole is not None:
        return ResourceChanged(blackhole) if kind == rtnl.RTM_NEWROUTE else ResourceRemoved(blackhole.key)
    other = rtnl.outline(data, offset, end)
    if other is not None:
        return ResourceRemoved(other[0])
    way = lookups.decode_host_route(data, offset, end)
    if way is None or way.destination is None:
        return None
    return HostRouteChanged(way.destination, tuple(gateway for _, gateway in way.hops if gateway is not None))
