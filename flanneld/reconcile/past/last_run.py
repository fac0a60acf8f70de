"""State carried from one run to the next: read at the start, and recorded as it changes."""

from __future__ import annotations

from pathlib import Path

from flanneld.model import Lease, LeaseKey, Uplink
from flanneld.network.host import HostView
from flanneld.reconcile.past import ownership, state_file
from flanneld.reconcile.past.ownership import Device, Machine
from flanneld.reconcile.past.state_file import StateFile
from flanneld.runtime import clock
from flanneld.subnet.subnet_file import beside


def machine_of(kernel: HostView, uplink: Uplink) -> Machine:
    """Read the identity of this machine, to tell it from its clones; unreadable parts are empty."""
    try:
        link = kernel.link(uplink.name)
    except OSError:
        link = None
    return Machine(link.mac if link else "", state_file.product_uuid())


class LastRun:
    """Record of the last run beside ``subnet_file``: read once, then kept up to date from any thread.

    With ``is_dry_run`` it writes nothing.
    """

    def __init__(self, subnet_file: Path, *, is_dry_run: bool = False) -> None:
        self._subnet_file = subnet_file
        self._file = StateFile(beside(subnet_file, "state"), is_dry_run=is_dry_run)
        self._state = self._file.load()
        self._boot_id = clock.boot_id()
        #: Devices of earlier runs in this boot.
        self.devices: tuple[Device, ...] = ownership.devices_of_this_boot(self._state, self._boot_id)
        #: True if another flanneld ran here since: its unmarked routes are adopted.
        self.adopts = ownership.adopts_unmarked(self._state, state_file.stamp_of(subnet_file))
        #: Destinations of the unmarked routes that an earlier run has adopted.
        self.adopted = self._state.adopted if self._state else frozenset()
        #: Addresses of the store, and the time of the last trial without a route to one.
        self.store_addresses = self._state.store_addresses if self._state else ()
        self.store_tried = self._state.store_tried if self._state else 0
        self.record = self._file.update
        self.try_again = self._file.try_again

    def claim(self, machine: Machine, store: str, previous: LeaseKey) -> Lease | None:
        """Return our lease as we last wrote it; None without proof that this host wrote it.

        Return None also if the record cannot be written, because a lost claim is not tried again.
        """
        lease = ownership.proven_lease(self._state, machine, store, previous)
        return lease if lease is not None and self._file.is_writable() else None

    def joined(self, machine: Machine, store: str, lease: Lease) -> None:
        """Record the lease of this run and the objects that are still to be swept."""
        self.record(
            boot_id=self._boot_id,
            machine=machine,
            store=store,
            subnets=lease.key,
            attributes=lease.attrs,
            devices=self.devices,
            adopts=self.adopts,
        )

    def lease_written(self, lease: Lease) -> None:
        """Record the current attributes of our lease."""
        self.record(attributes=lease.attrs)

    def lease_lost(self) -> None:
        """Give up every claim to the lease, because another node has won it."""
        self.record(attributes=None)

    def subnet_file_written(self) -> None:
        """Record the stamp of the subnet file that we wrote."""
        self.record(subnet_file=state_file.stamp_of(self._subnet_file))
