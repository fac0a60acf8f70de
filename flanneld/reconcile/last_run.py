"""Record of this host's last run, its file beside subnet.env, and what it proves at the start.

A MAC or a local address is no identity: clones share MACs, and every Vagrant box has 10.0.2.15. So the record
is compared with the hardware, the store and the kernel. Without a record nothing is claimed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from flanneld.errors import Refused
from flanneld.model import IPAddress, IPNetwork, Lease, LeaseAttrs, LeaseKey, Uplink
from flanneld.network.host import HostKernel
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.runtime import clock, files
from flanneld.runtime.logs import Once
from flanneld.state.resources import ForeignLink
from flanneld.subnet.codec import format_attrs, parse_attrs
from flanneld.subnet.subnet_file import NetworkAndSubnet, beside

log = logging.getLogger(__name__)

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
    """Device that the daemon made or took over; ``index`` is 0 if it was about to be made."""

    index: int
    kind: str
    mac: str
    name: str

    def is_same(self, seen: SeenLink) -> bool:
        """Return True if a link is this device, within one boot. Only one with a MAC may be renamed."""
        if not self.index:
            is_kind = not isinstance(seen.make, ForeignLink) and seen.make.make == self.kind
            return is_kind and seen.name == self.name and self.mac in ("", seen.mac)
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
    the store, in seconds since the epoch. ``earlier`` are attributes that we wrote into the lease before,
    last ones first: a backup of the store shows them. ``path_mtu`` has the MTU of the backend, and the one to
    which paths to peers have lowered it; zeros for none. ``former`` are the networks of the last run, and of
    those before whose objects have not been swept yet: subnet.env names one only, and late in a start.
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
    earlier: tuple[LeaseAttrs, ...] = ()
    path_mtu: tuple[int, int] = (0, 0)
    former: tuple[NetworkAndSubnet, ...] = ()


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


PRODUCT_UUID = Path("/sys/class/dmi/id/product_uuid")
_VERSION = 1
#: Earlier attributes to keep. A daily backup of a laptop's cluster needs that many.
_MOST_EARLIER = 8
#: Bytes. A few hundred are usual; each adopted route takes 30 more.
_MAX_SIZE = 4 << 20


class StateFile:
    """State file: read once, and written on each change unless ``is_dry_run``.

    From any thread; never raises.
    """

    def __init__(self, path: Path, *, is_dry_run: bool = False) -> None:
        self._path = path
        self._is_dry_run = is_dry_run
        self._lock = threading.Lock()
        self._desired = RunRecord()
        self._written: RunRecord | None = None
        self._once = Once()

    def load(self) -> RunRecord | None:
        """Read the record of the last run. An invalid file is logged and counts as missing."""
        try:
            found = _parse(files.read(self._path, _MAX_SIZE))
        except FileNotFoundError:
            return None
        except (OSError, Refused, ValueError) as error:
            problem = f"{type(error).__name__} {error}".strip()
            self._once.warn(log, "load", f"Ignoring the state file {self._path}: {problem}")
            return None
        with self._lock:
            self._desired = self._written = found
        return found

    def update(self, **changes: Any) -> None:
        """Change fields of the record, and write it if the file differs."""
        with self._lock:
            self._desired = replace(self._desired, **changes)
            if self._desired != self._written:
                self._write()

    def try_again(self) -> None:
        """Write the record again after a failed write."""
        self.update()

    def is_writable(self) -> bool:
        """Write the record and return True on success: a claim's result must be recordable afterwards."""
        with self._lock:
            return self._write()

    def _write(self) -> bool:
        if self._is_dry_run:
            return True
        try:
            self._path.parent.mkdir(0o755, parents=True, exist_ok=True)
            files.replace(self._path, _text(self._desired).encode(), 0o600)
        except OSError as error:
            self._once.warn(
                log,
                "write",
                f"Cannot write the state file {self._path}: {error.strerror}; make its directory writable, or"
                " after a restart nothing that an earlier run left is recognised",
            )
            return False
        self._once.clear("write")
        self._written = self._desired
        return True


def stamp_of(path: Path) -> FileStamp | None:
    """Return the stamp of a file, which each write changes; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileStamp(found.st_ino, found.st_mtime_ns)


def product_uuid() -> str:
    """Return the firmware's UUID of this machine; empty if it is missing or unreadable for this user."""
    return files.text(PRODUCT_UUID).strip().lower()


class _Content(Struct, frozen=True, gc=False):
    """The file's keys. Versions before wrote none of those with a default."""

    version: int
    boot_id: str
    hardware_address: str
    product_uuid: str
    store: str
    subnets: tuple[IPv4Network | None, IPv6Network | None]
    attributes: str | None
    devices: tuple[Device, ...]
    subnet_file: FileStamp | None
    adopts: bool
    adopted: tuple[str, ...]
    store_addresses: tuple[_ContentAddress, ...] = ()
    store_tried: int = 0
    earlier: tuple[str, ...] = ()
    path_mtu: tuple[int, int] = (0, 0)
    former: tuple[tuple[str, str], ...] = ()


class _ContentAddress(Struct, frozen=True, gc=False):
    address: str
    hour: int
    is_outside: bool | None


def _told(attributes: LeaseAttrs) -> str:
    return format_attrs(attributes, with_ipv6=True)


def _text(state: RunRecord) -> str:
    content = _Content(
        _VERSION,
        state.boot_id,
        state.machine.hardware_address,
        state.machine.product_uuid,
        state.store,
        state.subnets,
        _told(state.attributes) if state.attributes else None,
        state.devices,
        state.subnet_file,
        state.adopts,
        tuple(sorted(map(str, state.adopted))),
        tuple(
            _ContentAddress(str(each.address), each.hour, each.is_outside) for each in state.store_addresses
        ),
        state.store_tried,
        tuple(map(_told, state.earlier)),
        state.path_mtu,
        tuple((str(network), str(subnet)) for network, subnet in state.former),
    )
    return files.encode(content, indent=1) + "\n"


def _parse(text: bytes) -> RunRecord:
    content = files.decode(text, _Content)
    if content.version != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    return RunRecord(
        content.boot_id,
        Machine(content.hardware_address, content.product_uuid),
        content.store,
        content.subnets,
        parse_attrs(content.attributes) if content.attributes is not None else None,
        content.devices,
        content.subnet_file,
        content.adopts,
        frozenset(map(ip_network, content.adopted)),
        tuple(
            StoreAddress(ip_address(each.address), each.hour, each.is_outside)
            for each in content.store_addresses
        ),
        content.store_tried,
        tuple(map(parse_attrs, content.earlier)),
        content.path_mtu,
        tuple((ip_network(network), ip_network(subnet)) for network, subnet in content.former),
    )


def machine_of(kernel: HostKernel, uplink: Uplink) -> Machine:
    """Read the identity of this machine, to tell it from its clones; unreadable parts are empty."""
    try:
        link = kernel.link(uplink.name)
    except OSError:
        link = None
    return Machine(link.mac if link else "", product_uuid())


class LastRun:
    """Record of the last run beside ``subnet_file``: read once, then kept up to date from any thread.

    With ``is_dry_run`` it writes nothing. ``file`` is another place for the record, ``boot_id`` another boot.
    """

    def __init__(
        self, subnet_file: Path, *, is_dry_run: bool = False, file: StateFile | None = None, boot_id: str = ""
    ) -> None:
        self._subnet_file = subnet_file
        self._file = file or StateFile(beside(subnet_file, "state"), is_dry_run=is_dry_run)
        self._state = self._file.load()
        self._boot_id = boot_id or clock.boot_id()
        #: Devices of earlier runs in this boot.
        self.devices: tuple[Device, ...] = devices_of_this_boot(self._state, self._boot_id)
        #: True if another flanneld ran here since: its unmarked routes are adopted.
        self.adopts = adopts_unmarked(self._state, stamp_of(subnet_file))
        #: Destinations of the unmarked routes that an earlier run has adopted.
        self.adopted = self._state.adopted if self._state else frozenset()
        #: Addresses of the store, and the time of the last trial without a route to one.
        self.store_addresses = self._state.store_addresses if self._state else ()
        self.store_tried = self._state.store_tried if self._state else 0
        #: Attributes of our lease, and those before.
        self._attributes: LeaseAttrs | None = None
        self.earlier = self._state.earlier if self._state else ()
        #: Networks of earlier runs whose objects may have to be swept, each with our subnet.
        self.former = self._state.former if self._state else ()
        self.record = self._file.update
        self.try_again = self._file.try_again

    def claim(self, machine: Machine, store: str, previous: LeaseKey) -> Lease | None:
        """Return our lease as we last wrote it; None without proof that this host wrote it.

        Return None also if the record cannot be written, because a lost claim is not tried again.
        """
        lease = proven_lease(self._state, machine, store, previous)
        return lease if lease is not None and self._file.is_writable() else None

    def path_mtu(self, machine: Machine) -> tuple[int, int]:
        """Return the MTU of the backend and a lower one, zeros for none. A clone has none yet."""
        return self._state.path_mtu if self._state and self._state.machine == machine else (0, 0)

    def joined(
        self, machine: Machine, store: str, lease: Lease, nets: Iterable[NetworkAndSubnet] = ()
    ) -> None:
        """Record the lease of this run, its ``nets``, and the objects that are still to be swept."""
        last = proven_lease(self._state, machine, store, lease.key)
        self._attributes, self.earlier = (last.attrs, self.earlier) if last else (None, ())
        self.record(
            boot_id=self._boot_id,
            machine=machine,
            store=store,
            subnets=lease.key,
            devices=self.devices,
            adopts=self.adopts,
            former=tuple(dict.fromkeys((*nets, *self.former))),
            **self._written(lease),
        )

    def lease_written(self, lease: Lease) -> None:
        """Record the current attributes of our lease."""
        self.record(**self._written(lease))

    def lease_lost(self) -> None:
        """Give up every claim to the lease, because another node has won it."""
        self._attributes, self.earlier = None, ()
        self.record(attributes=None, earlier=())

    def _written(self, lease: Lease) -> dict[str, object]:
        """Return the fields of the record that tell what we wrote into our lease."""
        known = (self._attributes, *self.earlier)
        earlier = [each for each in known if each is not None and each != lease.attrs]
        self._attributes, self.earlier = lease.attrs, tuple(earlier[:_MOST_EARLIER])
        return {"attributes": self._attributes, "earlier": self.earlier}

    def subnet_file_written(self) -> None:
        """Record the stamp of the subnet file that we wrote."""
        self.record(subnet_file=stamp_of(self._subnet_file))
