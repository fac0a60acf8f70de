"""Objects of earlier runs in the kernel: devices to sweep and routes to adopt, and their record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from flanneld.model import IPNetwork
from flanneld.network.host_kernel import HostKernel
from flanneld.network.rtnetlink.links import is_flannels
from flanneld.reconcile.past import ownership
from flanneld.reconcile.past.ownership import Device
from flanneld.state.resources import Link, Route

log = logging.getLogger(__name__)

#: Log lines about single devices, at most.
_FEW = 10


class LeftBehind:
    """Objects that earlier runs left: ``devices``, and routes to adopt.

    ``record`` keeps fields of ``ownership.RunRecord`` for the next run. ``adopts`` is True if routes of
    another flanneld are looked for or were kept. Every method but the first may raise ``OSError``.
    """

    def __init__(
        self, kernel: HostKernel, devices: tuple[Device, ...], record: Callable[..., None], *, adopts: bool
    ) -> None:
        self._kernel = kernel
        self._devices = devices
        self._record = record
        self._adopts = adopts

    def stale_links(self) -> list[Link]:
        """Return the devices of earlier configurations."""
        if not self._devices:
            return []
        stale = ownership.stale(self._devices, self._kernel.links(), self._kernel.domain.links)
        return [seen.make for seen in stale if isinstance(seen.make, Link)]

    def record_devices(self) -> None:
        """Record for the next run our devices, and those that are still to be swept."""
        present = self._kernel.links()
        ours = [
            device
            for seen in present
            if seen.name in self._kernel.domain.links and (device := ownership.device_of(seen))
        ]
        self._devices = tuple(each for each in self._devices if any(each.is_same(seen) for seen in present))
        self._record(devices=tuple(dict.fromkeys([*ours, *self._devices])))

    def record_sweep(self) -> None:
        """Record for the next run that everything but devices has been swept or adopted."""
        if self._adopts:
            self._record(adopted=frozenset(self._adopted()))
        self._record(adopts=False)

    def _adopted(self) -> Iterator[IPNetwork]:
        """Yield the correct routes of another flanneld: they are not rewritten only to be marked."""
        domain = self._kernel.domain
        marked = replace(domain, unmarked=False, adopted=frozenset())
        for route in set(self._kernel.left_behind(domain)) - set(self._kernel.left_behind(marked)):
            if isinstance(route, Route):
                yield route.destination

    def report_unclaimed(self) -> None:
        """Log devices that look like those of an earlier run but are not in the record."""
        domain = self._kernel.domain
        networks = [network for network, _ in domain.ranges]
        unclaimed = [
            seen.name
            for seen in self._kernel.links()
            if domain.by_name
            and is_flannels(seen)
            and seen.name not in domain.links
            and any(
                each.address in network
                for network in networks
                for each in self._kernel.addresses(network.version, seen.index)
            )
        ]
        for name in unclaimed[:_FEW]:
            log.warning(
                "Left alone: %s has an address in our network, but is not in our record; if no"
                " other daemon uses it: ip address flush dev %s; ip link set %s down",
                name,
                name,
                name,
            )
