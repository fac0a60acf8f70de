"""Facts about this node for the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from flanneld.model import IPNetwork, Lease
from flanneld.network.host_kernel import HostKernel, HostMonitor
from flanneld.reconcile.host.uplink_manager import UplinkManager
from flanneld.reconcile.past.ownership import Device, StoreAddress
from flanneld.state.resources import Link, Resource
from flanneld.state.table import Table
from flanneld.subnet.store import Store

KernelTables = Callable[[Callable[[], Iterable[Link]]], Sequence[Table]]


class LocalNode(Struct, frozen=True):
    """Kernel, uplink and lease of this node, and the record of its last run.

    ``kernel_tables`` returns the kernel's tables in the order of creation; its argument names stale devices.
    ``extras`` are desired in addition to the backend's objects. An earlier run may have left ``devices``, and
    routes into ``former`` networks. ``adopts`` is True if another flanneld ran here before; ``adopted`` are
    the destinations of its routes that were kept. ``record`` keeps fields of ``ownership.RunRecord``, such as
    ``store_addresses`` and ``store_tried``. ``store`` is None if no lease can cut this node off from it.
    """

    kernel: HostKernel
    monitor: HostMonitor
    uplink_manager: UplinkManager
    lease: Lease
    kernel_tables: KernelTables
    extras: tuple[Resource, ...] = ()
    former: tuple[IPNetwork, ...] = ()
    devices: tuple[Device, ...] = ()
    adopts: bool = False
    adopted: frozenset[IPNetwork] = frozenset()
    record: Callable[..., None] = lambda **_: None
    store: Store | None = None
    store_addresses: tuple[StoreAddress, ...] = ()
    store_tried: int = 0

    @property
    def ranges(self) -> tuple[tuple[IPNetwork, int], ...]:
        """Return the cluster's networks, each with our subnet's prefix length, which may be a podCIDR's."""
        own = {net.version: net.prefixlen for net in self.lease.key if net is not None}
        ranges = self.uplink_manager.ranges
        return tuple((network, own.get(network.version, length)) for network, length in ranges)
