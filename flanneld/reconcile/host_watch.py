"""Watch of the host beneath the network: its uplink, its other networks, its kernel's notifications.

The first check comes before the first change, with what a start demands of the host. If the backend encrypts,
routes and policies by which packets leave unencrypted are looked for, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress

from msgspec.structs import replace

from flanneld.backends.contract import Backend
from flanneld.compat.glog import V, counted
from flanneld.errors import Fatal, cause_of
from flanneld.model import IPAddress, IPNetwork, Lease, single
from flanneld.network.host import HostKernel
from flanneld.network.obstacles import HostNetworks, HostRoute, Obstacle
from flanneld.network.processes import ChangeOrigins
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import (
    HostRouteChanged,
    InterfaceChanged,
    Notification,
    Overrun,
    ResourceChanged,
    ResourceRemoved,
    Unmonitored,
)
from flanneld.network.rtnetlink.links import described, is_not_ours_to_remove
from flanneld.network.uplink_facts import read_host_networks
from flanneld.reconcile.claims import AddressClaims
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.reconciler import REST, SETTLE
from flanneld.reconcile.store_watch import StoreWatch
from flanneld.reconcile.sweep import RETRY, LeftBehind
from flanneld.reconcile.worker import NodeTables
from flanneld.runtime import clock
from flanneld.runtime.logs import Once
from flanneld.state.desired import Delta
from flanneld.state.resources import (
    LINKS,
    ROUTES,
    Key,
    Kind,
    Link,
    Resource,
    Route,
    Vxlan,
    destination_of,
    route_key,
)
from flanneld.state.table import Bypass, Report

log = logging.getLogger(__name__)


def demand_free_names(kernel: HostKernel, links: Iterable[Link]) -> None:
    """Raise ``Fatal`` if another program's device has one of our names; may raise ``OSError``."""
    for link in links:
        seen = kernel.link(link.name)
        if seen and is_not_ours_to_remove(link, seen.make):
            raise Fatal(
                f"{link.name} is {described(seen.make)}, and we need a device of kind {link.make}",
                f"give it another name: ip link set {link.name} down; ip link set {link.name} name OTHER",
            )


def demand_free_networks(local: Iterable[Resource], host: HostNetworks) -> None:
    """Raise ``Fatal`` if a route that this node needs would take over a network of the host."""
    connected = {each.net: each for each in host.obstacles if each.what == "network"}
    for route in local:
        obstacle = connected.get(route.destination) if isinstance(route, Route) else None
        if obstacle is not None and isinstance(route, Route):
            raise Fatal(
                f"{obstacle}, and all of {obstacle.net} would go into {route.device}",
                "give the network config another Network, or use another backend",
            )


def networks_around(host: HostNetworks, ranges: Iterable[tuple[IPNetwork, int]]) -> list[Obstacle]:
    """Return the connected networks larger than a subnet: more specific routes would split them."""
    lengths = {network.version: length for network, length in ranges}
    found = [each for each in host.obstacles if each.what == "network"]
    around = [each for each in found if each.net.prefixlen < lengths.get(each.net.version, 0)]
    return sorted(around, key=lambda each: (each.net.version, each.net, str(each)))


def warn_of_networks_around(host: HostNetworks, domain: Domain) -> None:
    """Warn of networks on this host's links that overlap the cluster's and exceed a node's subnet."""
    for network in networks_around(host, domain.ranges):
        log.warning(
            "Network overlap: %s; its hosts with addresses in a node's subnet are not reached; "
            "choose a Network that no link of any node uses",
            network,
        )


#: Seconds between two checks of the uplink and the host's networks without notifications.
LOOK_PERIOD = 30.0
#: Minimum seconds between two checks because of notifications.
LOOK_SPACING = 0.2


class HostWatch:
    """Watch that checks the host on demand and periodically.

    ``on_move`` is called after a new uplink, ``on_mtu`` after a lower MTU. ``on_leases`` is called once
    the host has changed which leases are followed, if all are known.
    """

    def __init__(
        self,
        node: LocalNode,
        peers: Peers,
        tables: NodeTables,
        *,
        on_move: Callable[[], None],
        on_leases: Callable[[], None],
        on_mtu: Callable[[], None],
    ) -> None:
        self._node = node
        self._uplinks = node.uplink_manager
        self._peers = peers
        self._tables = tables
        self._on_move = on_move
        self._on_leases = on_leases
        self._on_mtu = on_mtu
        self.encryption = EncryptionWatch()
        self._store = StoreWatch(node, peers.desired.get)
        self._once = Once()
        #: Time of the next check, in seconds on ``clock.now``.
        self.next_look = clock.now()
        self._earliest_look = 0.0
        #: True if a notification asks to check the uplink as well as the host's networks.
        self.uplink_may_have_moved = False
        #: True if the network's MTU was lowered. Set by another thread.
        self.mtu_is_lower = False

    def look_soon(self, now: float) -> None:
        """Check as soon as a burst of notifications has ended."""
        self.next_look = min(self.next_look, max(now + SETTLE, self._earliest_look))

    def postpone(self, now: float) -> None:
        """Schedule the next check as if one had just been made."""
        self.next_look = now + LOOK_PERIOD

    def look(self, now: float) -> None:
        """Follow the uplink, and decide again about leases that the host's networks affect."""
        began = clock.cpu_time()
        self.postpone(now)
        try:
            self._follow_uplink(now)
            self.look_at_networks(now)
        except OSError as failure:
            self.could_not_read(failure, now)
            return
        self.tell_of_bypasses()
        self._once.clear("read")
        self._earliest_look = now + max(LOOK_SPACING, REST * (clock.cpu_time() - began))

    def look_at_networks(self, now: float) -> None:
        """Remove the objects of leases that have become unsafe, and restore those that are safe again.

        Raises ``OSError`` if the kernel's tables cannot be read.
        """
        networks = self._uplinks.networks
        own = [net for net in self._node.lease.key if net is not None]
        store = self._store.look(now, networks, own)
        self.next_look = min(self.next_look, self._store.due)
        host = read_host_networks(self._node.kernel, networks, own, self._node.kernel.domain.links, store)
        if host != self._peers.claims.host:
            self._change(self._peers.look(host, self._uplinks.backend), now)
        self._store.applied()
        self._peers.log_changes(now)

    def watch_encryption(self, now: float) -> None:
        """Check the host's routes again if the backend encrypts: those of an earlier run have gone."""
        if self._uplinks.backend.encrypts:
            with suppress(OSError):
                self.look_at_networks(now)
            self.tell_of_bypasses()

    def tell_of_bypasses(self) -> None:
        """Update the report of ways past the encryption, as the host and the tables were last read."""
        if self._uplinks.backend.encrypts:
            detours = self._peers.claims.host.detours
            self.encryption.look(detours, self._peers.desired.table(ROUTES), self._tables.bypasses())

    def set_local(self) -> Delta:
        """Set the desired objects that this node needs without peers. Return their change."""
        kernel = self._node.kernel
        more = self._node.once_synced if self._peers.synced else ()
        local = self._uplinks.local(self._node.lease)
        delta = self._peers.set_local((*local, *self._node.extras, *more))
        ours = self.links()
        kernel.domain = replace(
            kernel.domain,
            uplink=self._uplinks.uplink.name,
            links=frozenset(link.name for link in ours),
            bridging=frozenset(link.name for link in ours if isinstance(link, Vxlan)),
        )
        return delta

    def use_mtu(self, now: float) -> None:
        """Give the devices and the subnet file an MTU that was lowered."""
        if self.mtu_is_lower:
            self.mtu_is_lower = False
            self._tables.change(self.set_local(), now)
            self._on_mtu()

    def links(self) -> list[Link]:
        """Return the devices that this node needs."""
        return [item for item in self._peers.local_resources() if isinstance(item, Link)]

    def could_not_read(self, failure: OSError, now: float) -> None:
        """Warn once of a failed read of the kernel, and try again soon."""
        self._once.warn(
            log,
            "read",
            f"Cannot read the kernel's tables: {cause_of(failure)}; changing nothing until they can be read",
        )
        self.next_look = min(self.next_look, now + RETRY)

    def _follow_uplink(self, now: float) -> None:
        uplinks = self._uplinks
        if not (self.uplink_may_have_moved or uplinks.asks_routes or uplinks.is_adrift):
            return
        moved = uplinks.follow()
        self.uplink_may_have_moved = False
        if moved:
            self.set_local()
        if moved or uplinks.asks_routes:
            self._change(self._peers.reconsider(uplinks.backend), now, all_anew=moved)
        if moved:
            self._on_move()

    def _change(self, delta: Delta, now: float, *, all_anew: bool = False) -> None:
        """Apply a new decision. A change of single leases waits until all leases are known."""
        if all_anew:
            report = self._tables.converge(now)
            log.info("Made %s for the new uplink", counted(len(report.made), "object"))
        elif delta and self._peers.synced:
            self._tables.change(delta, now)
        elif delta and self._peers.cached:
            self._tables.converge(now)
        if delta and self._peers.synced:
            self._on_leases()


class KernelNews:
    """Dispatcher of the kernel's notifications to the tables and to the watch of the host."""

    def __init__(
        self, node: LocalNode, peers: Peers, tables: NodeTables, host: HostWatch, left_behind: LeftBehind
    ) -> None:
        self._node = node
        self._uplinks = node.uplink_manager
        self._peers = peers
        self._tables = tables
        self._host = host
        self._left_behind = left_behind
        self._origins = ChangeOrigins()
        #: Our devices and the uplink, by index, as last read.
        self._names: dict[int, str] = {}

    def take(self, now: float) -> None:
        """Dispatch all notifications since the last call."""
        for item in self._node.monitor.read(self._names.get):
            self._take(item, now)

    def passed(self, report: Report) -> None:
        """Take over a repair of the tables, and record our devices for the next run.

        Raises ``OSError`` if the kernel's interfaces cannot be read.
        """
        self._origins.forget()
        names = self._interfaces()
        if names != self._names or any(each.kind is Kind.LINK for each in report.removed):
            self._left_behind.record_devices()
            self._names = names

    def _take(self, item: Notification, now: float) -> None:
        if may_be_obstacle(item, self._peers.claims, self._node.kernel.domain.links):
            self._host.look_soon(now)
        match item:
            case Overrun():
                self._tables.work.overruns += 1
                log.log(V(1), "Kernel notifications lost: auditing all tables")
                self._read_all_back(now)
            case Unmonitored():
                self._read_all_back(now)
            case InterfaceChanged(index, name, port, _, moved) if self._concerns_us(index, name):
                if moved is not None:
                    self._left_behind.take_back(index, *moved)
                self._read_all_back(now, (LINKS, name or ""), port)
            case ResourceRemoved(key, port):
                self._heard_of(key, port, now, is_drift=self._peers.desired.get(key) is not None)
            case ResourceChanged(resource, port):
                self._heard_of(resource.key, port, now, is_drift=self._is_drift(resource))

    def _read_all_back(self, now: float, key: Key | None = None, port: int = 0) -> None:
        self._host.uplink_may_have_moved = True
        self._tables.reconciler.hear(now, None, key, self._origins.of(port))
        self._host.look_soon(now)

    def _heard_of(self, key: Key, port: int, now: float, *, is_drift: bool) -> None:
        if is_drift:
            self._tables.reconciler.hear(now, key[0], key, self._origins.of(port))
        if self._uplinks.asks_routes:  # The backend's decisions may depend on any route.
            self._host.look_soon(now)

    def _concerns_us(self, index: int, name: str | None) -> bool:
        ours = name in self._ours()
        return ours or index in self._names or self._uplinks.asks_routes or self._uplinks.is_adrift

    def _is_drift(self, resource: Resource) -> bool:
        desired = self._peers.desired.get(resource.key)
        if desired is None:
            return getattr(resource, "device", None) in self._node.kernel.domain.links
        return desired != resource

    def _interfaces(self) -> dict[int, str]:
        ours = self._ours()
        return {index: name for index, name in self._node.kernel.names().items() if name in ours}

    def _ours(self) -> tuple[str, ...]:
        domain = self._node.kernel.domain
        return (domain.uplink, *domain.links)


def may_be_obstacle(item: Notification, claims: AddressClaims, links: Collection[str]) -> bool:
    """Return True if a notification may change an address, a connected network or a gateway of the host.

    ``links`` are our devices.
    """
    match item:
        case InterfaceChanged(name=name, address=address):
            # The kernel sends no notification of IPv4 routes that vanish with their link.
            is_known = name in claims.devices
            return is_known or (address is not None and name not in links)
        case HostRouteChanged(destination, gateways):
            return _may_harm(claims, destination, *gateways)
        case ResourceRemoved(key, gateway=gateway):
            return _may_harm(claims, destination_of(key), gateway)
        case ResourceChanged(Route() as route):
            return route.device not in links and _may_harm(claims, route.destination, route.gateway)
    return False


def _may_harm(claims: AddressClaims, destination: IPNetwork | None, *gateways: IPAddress | None) -> bool:
    """Return True if a route to the destination, or a gateway, may affect a lease."""
    nets = (destination, *(single(gateway) for gateway in gateways if gateway is not None))
    return any(net is not None and claims.concerns(net) for net in nets)


def leaks(resource: Resource, backend: Backend, own: Lease, links: Collection[str], *, synced: bool) -> bool:
    """Return True if packets leave unencrypted by this own route though the backend encrypts.

    ``links`` are our devices. While one backend takes over from another, the routes of the former serve
    until all peers are known. Then they are replaced without packet loss.
    """
    if not isinstance(resource, Route) or not backend.encrypts:
        return False
    if resource.device not in links:
        return synced or not backend.switches
    return synced and resource.device in backend.clear_devices(own)


def bypasses(detours: Iterable[HostRoute], desired: Mapping[Key, Resource]) -> list[HostRoute]:
    """Return other programs' routes that bypass the encryption. Desired routes do not count."""

    def is_wanted(route: HostRoute) -> bool:
        want = desired.get(route_key(route.destination)) if route.destination else None
        return isinstance(want, Route) and route.hops == ((want.device, want.gateway),)

    return sorted((route for route in detours if not is_wanted(route)), key=str)


class EncryptionWatch:
    """Watch that reports other programs' routes and policies past the encryption. It never removes them."""

    def __init__(self) -> None:
        #: Reason why packets may leave unencrypted, with the remedy; else empty. Read from any thread.
        self.problem = ""
        self._once = Once()

    def look(
        self,
        detours: Iterable[HostRoute],
        desired: Mapping[Key, Resource],
        policies: Iterable[Bypass] = (),
    ) -> None:
        routes = (Bypass(f"route {each}", f"ip route delete {each}") for each in bypasses(detours, desired))
        found = [*routes, *policies]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        self.problem = (
            f"packets may leave unencrypted by another program's {found[0].what}{more};"
            f" remove it: {found[0].removal}"
            if found
            else ""
        )
        if self.problem:
            self._once.warn(log, "bypass", f"Encryption bypassed: {self.problem}")
        elif self._once.clear("bypass"):
            log.info("Encryption no longer bypassed")
