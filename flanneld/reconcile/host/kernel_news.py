"""Dispatch of kernel notifications: to a repair, to a check of the host, or to nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection

from flanneld.compat.glog import V
from flanneld.model import IPAddress, IPNetwork, single
from flanneld.network.change_origin import ChangeOrigins
from flanneld.network.rtnetlink.monitor import (
    HostRouteChanged,
    InterfaceChanged,
    Notification,
    Overrun,
    ResourceChanged,
    ResourceRemoved,
    Unmonitored,
)
from flanneld.reconcile.host.host_watch import HostWatch
from flanneld.reconcile.lease_safety import LeaseSafety
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.node_tables import NodeTables
from flanneld.reconcile.past.left_behind import LeftBehind
from flanneld.reconcile.peers import Peers
from flanneld.state.report import Report
from flanneld.state.resources import LINKS, Key, Kind, Resource, Route, destination_of

log = logging.getLogger(__name__)


class KernelNews:
    """Dispatcher of the kernel's notifications to the tables and to the watch of the host."""

    def __init__(
        self, node: LocalNode, peers: Peers, tables: NodeTables, host: HostWatch, left_behind: LeftBehind
    ) -> None:
        self._node = node
        self._manager = node.uplink_manager
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
        if may_be_obstacle(item, self._peers.safety, self._node.kernel.domain.links):
            self._host.look_soon(now)
        match item:
            case Overrun():
                self._tables.work.overruns += 1
                log.log(V(1), "Kernel notifications lost: auditing all tables")
                self._read_all_back(now)
            case Unmonitored():
                self._read_all_back(now)
            case InterfaceChanged(index, name, port) if self._concerns_us(index, name):
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
        if self._manager.asks_routes:  # The backend's decisions may depend on any route.
            self._host.look_soon(now)

    def _concerns_us(self, index: int, name: str | None) -> bool:
        ours = name in self._ours()
        return ours or index in self._names or self._manager.asks_routes or self._manager.is_adrift

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


def may_be_obstacle(item: Notification, safety: LeaseSafety, links: Collection[str]) -> bool:
    """Return True if a notification may change an address, a connected network or a gateway of the host.

    ``links`` are our devices.
    """
    match item:
        case InterfaceChanged(name=name, address=address):
            # The kernel sends no notification of IPv4 routes that vanish with their link.
            is_known = name in safety.obstacles.devices
            return is_known or (address is not None and name not in links)
        case HostRouteChanged(destination, gateways):
            return _may_harm(safety, destination, *gateways)
        case ResourceRemoved(key, gateway=gateway):
            return _may_harm(safety, destination_of(key), gateway)
        case ResourceChanged(Route() as route):
            return route.device not in links and _may_harm(safety, route.destination, route.gateway)
    return False


def _may_harm(safety: LeaseSafety, destination: IPNetwork | None, *gateways: IPAddress | None) -> bool:
    """Return True if a route to the destination, or a gateway, may affect a lease."""
    nets = (destination, *(single(gateway) for gateway in gateways if gateway is not None))
    return any(net is not None and safety.concerns(net) for net in nets)
