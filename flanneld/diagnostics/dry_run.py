"""Dry run: the daemon's own startup against tables that record writes.

The controller uses tables that read as usual and only record writes. No lease is acquired: without one, the
subnet is the one that this node would most likely get.
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
from flanneld.network.rtnetlink.route_protocols import MANY
from flanneld.network.rtnetlink.tables import KERNEL_TABLES
from flanneld.options import Options
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.host import services as host_services
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.peers import View
from flanneld.runtime import clock
from flanneld.startup import SingleAttempts
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Report
from flanneld.state.resources import ROUTES, ForeignLink, Key, Link, Resource, Route
from flanneld.state.table import Explains, Put, Scope, Seen, Table
from flanneld.subnet.allocation import fits, unfollowed
from flanneld.subnet.store import Foreseeing, LocalFacts, Store
from flanneld.subnet.subnet_file import Previous


class Notes:
    """Recorded writes of a startup."""

    def __init__(self) -> None:
        #: Devices to create or change, each with the actual one.
        self.devices: dict[str, tuple[Link, Link | ForeignLink | None]] = {}
        self.puts: dict[Key, Resource] = {}
        self.drops: dict[Resource, None] = {}
        self.behind: dict[Key, Route] = {}
        #: Contents of tables outside the kernel, and the calls that would change them.
        self.outside: dict[Key, Resource] = {}
        self.calls: dict[Key, str] = {}

    def take(self, table: Table) -> RecordingTable:
        """Return a recording wrapper of the table."""
        return RecordingTable(table, self)

    def is_replaced(self, name: str) -> bool:
        """Return True for a device that must be replaced: the objects on it are lost then."""
        desired, actual = self.devices.get(name, (None, None))
        if desired is None or actual is None:
            return False
        return links.step(desired, actual) is links.LinkStep.REPLACE


class RecordingTable:
    """Table that reads as the wrapped one and records writes."""

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
            # Nothing exists yet, or nothing answers.

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
        """Do nothing: nothing was written."""


class Outcome(Struct, frozen=True, gc=False):
    """Findings and writes of a startup.

    If ``has_lease`` is false, ``own`` is a guess, without a subnet if there is no hint. With ``spread`` the
    protocol numbers of routes on our devices vary.
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
    spread: bool = False


def dry_run(options: Options, manager: Store) -> Outcome:
    """Return the outcome of a startup. Raises ``Retryable`` or ``Fatal`` where it would wait or end."""
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
        spread=options.route_protocol_spread == "auto" and len(peers.desired.table(ROUTES)) > MANY,
    )


class Forecast:
    """Prediction of the lease without writing; replaces the store's ``acquire``."""

    def __init__(self, manager: Store) -> None:
        self._manager = manager
        #: Set by ``acquire``: the leases of all nodes, and True if one of them is ours.
        self.leases: Snapshot | Cached = Snapshot(())
        self.has_lease = False

    def acquire(self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts) -> Lease:
        """Return our lease, else a guess. May raise the errors of a startup's ``acquire``."""
        manager = self._manager
        foreseen = manager.foresee(config, attrs) if isinstance(manager, Foreseeing) else None
        self.leases = all_leases(manager)
        own = foreseen or _ours(self.leases, attrs, config, previous, local)
        self.has_lease = own is not None
        return own or Lease(attrs, *_likely(config, previous, self.leases))


def _run(node: LocalNode, leases: Snapshot | Cached, notes: Notes) -> Controller:
    """Run one round of the reconciler with all leases."""
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


def all_leases(manager: Store) -> Snapshot | Cached:
    """Return the first snapshot of a watch, then close the manager. Raises ``Retryable``."""
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
    """Return the lease that startup would reuse: the previous one, else the proven one, else the lowest."""
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
    """Return the subnet file's lease if it fits and is free: startup prefers it."""
    if not fits(config, previous):
        return (None, None)
    keys = [lease.key for lease in snapshot.leases]
    unled = unfollowed(config, keys)
    taken = [net for key in keys for net in key if net is not None and net not in unled]
    free = all(not overlap(net, other) for net in previous if net for other in taken)
    return previous if free else (None, None)


def _nothing(*_: Any) -> None:
    pass
