"""Dry run: the daemon's own startup against a kernel that records what it is told to write.

No lease is acquired: without one the subnet is the one that this node would most likely get.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from flanneld import startup
from flanneld.backends.contract import Backend, Driver, HasDrivers
from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Cached, Event, Lease, LeaseAttrs, LeaseKey, Snapshot, Uplink, overlap
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.options import Options
from flanneld.reconcile.convergence import Node
from flanneld.reconcile.kernel_reconciler import KernelReconciler
from flanneld.reconcile.peers import View
from flanneld.startup import SingleAttempts
from flanneld.state.diff import Plan
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.report import Report
from flanneld.state.resources import ForeignLink, Key, Link, Resource, Route, State
from flanneld.subnet.allocation import fits
from flanneld.subnet.manager import Foreseeing, LocalFacts, SubnetManager
from flanneld.subnet.subnet_file import Previous


class Notebook(Kernel):
    """Reads the kernel, and notes what it is told to write."""

    def __init__(self) -> None:
        super().__init__()
        #: Each device to make or change, with what is there now.
        self.devices: dict[str, tuple[Link, Link | ForeignLink | None]] = {}
        self.puts: dict[Key, Resource] = {}
        self.drops: dict[Resource, None] = {}
        self.behind: dict[Key, Route] = {}
        #: What drivers have read.
        self.outside: dict[Key, Resource] = {}

    def apply_links(self, wanted: Iterable[Link]) -> Report:
        for link in wanted:
            seen = self.link(link.name)
            actual = seen.make if seen else None
            if actual is None or links.step(link, actual) is not links.Step.NOTHING:
                self.devices[link.name] = (link, actual)
        return Report()

    def read(self, domain: Domain, wanted: State) -> Iterator[tuple[Resource, bool]]:
        """What goes with a device that has to be made anew is as good as gone."""
        for resource, ours in super().read(domain, wanted):
            if not self._is_replaced(getattr(resource, "device", "")):
                yield resource, ours

    def apply(self, plan: Plan, domain: Domain) -> Report:
        del domain
        self.puts |= {resource.key: resource for resource in plan.puts}
        self.behind |= {route.key: route for route in plan.behind}
        self.drops |= dict.fromkeys(plan.drops)
        return Report()

    def _is_replaced(self, name: str) -> bool:
        wanted, actual = self.devices.get(name, (None, None))
        if wanted is None or actual is None:
            return False
        return links.step(wanted, actual) is links.Step.REPLACE


class _Noted:
    """A driver that reads as always, and only takes note of what it is told to do."""

    def __init__(self, driver: Driver, notes: Notebook) -> None:
        self.handles = driver.handles
        self._driver = driver
        self._notes = notes

    def read(self) -> Iterator[Resource]:
        with suppress(OSError, Retryable):  # There is nothing there yet, or nothing that answers.
            for resource in self._driver.read():
                self._notes.outside[resource.key] = resource
                yield resource

    def put(self, resource: Resource) -> None:
        self._notes.puts[resource.key] = resource

    def drop(self, resource: Resource) -> None:
        self._notes.drops[resource] = None

    def close(self) -> None:
        """There is nothing to undo."""


class _Undriven:
    """A backend whose drivers only take notes."""

    def __init__(self, backend: Backend, notes: Notebook) -> None:
        self._backend = backend
        self._notes = notes

    @property
    def mtu(self) -> int:
        return self._backend.mtu

    def attributes(self) -> LeaseAttrs:
        return self._backend.attributes()

    def local(self, own: Lease) -> Iterable[Resource]:
        return self._backend.local(own)

    def peer(self, own: Lease, lease: Lease) -> Iterable[Resource]:
        return self._backend.peer(own, lease)

    def drivers(self) -> Iterable[Driver]:
        drivers = self._backend.drivers() if isinstance(self._backend, HasDrivers) else ()
        return [_Noted(driver, self._notes) for driver in drivers]


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
    wanted: State
    domain: Domain
    notes: Notebook


def rehearse(options: Options, manager: SubnetManager) -> Outcome:
    """Raises ``Retryable`` and ``Fatal`` where a start would wait or end."""
    once, notes = SingleAttempts(), Notebook()
    loaded = startup.load(options, manager, once, is_dry_run=True)
    elected = startup.elect(loaded, once, lambda: notes)
    forecast = Forecast(manager)
    member = startup.join(loaded, elected, once, forecast.acquire)
    member.uplink_manager.backend = _Undriven(member.uplink_manager.backend, notes)
    reconciler = _run(startup.desired(member), forecast.leases)
    peers = reconciler.peers
    return Outcome(
        config=member.config,
        uplink=member.uplink_manager.uplink,
        mtu=member.uplink_manager.backend.mtu,
        own=member.lease,
        has_lease=forecast.has_lease,
        previous=member.previous,
        view=peers.view(),
        wanted=peers.wanted,
        domain=reconciler.domain,
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
        own = foreseen or _ours(self.leases, attrs, config, local.written)
        self.has_lease = own is not None
        return own or Lease(attrs, *_likely(config, previous, self.leases))


def _run(node: Node, leases: Snapshot | Cached) -> KernelReconciler:
    """The loop, until it has dealt with all leases."""
    stop = threading.Event()
    reconciler = KernelReconciler(
        node,
        RemovalGuard(is_on=False),
        stop=stop,
        heartbeat=_nothing,
        on_move=_nothing,
        on_synced=stop.set,
        reread=_nothing,
    )
    reconciler.prepare()
    reconciler.event_queue.put([leases])
    reconciler.run()
    return reconciler


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


def _likely(config: Config, previous: LeaseKey, snapshot: Snapshot | Cached) -> LeaseKey:
    """What the subnet file remembers, if it fits and is free: a start asks for that first."""
    if not fits(config, previous):
        return (None, None)
    taken = [net for lease in snapshot.leases for net in lease.key if net is not None]
    free = all(not overlap(net, other) for net in previous if net for other in taken)
    return previous if free else (None, None)


def _nothing(*_: Any) -> None:
    pass
