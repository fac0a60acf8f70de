"""What others do to this kernel, as news about resources.

The socket is read by the thread that also writes to the kernel, so there is no race between the
two: what this process changed itself is known by its port, or is what is wanted anyway.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from msgspec import Struct

from flanneld.model import IPAddress, IPNetwork
from flanneld.network import route_lookup
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.netlink import Malformed, NetlinkSocket, messages
from flanneld.state.resources import Key, Resource

_GROUPS = (
    rtnl.GROUP_LINK,
    rtnl.GROUP_NEIGH,
    rtnl.GROUP_IPV4_ADDRESS,
    rtnl.GROUP_IPV4_ROUTE,
    rtnl.GROUP_IPV6_ADDRESS,
    rtnl.GROUP_IPV6_ROUTE,
)
#: Room for the notifications of some thousand foreign changes while this process is busy.
_RECEIVE_BUFFER = 8 << 20
#: Datagrams to read at a time, so that a storm of notifications keeps nobody from all other work.
_AT_A_TIME = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """A resource is there, perhaps changed. ``port`` is whose doing it is, 0 if the kernel does not say."""

    resource: Resource
    port: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Gone:
    """What had this key is no longer there. ``gateway`` is that of a route, as far as it is known."""

    key: Key
    port: int = field(default=0, compare=False)
    gateway: IPAddress | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class InterfaceChanged:
    """An interface, an address or a default route of one changed or went; ``name`` may be unknown.

    ``address`` is that address, or the gateway of that route.
    """

    index: int
    name: str | None
    port: int = field(default=0, compare=False)
    address: IPAddress | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class HostRouteChanged:
    """A route that has the key of none of ours came or went, as one with another metric has."""

    destination: IPNetwork
    gateways: tuple[IPAddress, ...] = ()
    port: int = field(default=0, compare=False)


class Overrun(Struct, frozen=True, gc=False):
    """Notifications were lost: anything may have happened."""


class Unheard(Struct, frozen=True, gc=False):
    """Nobody listened during a write of ours in bulk: anything may have happened."""


News = Seen | Gone | InterfaceChanged | HostRouteChanged | Overrun | Unheard


class Monitor:
    """Listens to link, address, route and neighbour changes. ``port`` is the writer whose echo to skip."""

    def __init__(self, port: int) -> None:
        self._socket = NetlinkSocket(_GROUPS, _RECEIVE_BUFFER)
        self._port = port
        #: Whether nobody listened for a while: ``read`` tells.
        self.missed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Hear nothing meanwhile: for writes of ours so many that reading back is cheaper than their echo."""
        self._socket.turn_deaf()
        try:
            yield
        finally:
            self._socket.listen()

    def read(self, name_of: Callable[[int], str | None]) -> list[News]:
        """What is waiting, about devices that ``name_of`` knows, about routes and about all interfaces.

        A route through another device has an empty one: it may stand where one of ours should be.
        """
        news: list[News] = [Unheard()] if self.missed else []
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
                    news.append(item if isinstance(item, Overrun | Unheard) else replace(item, port=port))
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
) -> News | None:
    """What one notification means; one that is not understood may mean anything."""
    try:
        return _decode(kind, data, offset, end, name_of)
    except Malformed:
        return Overrun()


def _decode(
    kind: int, data: bytes, offset: int, end: int, name_of: Callable[[int], str | None]
) -> News | None:
    match kind:
        case rtnl.RTM_NEWLINK | rtnl.RTM_DELLINK:
            link = links.decode(data, offset, end)
            return InterfaceChanged(link.index, link.name)
        case rtnl.RTM_NEWADDR | rtnl.RTM_DELADDR:
            seen = rtnl.decode_address(data, offset, end)
            if seen is None or seen.address.is_link_local:
                return InterfaceChanged(seen.index, name_of(seen.index)) if seen else None
            return InterfaceChanged(seen.index, name_of(seen.index), address=seen.address)
        case rtnl.RTM_NEWROUTE | rtnl.RTM_DELROUTE:
            found = rtnl.decode_route(data, offset, end, lambda index: name_of(index) or "")
            if found is not None:
                route = found.route
                gone = Gone(route.key, gateway=route.gateway)
                return Seen(route) if kind == rtnl.RTM_NEWROUTE else gone
            return _odd_route(kind, data, offset, end, name_of)
        case rtnl.RTM_NEWNEIGH | rtnl.RTM_DELNEIGH:
            entry = rtnl.decode_neighbor(data, offset, end, name_of) if kind == rtnl.RTM_NEWNEIGH else None
            # One that is there but no longer permanent is as good as gone.
            key = None if entry else rtnl.decode_gone_neighbor(data, offset, end, name_of)
            return Seen(entry) if entry else Gone(key) if key else None
    return None


def _odd_route(
    kind: int, data: bytes, offset: int, end: int, name_of: Callable[[int], str | None]
) -> News | None:
    """A route that can never be ours still may tell of the uplink, or stand where ours should be."""
    index = route_lookup.decode_default_route(data, offset, end)
    if index is not None:
        way = route_lookup.decode_seen_way(data, offset, end)
        gateways = [gateway for _, gateway in way.hops if gateway is not None] if way else []
        return InterfaceChanged(index, name_of(index), address=gateways[0] if gateways else None)
    blackhole = rtnl.decode_blackhole(data, offset, end)
    if blackhole is not None:
        return Seen(blackhole) if kind == rtnl.RTM_NEWROUTE else Gone(blackhole.key)
    other = rtnl.outline(data, offset, end)
    if other is not None:
        return Gone(other[0])
    way = route_lookup.decode_seen_way(data, offset, end)
    if way is None or way.destination is None:
        return None
    return HostRouteChanged(way.destination, tuple(gateway for _, gateway in way.hops if gateway is not None))
