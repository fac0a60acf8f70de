"""A start that changes nothing: what the daemon would do, by the way it takes itself.

The controller runs over tables that read as always and only take note of what they are told to write. No
lease is acquired: without one the subnet is the one that this node would most likely get.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from flanneld.backends import registry
from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Cached, Event, Lease, LeaseAttrs, LeaseKey, Snapshot, Uplink, overlap
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.route_order import Behind
from flanneld.network.rtnetlink.tables import KERNEL_TABLES
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.options import Options
from flanneld.reconcile.controller import Controller, Node
from flanneld.reconcile.last_run import LastRun, machine_of
from flanneld.reconcile.peers import View
from flanneld.reconcile.uplink_manager import UplinkManager, find_uplink
from flanneld.runtime import clock
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Report
from flanneld.state.resources import ForeignLink, Key, Link, Resource, Route
from flanneld.state.table import Put, Scope, Seen, Table
from flanneld.subnet import subnet_file
from flanneld.subnet.allocation import fits
from flanneld.subnet.manager import Foreseeing, SubnetManager
from flanneld.subnet.subnet_file import Previous
from flanneld.wiring import extras_for


class Notes:
    """What a start would write."""

    def __init__(self) -> None:
        #: Each device to make or change, with what is there now.
        self.devices: dict[str, tuple[Link, Link | ForeignLink | None]] = {}
        self.puts: dict[Key, Resource] = {}
        self.drops: dict[Resource, None] = {}
        self.behind: dict[Key, Route] = {}
        #: What tables beyond the kernel's hold.
        self.outside: dict[Key, Resource] = {}

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


def rehearse(wanted: Options, manager: SubnetManager, choice: InterfaceChoice) -> Outcome:
    """Raises ``Retryable`` and ``Fatal`` where a start would wait or end."""
    path = Path(wanted.subnet_file)
    previous, last_run = subnet_file.read(path), LastRun(path)
    config = manager.network_config()
    kernel, notes = Kernel(), Notes()
    uplink = find_uplink(kernel, config, choice)
    stored = manager.stored(uplink.public(config.families[0]))
    make_backend = registry.load(config.backend_type)
    uplink_manager = UplinkManager(kernel, config, choice, make_backend, uplink, stored, previous.networks)
    attrs = uplink_manager.backend.attributes()
    foreseen = manager.foresee(config, attrs) if isinstance(manager, Foreseeing) else None
    snapshot = all_leases(manager)
    written = last_run.proven_lease(machine_of(kernel, uplink), manager.name, previous.subnets)
    own = foreseen or _ours(snapshot, attrs, config, written)
    guess = own or Lease(attrs, *_likely(config, previous, snapshot))
    extras = extras_for(wanted, guess)
    node = Node(
        kernel,
        kernel.listen(),
        uplink_manager,
        guess,
        extras,
        former=previous.networks,
        devices=last_run.devices,
        adopts=last_run.adopts,
        adopted=last_run.adopted,
    )
    controller = _run(node, snapshot, notes)
    peers = controller.peers
    return Outcome(
        config=config,
        uplink=uplink,
        mtu=uplink_manager.backend.mtu,
        own=guess,
        has_lease=own is not None,
        previous=previous,
        view=peers.view(),
        domain=controller.domain,
        notes=notes,
    )


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
    snapshot: Snapshot | Cached, attrs: LeaseAttrs, config: Config, written: Lease | None
) -> Lease | None:
    """The lease that a start would take again, if it fits the network config: the proven one comes first."""
    family = config.families[0]
    for lease in snapshot.leases:
        if written and (lease.key, lease.attrs) == (written.key, written.attrs) and fits(config, lease.key):
            return lease
    for lease in snapshot.leases:
        if lease.attrs.public(family) == attrs.public(family) and fits(config, lease.key):
            return lease
    return None


def _likely(config: Config, previous: Previous, snapshot: Snapshot | Cached) -> LeaseKey:
    """What the subnet file remembers, if it fits and is free: a start asks for that first."""
    if not fits(config, previous.subnets):
        return (None, None)
    taken = [net for lease in snapshot.leases for net in lease.key if net is not None]
    free = all(not overlap(net, other) for net in previous.subnets if net for other in taken)
    return previous.subnets if free else (None, None)


def _nothing(*_: Any) -> None:
    pass
