"""This node, as the controller has to know it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from flanneld.model import IPNetwork, Lease
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.monitor import Monitor
from flanneld.reconcile.past.ownership import Device
from flanneld.reconcile.uplink_manager import UplinkManager
from flanneld.state.resources import Resource


class Node(Struct, frozen=True):
    """Kernel, uplink and lease of this node, and what its last run left.

    ``extras`` are wanted whoever the peers are; an earlier run may have left routes into ``former`` networks,
    and ``devices``. ``adopts`` says that another flanneld ran here before, ``adopted`` names the destinations
    of its routes that were kept. ``record`` keeps fields of ``ownership.State`` for the next run.
    """

    kernel: Kernel
    monitor: Monitor
    uplink_manager: UplinkManager
    lease: Lease
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
