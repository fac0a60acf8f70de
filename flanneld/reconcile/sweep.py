"""Objects of earlier runs in the kernel: devices to sweep and routes to adopt, once all leases are known."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec.structs import replace

from flanneld.compat.glog import counted
from flanneld.errors import cause_of
from flanneld.model import IPNetwork, lies_in
from flanneld.network.host import HostKernel
from flanneld.network.rtnetlink.links import is_flannels
from flanneld.reconcile import last_run
from flanneld.reconcile.last_run import Device, LastRun
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.worker import NodeTables
from flanneld.state.permits import Permits, RemovalGuard
from flanneld.state.resources import Link, Resource, Route
from flanneld.subnet.subnet_file import NetworkAndSubnet

log = logging.getLogger(__name__)

#: Seconds until a failed read of the kernel is tried again.
RETRY = 1.0
#: Log lines about single objects, at most.
_FEW = 10


class LeftBehind:
    """Devices that earlier runs left, and routes to adopt.

    ``nets`` are the networks of this run, each with our subnet. Every method but ``take_back`` may
    raise ``OSError``.
    """

    def __init__(
        self,
        kernel: HostKernel,
        last_run: LastRun,
        nets: tuple[NetworkAndSubnet, ...] = (),
    ) -> None:
        self._kernel = kernel
        self._nets = nets
        self._outside = tuple(each for each in last_run.former if each[0] not in dict(nets))
        #: Networks that the kernel may have objects of; None before the sweep. From any thread.
        self.networks: tuple[NetworkAndSubnet, ...] | None = None
        self._devices = last_run.devices
        self._own: list[Device] = []
        self._record = last_run.record
        #: True if routes of another flanneld are looked for or were kept.
        self._adopts = bool(last_run.adopts or last_run.adopted)

    def stale_links(self) -> list[Link]:
        """Return the devices of earlier configurations."""
        if not self._devices:
            return []
        stale = last_run.stale(self._devices, self._kernel.links(), self._kernel.domain.links)
        return [seen.make for seen in stale if isinstance(seen.make, Link)]

    def announce_devices(self, desired: Iterable[Link]) -> None:
        """Record the devices that are about to be made: a run may die before it records their indexes."""
        present = {seen.name for seen in self._kernel.links()}
        missing = (each for each in desired if each.name not in present)
        coming = [Device(0, each.make, getattr(each, "mac", ""), each.name) for each in missing]
        if coming:
            self._record(devices=(*self._devices, *coming))

    def record_devices(self) -> None:
        """Record for the next run our devices, and those that are still to be swept."""
        present = self._kernel.links()
        self._own = [
            device
            for seen in present
            if seen.name in self._kernel.domain.links and (device := last_run.device_of(seen))
        ]
        self._devices = tuple(each for each in self._devices if any(each.is_same(seen) for seen in present))
        self._record(devices=tuple(dict.fromkeys([*self._own, *self._devices])))

    def take_back(self, index: int, namespace: int, index_there: int) -> None:
        """Remove our device with this index where it was moved: else the kernel refuses another for its VNI.

        It is ours if kind and MAC are those on the record. Never raises ``OSError``.
        """
        ours = [replace(each, index=index_there) for each in self._own if each.index == index and each.mac]
        try:
            if ours and self._kernel.take_back(namespace, index_there, ours[0].is_same):
                log.warning("Removed %s in the network namespace to which it was moved", ours[0].name)
        except OSError as failure:
            log.warning(
                "Cannot remove %s in the network namespace to which it was moved: %s; move it back, or remove"
                " it there",
                ours[0].name,
                cause_of(failure),
            )

    def record_sweep(self, unclear: Iterable[IPNetwork]) -> set[IPNetwork]:
        """Record for the next run that everything but devices has been swept or adopted.

        Return the ``unclear`` subnets in former networks: only with their leases the routes to them go.
        """
        awaited = {net for net in unclear if any(lies_in(net, network) for network, _ in self._outside)}
        if self._adopts:
            adopted = frozenset(self._adopted())
            # A repeated sweep leaves what an operator made meanwhile.
            self._kernel.domain = replace(self._kernel.domain, unmarked=False, adopted=adopted)
            self._record(adopted=adopted)
        self._record(adopts=False)
        self.networks = (*self._nets, *(self._outside if awaited else ()))
        return awaited

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


class Sweep:
    """Sweep of stale objects of an earlier run. It is repeated until all tables could be read."""

    def __init__(
        self,
        peers: Peers,
        tables: NodeTables,
        permits: Permits,
        left_behind: LeftBehind,
        removal_guard: RemovalGuard,
    ) -> None:
        self._peers = peers
        self._tables = tables
        self._permits = permits
        self._left_behind = left_behind
        self._removal_guard = removal_guard
        self._was_in_sync = False
        #: Subnets of leases in former networks, to which routes are kept.
        self._awaited: set[IPNetwork] = set()
        #: Time of the next attempt, in seconds on ``clock.now``.
        self.due = math.inf

    def is_unfinished(self) -> bool:
        """Return True if there are stale objects of an earlier run that may be removed."""
        is_over = bool(self._awaited) and not self._awaited <= self._peers.unclear
        return self._permits.sweeps or is_over

    def run(self, now: float) -> bool:
        """Sweep, unless the removal guard stops it. Return False if the tables could not be read.

        Raises ``OSError`` if the sweep cannot be recorded; then it is tried again.
        """
        self._tables.reconciler.adopt = self._permits.sweeps = True
        self.due = math.inf
        report = self._tables.converge(now)
        if not self._was_in_sync:
            self._was_in_sync = True
            log.info(
                "In sync with %s: made %s, removed %d left by an earlier run",
                counted(len(self._peers), "peer"),
                counted(len(report.made), "object"),
                len(report.removed),
            )
            with suppress(OSError):
                self._left_behind.report_unclaimed()
        tell_of_removals(report.removed)
        if any(state.problem for state in self._tables.reconciler.states()):
            self.due = now + RETRY
            return False
        if not self._removal_guard.sweep_is_held:
            self.due = now + RETRY
            self._awaited = self._left_behind.record_sweep(self._peers.unclear)
            self._tables.reconciler.adopt = self._permits.sweeps = False
            self.due = math.inf
        return True


def tell_of_removals(removed: Sequence[Resource]) -> None:
    """Log the removal of objects that an earlier run left."""
    for resource in removed[:_FEW]:
        log.info("Removed, left by an earlier run: %s", resource)
    if len(removed) > _FEW:
        log.info("Removed, left by an earlier run: %d more objects", len(removed) - _FEW)
