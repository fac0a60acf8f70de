"""Proof that an object found at the start belongs to this host's own last run.

A MAC or a local address is no identity: clones share MACs, and every Vagrant box has 10.0.2.15. So the
record of the last run, ``RunRecord``, is compared with the hardware, the store and the kernel. Without a
record nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from flanneld.model import IPAddress, IPNetwork, Lease, LeaseAttrs, LeaseKey
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.state.resources import ForeignLink

#: What firmware reports where the manufacturer has set no UUID: many machines share it.
_PLACEHOLDERS = frozenset(
    {
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "03000200-0400-0500-0006-000700080009",
    }
)


class Machine(Struct, frozen=True, gc=False):
    """The uplink's hardware address and the firmware's UUID; empty if unreadable."""

    hardware_address: str = ""
    product_uuid: str = ""

    @property
    def is_unique(self) -> bool:
        """Return True if both are known and the UUID is not one that many machines share."""
        return bool(self.hardware_address and self.product_uuid) and self.product_uuid not in _PLACEHOLDERS


class Device(Struct, frozen=True, gc=False):
    """Device that the daemon made or took over."""

    index: int
    kind: str
    mac: str
    name: str

    def is_same(self, seen: SeenLink) -> bool:
        """Return True if a link is this device, within one boot. Only one with a MAC may be renamed."""
        name = seen.name if self.mac else self.name
        return device_of(seen) == Device(self.index, self.kind, self.mac, seen.name) and name == seen.name


class FileStamp(Struct, frozen=True, gc=False):
    """Inode and time of the last change of a file; every writer of subnet.env makes a new inode."""

    inode: int
    mtime_ns: int


class StoreAddress(Struct, frozen=True, gc=False):
    """Address of a server of the store, inside the cluster's networks.

    ``hour`` is the last one in which the address was known, in hours since the epoch. ``is_outside`` is True
    if the store is reached there without the cluster's routes, None if that is not known yet.
    """

    address: IPAddress
    hour: int
    is_outside: bool | None = None


class RunRecord(Struct, frozen=True, gc=False):
    """Record of this host's last run.

    ``attributes`` are those that we last wrote into our lease, None without a lease to claim. ``devices`` are
    ours, and those of earlier runs that are still to be swept. ``adopts`` is True if another flanneld ran
    here before and its objects have not been swept yet. ``adopted`` are the destinations of its correct
    unmarked routes, which count as ours. ``store_tried`` is the time of the last trial without a route to
    the store, in seconds since the epoch.
    """

    boot_id: str = ""
    machine: Machine = field(default_factory=Machine)
    store: str = ""
    subnets: LeaseKey = (None, None)
    attributes: LeaseAttrs | None = None
    devices: tuple[Device, ...] = ()
    subnet_file: FileStamp | None = None
    adopts: bool = False
    adopted: frozenset[IPNetwork] = frozenset()
    store_addresses: tuple[StoreAddress, ...] = ()
    store_tried: int = 0


def device_of(seen: SeenLink) -> Device | None:
    """Return the record of a link; None for a kind of link that flannel does not make."""
    if isinstance(seen.make, ForeignLink):
        return None
    return Device(seen.index, seen.make.make, seen.mac, seen.name)


def proven_lease(state: RunRecord | None, machine: Machine, store: str, previous: LeaseKey) -> Lease | None:
    """Return the lease as this machine last wrote it; None if another machine may have written it.

    ``previous`` are the subnets of subnet.env: if they differ, another daemon ran here since.
    """
    if state is None or state.attributes is None or not machine.is_unique:
        return None
    if (state.machine, state.store) != (machine, store):
        return None
    if not any(state.subnets) or previous not in ((None, None), state.subnets):
        return None
    return Lease(state.attributes, *state.subnets)


def adopts_unmarked(state: RunRecord | None, subnet_file: FileStamp | None) -> bool:
    """Return True if another flanneld ran here since our last run, or its objects are not swept yet."""
    if state is None:
        return subnet_file is not None
    return state.adopts or (subnet_file is not None and subnet_file != state.subnet_file)


def devices_of_this_boot(state: RunRecord | None, boot_id: str) -> tuple[Device, ...]:
    """Return the recorded devices; after a reboot their indexes mean other devices."""
    return state.devices if state is not None and boot_id and state.boot_id == boot_id else ()


def stale(devices: Iterable[Device], present: Iterable[SeenLink], desired: Iterable[str]) -> list[SeenLink]:
    """Return the links of earlier runs that are no longer ``desired``, by name."""
    kept, recorded = frozenset(desired), tuple(devices)
    return [
        seen for seen in present if seen.name not in kept and any(each.is_same(seen) for each in recorded)
    ]
