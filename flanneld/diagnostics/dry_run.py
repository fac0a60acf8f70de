"""Dry run: the daemon's own startup against a kernel that records what it is told to write.

The controller runs over tables that read as always and only take note of what they are told to write. No
lease is acquired: without one the subnet is the one that this node would most likely get.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from flanneld import startup
from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Cached, Event, Lease, LeaseAttrs, LeaseKey, Snapshot, Uplink, overlap
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.route_order import Behind
from flanneld.network.rtnetlink.tables import KERNEL_TABLES
from flanneld.options import Options
from flanneld.reconcile import host_services
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.node import Node
from flanneld.reconcile.peers import View
from flanneld.runtime import clock
from flanneld.startup import SingleAttempts
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Report
from flanneld.state.resources import ForeignLink, Key, Link, Resource, Route
from flanneld.state.table import Explains, Put, Scope, Seen, Table
from flanneld.subnet.allocation import fits
from flanneld.subnet.manager import Foreseeing, LocalFacts, SubnetManager
from flanneld.subnet.subnet_file import Previous


class Notes:
    """What a start would write."""

    def __init__(self) -> None:
        #: Each device to make or change, with what is there now.
        self.devices: dict[str, tuple[Link, Link | ForeignLink | None]] = {}
        self.puts: dict[Key, Resource] = {}
        self.drops: dict[Resource, None] = {}
        self.behind: dict[Key, Route] = {}
        #: What tables beyond the kernel's hold, and the calls that would change it.
        self.outside: dict[Key, Resource] = {}
        self.calls: dict[Key, str] = {}

    def take(self, table: Table) -> RecordingTable:
        """Return the table as one that only takes notes."""
        return RecordingTable(table, self)

    def is_replaced(self, name: str) -> bool:
        """Return True for a device that has to be made anew: what goes with it is as good as gone."""
        wanted, actual = self.devices.get(name, (None, None))
        if wanted is None or actual is None:
            return False
        return links.step(wanted, actual) is links.Step.REPLACE


class RecordingTable:
    """Reads as the table that it stands for, and only takes note of what it is told to write."""

    def __init__(self, table: Table, notes: Notes) -> None:
        self.name = table.name
        self.what = table.what
        self.worker = table.worker
        self.vital = False
        self.needs = table.needs
        self.audit = table.audit
        self._table = table
        self._notes = notes

    def read(self, scope: Scope) -> Iterator[Seen]:
        is_remote = self.name not in KERNEL_TABLES
        try:
            for seen in self._table.read(scope):
                if is_remote:
                    self._notes.outside[seen.resource.key] = seen.resource
                if not self._notes.is_replaced(getattr(seen.resource, "device", "")):
                    yield seen
        except (OSError, Retryable):
            if not is_remote:
                raise
            # There is nothing there yet, or nothing that answers.

    def put(self, puts: Sequence[Put]) -> Report:
        for put in puts:
            if isinstance(put.want, Link):
                actual = put.was if isinstance(put.was, Link | ForeignLink) else None
                self._notes.devices[put.want.name] = (put.want, actual)
            elif isinstance(put.was, Behind):
                self._notes.behind[put.want.key] = put.was.route
            else:
                self._notes.puts[put.want.key] = put.want
                if isinstance(self._table, Explains):
                    with suppress(OSError, Retryable):
                        self._notes.calls[put.want.key] = self._table.explain(put)
        return Report()

    def drop(self, found: Sequence[Resource]) -> Report:
        self._notes.drops |= dict.fromkeys(found)
        return Report()

    def close(self, *, remove: bool) -> None:
        """There is nothing to undo."""


class Outcome(Struct, frozen=True, gc=False):
    """What a start would find and do.

    If ``has_lease`` is false, ``own`` is a guess, with no subnet if there is nothing to guess from.
    """

    config: Config
    uplink: Uplink
    mtu: int
    own: Lease
    has_lease: bool
    previous: Previous
    view: View
    domain: Domain
    notes: Notes


def rehearse(options: Options, manager: SubnetManager) -> Outcome:
    """Raises ``Retryable`` and ``Fatal`` where a start would wait or end."""
    once, notes = SingleAttempts(), Notes()
    services = host_services.of_dry_run(options.secret_dir, os.environ)
    loaded = startup.load(options, manager, once, services, is_dry_run=True)
    elected = startup.elect(loaded, once)
    forecast = Forecast(manager)
    member = startup.join(loaded, elected, once, forecast.acquire)
    controller = _run(startup.desired(member), forecast.leases, notes)
    peers = controller.peers
    return Outcome(
        config=member.config,
        uplink=member.uplink_manager.uplink,
        mtu=member.uplink_manager.backend.mtu,
        own=member.lease,
        has_lease=forecast.has_lease,
        previous=member.previous,
        view=peers.view(),
        domain=controller.domain,
        notes=notes,
    )


class Forecast:
    """The lease that a start would get, found without writing; stands in for the store's ``acquire``."""

    def __init__(self, manager: SubnetManager) -> None:
        self._manager = manager
        #: Set by ``acquire``: the leases of all nodes, and whether one of them is ours.
        self.leases: Snapshot | Cached = Snapshot(())
        self.has_lease = False

    def acquire(self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts) -> Lease:
        """Return our lease, else a guess. May raise what a start's ``acquire`` does."""
        manager = self._manager
        foreseen = manager.foresee(config, attrs) if isinstance(manager, Foreseeing) else None
        self.leases = all_leases(manager)
        own = foreseen or _ours(self.leases, attrs, config, previous, local)
        self.has_lease = own is not None
        return own or Lease(attrs, *_likely(config, previous, self.leases))


def _run(node: Node, leases: Snapshot | Cached, notes: Notes) -> Controller:
    """One round of the loop, with all leases."""
    controller = Controller(
        node,
        RemovalGuard(is_on=False),
        stop=threading.Event(),
        heartbeat=_nothing,
        on_move=_nothing,
        on_synced=_nothing,
        reread=_nothing,
        recording=notes.take,
    )
    controller.prepare()
    controller.event_queue.put([leases])
    controller.step(clock.now())
    for worker in controller.workers:
        worker.step(clock.now())
    controller.close()
    return controller


def all_leases(manager: SubnetManager) -> Snapshot | Cached:
    """The first thing that a watch delivers; the manager is closed after that. Raises ``Retryable``."""
    found: list[Snapshot | Cached] = []

    def deliver(events: list[Event]) -> None:
        found.extend(event for event in events if isinstance(event, Snapshot | Cached))
        manager.close()

    with suppress(Cancelled):
        manager.watch(deliver, _nothing)
    if not found:
        raise Retryable("the store does not tell its leases", "see the lines above")
    return found[0]


def _ours(
    snapshot: Snapshot | Cached, attrs: LeaseAttrs, config: Config, previous: LeaseKey, local: LocalFacts
) -> Lease | None:
    """Return the lease that a start would reuse: the previous one, else the proven one, else the lowest."""
    written = local.written

    def is_ours(lease: Lease) -> bool:
        return local.is_self(lease.attrs, attrs)

    def precedence(lease: Lease) -> tuple[bool, bool, list[int]]:
        order = [int(net.network_address) for net in lease.key if net is not None]
        return lease.key != previous, is_ours(lease), order

    ours = [
        lease
        for lease in snapshot.leases
        if is_ours(lease)
        or (written is not None and (lease.key, lease.attrs) == (written.key, written.attrs))
    ]
    return min((lease for lease in ours if fits(config, lease.key)), key=precedence, default=None)


def _likely(config: Config, previous: LeaseKey, snapshot: Snapshot | Cached) -> LeaseKey:
    """What the subnet file remembers, if it fits and is free: a start asks for that first."""
    if not fits(config, previous):
        return (None, None)
    taken = [net for lease in snapshot.leases for net in lease.key if net is not None]
    free = all(not overlap(net, other) for net in previous if net for other in taken)
    return previous if free else (None, None)


def _nothing(*_: Any) -> None:
    pass
