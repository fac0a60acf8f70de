"""This node, as the controller has to know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from flanneld.model import IPNetwork, Lease
from flanneld.network.host_kernel import HostKernel, HostMonitor
from flanneld.reconcile.past.ownership import Device
from flanneld.reconcile.uplink_manager import UplinkManager
from flanneld.state.resources import Link, Resource
from flanneld.state.table import Table

KernelTables = Callable[[Callable[[], Iterable[Link]]], Sequence[Table]]


class Node(Struct, frozen=True):
    """Kernel, uplink and lease of this node, and what its last run left.

    ``kernel_tables`` returns the kernel's tables in the order of making; its argument names stale devices.
    ``extras`` are wanted whoever the peers are; an earlier run may have left routes into ``former`` networks,
    and ``devices``. ``adopts`` says that another flanneld ran here before, ``adopted`` names the destinations
    of its routes that were kept. ``record`` keeps fields of ``ownership.State`` for the next run.
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

    @property
    def ranges(self) -> tuple[tuple[IPNetwork, int], ...]:
        """The cluster's networks, each with the length of a subnet: that of ours, which may be a podCIDR."""
        own = {net.version: net.prefixlen for net in self.lease.key if net is not None}
        ranges = self.uplink_manager.ranges
        return tuple((network, own.get(network.version, length)) for network, length in ranges)
