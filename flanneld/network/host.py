"""A host's interfaces, addresses and routes: their contract, and the view of this host through its kernel.

The daemon's loops use the contract. ``rtnetlink`` implements it for this network namespace, and a simulator
for hosts of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flanneld.compat.glog import V
from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network import interfaces, routing
from flanneld.network.routing import LookupResult, SeenHostRoute
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import SeenAddress
from flanneld.network.rtnetlink.netlink import DumpInterrupted, NetlinkSocket, attributes, u32
from flanneld.state.resources import PROTO_FLANNEL, Resource

if TYPE_CHECKING:
    from flanneld.network.rtnetlink.kernel import Notification


class HostKernel(Protocol):
    """A host's interfaces, addresses and routes. Any method may raise ``OSError``.

    ``domain`` says what of them is ours.
    """

    domain: Domain

    def link(self, name: str) -> SeenLink | None:
        """Return the interface with a name, None without one."""
        ...

    def links(self) -> Sequence[SeenLink]:
        """Return all interfaces."""
        ...

    def names(self) -> Mapping[int, str]:
        """Return the name of each interface by its index."""
        ...

    def name_of(self, index: int) -> str | None:
        """Return the name of one interface, None if there is none with that index."""
        ...

    def addresses(self, family: Family, index: int = 0) -> Sequence[SeenAddress]:
        """Return the addresses of one interface, or of all."""
        ...

    def look_up_route(self, target: IPAddress) -> LookupResult | None:
        """Return which way the kernel would send a packet, None if it has no route."""
        ...

    def matching_route(self, target: IPAddress) -> SeenHostRoute | None:
        """Return the unicast route that a packet would take, None if there is none."""
        ...

    def default_routes(self, family: Family) -> Sequence[int]:
        """Return the interfaces of the main table's default routes, in the kernel's order."""
        ...

    def ways(self, family: Family, own: Iterable[int] = ()) -> Iterable[SeenHostRoute]:
        """Return unicast routes of the main table that are not flannel's; ``own`` interfaces are left out."""
        ...

    def local(self, family: Family) -> Iterable[tuple[int, IPNetwork, int]]:
        """Return type (RTN_*), network and interface of what the kernel delivers here or to a whole link."""
        ...

    def left_behind(self, domain: Domain) -> Sequence[Resource]:
        """Return the routes of any flanneld: marked ones, and unmarked ones as ``domain`` tells them."""
        ...

    def take_back(self, namespace: int, index: int, is_ours: Callable[[SeenLink], bool]) -> bool:
        """Remove an interface of another network namespace if it is ours. Return True then."""
        ...


class HostMonitor(Protocol):
    """A host's notifications of changes."""

    @property
    def missed(self) -> bool:
        """Return True if notifications were not listened to for a while; ``read`` tells of it."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor to poll for notifications."""
        ...

    def read(self, name_of: Callable[[int], str | None]) -> Sequence[Notification]:
        """Return what was heard; ``name_of`` names the devices whose entries are of interest."""
        ...


log = logging.getLogger(__name__)

_DUMP_TRIES = 5
#: Failures of a dump of nothing: a table is created with its first route, and without IPv6 it has no rules.
_NOTHING = frozenset({(rtnl.RTM_GETROUTE, errno.ENOENT), (routing.RTM_GETRULE, errno.EAFNOSUPPORT)})


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
        # Before Linux 4.20 the kernel ignores the filter. Without IPv6 it lists the addresses of IPv4 for it.
        return [each for each in seen if each and each.address.version == family and index in (0, each.index)]

    def look_up_route(self, target: IPAddress) -> routing.LookupResult | None:
        """Return the route the kernel would use for a packet, None if it has none."""
        try:
            return self.lookup(routing.RoutedPacket(target))
        except OSError as failure:
            log.log(V(4), "No route to %s: %s", target, failure)
            return None

    def matching_route(self, target: IPAddress) -> routing.SeenHostRoute | None:
        """Return the unicast route that a packet would take, None if there is none."""
        try:
            return routing.decode_match(*self._socket.ask(rtnl.RTM_GETROUTE, routing.match_request(target)))
        except OSError as failure:
            log.log(V(4), "No route to %s: %s", target, failure)
            return None

    def lookup(self, packet: routing.RoutedPacket) -> routing.LookupResult:
        """Return the route for a packet.

        Raises ``OSError`` if the kernel would drop it: EXDEV by the reverse path filter, EHOSTUNREACH if the
        interface does not forward, otherwise by a route of that kind or for want of one.
        """
        return routing.decode_lookup(*self._socket.ask(rtnl.RTM_GETROUTE, routing.lookup_request(packet)))

    def default_routes(self, family: Family) -> list[int]:
        """Return the interfaces of the main table's default routes, in the kernel's order."""
        found = self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family))
        return [index for item in found if (index := routing.decode_default_route(*item)) is not None]

    def destinations(self, family: Family) -> Iterator[tuple[str, int, int]]:
        """Yield destination, interface and type (RTN_*) of each main-table route that is no default route.

        The interface is 0 for none and for several.
        """
        for item in self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family)):
            seen = routing.decode_destination(*item)
            if seen is not None:
                yield seen

    def ways(self, family: Family, own: Iterable[int] = ()) -> Iterator[routing.SeenHostRoute]:
        """Yield the main table's unicast routes of any metric, except flannel's marked ones.

        Routes of ``own`` interfaces, which may be many, are skipped by their last bytes, without decoding
        them.
        """
        endings = {routing.interface_ending(index) for index in own}

        def is_others(data: bytes, offset: int, end: int) -> bool:
            ending = data[end - routing.ENDING : end]
            return ending not in endings and rtnl.protocol_of(data, offset, end) != PROTO_FLANNEL

        for item in self.dump(rtnl.RTM_GETROUTE, rtnl.routes_request(family), is_others):
            seen = routing.decode_host_route(*item)
            if seen is not None:
                yield seen

    def local(self, family: Family) -> Iterator[tuple[int, IPNetwork, int]]:
        """Yield type (RTN_*), network and interface of local and broadcast routes."""
        for item in self.dump(rtnl.RTM_GETROUTE, routing.local_request(family)):
            seen = routing.decode_local(*item)
            if seen is not None:
                yield seen

    def rules(self, family: Family) -> Iterator[routing.PolicyRule]:
        """Yield the policy rules for route lookups, in the kernel's order."""
        for item in self.dump(routing.RTM_GETRULE, routing.request(family)):
            yield routing.decode(*item)

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
            except OSError as failure:
                if (kind, failure.errno) not in _NOTHING:
                    raise
                return []
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


#: Directories in which container runtimes and iproute2 keep their namespaces.
_PLACES = ("/run/netns", "/run/docker/netns")
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_OURS = "/proc/thread-self/ns/net"
_RTM_GETNSID, _NSID, _FD = 90, 1, 3  # linux/rtnetlink.h, linux/net_namespace.h
_RTGENMSG = bytes(4)


def named_namespaces() -> Iterator[Path]:
    """Yield the namespaces that have a name on this host, except the one that we are in, each once."""
    try:
        known = {Path(_OURS).stat().st_ino}
    except OSError:
        return
    for place in _PLACES:
        try:
            paths = sorted(Path(place).iterdir())
        except OSError:
            continue
        for path in paths:
            with suppress(OSError):
                if (inode := path.stat().st_ino) not in known:
                    known.add(inode)
                    yield path


def number_of(view: HostView, path: Path) -> int:
    """Return the number by which this namespace knows another one, -1 if it has none. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data, offset, end = view.ask(_RTM_GETNSID, _RTGENMSG + u32(_FD, descriptor))
    finally:
        os.close(descriptor)
    raw = attributes(data, offset + len(_RTGENMSG), end).get(_NSID, b"")
    return int.from_bytes(raw, sys.byteorder, signed=True) if raw else -1


@contextmanager
def entered(path: Path) -> Iterator[None]:
    """Move this thread to a namespace and back; a socket opened meanwhile stays there.

    Raises ``OSError`` without CAP_SYS_ADMIN.
    """
    home = os.open(_OURS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _set(home)
    finally:
        os.close(home)


def _set(descriptor: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
