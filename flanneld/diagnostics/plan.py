"""``flanneld --plan``: the changes that a startup would make to this host, as commands.

They come from a dry run, the daemon's own startup: the controller's tables read as usual and only record
writes. No lease is acquired: without one, the subnet is the one that this node would most likely get.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from flanneld import effects, startup
from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable, printable
from flanneld.model import Cached, Event, Lease, LeaseAttrs, LeaseKey, Snapshot, Uplink, overlap
from flanneld.network import iproute2_commands
from flanneld.network.host_settings import KernelForwardingTable
from flanneld.network.rtnetlink import links
from flanneld.network.rtnetlink.domain import MANY, Behind, Domain
from flanneld.network.rtnetlink.tables import KERNEL_TABLES
from flanneld.node import Node
from flanneld.options import Options
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counters import counted
from flanneld.reconcile.firewall import firewall_settings, old_guards, place_rules
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.peers import View
from flanneld.reconcile.reconciler import desired_by_table
from flanneld.runtime import clock
from flanneld.startup import SingleAttempts
from flanneld.state.permits import RemovalGuard
from flanneld.state.resources import ROUTES, ForeignLink, Key, Kind, Link, Resource, Route
from flanneld.state.table import Explains, Put, Report, Scope, Seen, Table
from flanneld.subnet.allocation import fits, unfollowed
from flanneld.subnet.store import Foreseeing, LocalFacts, Store
from flanneld.subnet.subnet_file import NetworkAndSubnet, SubnetEnv, SubnetEnvFile, SubnetFileTable


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
    former: tuple[NetworkAndSubnet, ...]
    view: View
    domain: Domain
    notes: Notes
    spread: bool = False


def dry_run(options: Options, store: Store) -> Outcome:
    """Return the outcome of a startup. Raises ``Retryable`` or ``Fatal`` where it would wait or end."""
    once, notes = SingleAttempts(), Notes()
    forecast, harmless = Forecast(store), effects.dry_run(options, os.environ)
    member = Node(options, harmless, counted(store)).join(once, forecast.acquire)
    controller = _run(startup.desired(member, harmless), harmless, forecast.leases, notes)
    peers = controller.peers
    return Outcome(
        config=member.config,
        uplink=member.uplink_manager.uplink,
        mtu=member.uplink_manager.mtu,
        own=member.lease,
        has_lease=forecast.has_lease,
        former=member.last_run.former,
        view=peers.view(),
        domain=controller.domain,
        notes=notes,
        spread=options.route_protocol_spread == "auto" and len(peers.desired.table(ROUTES)) > MANY,
    )


class Forecast:
    """Prediction of the lease without writing; replaces the store's ``acquire``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Set by ``acquire``: the leases of all nodes, and True if one of them is ours.
        self.leases: Snapshot | Cached = Snapshot(())
        self.has_lease = False

    def acquire(self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts) -> Lease:
        """Return our lease, else a guess. May raise the errors of a startup's ``acquire``."""
        store = self._store
        foreseen = store.foresee(config, attrs) if isinstance(store, Foreseeing) else None
        self.leases = all_leases(store)
        own = foreseen or _ours(self.leases, attrs, config, previous, local)
        self.has_lease = own is not None
        return own or Lease(attrs, *_likely(config, previous, self.leases))


def _run(node: LocalNode, harmless: effects.Effects, leases: Snapshot | Cached, notes: Notes) -> Controller:
    """Run one round of the reconciler with all leases."""
    controller = Controller(
        node,
        RemovalGuard(is_on=False),
        stop=harmless.tasks.stop,
        make_loop=harmless.make_loop,
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


def all_leases(store: Store) -> Snapshot | Cached:
    """Return the first snapshot of a watch, then close the store. Raises ``Retryable``."""
    found: list[Snapshot | Cached] = []

    def deliver(events: list[Event]) -> None:
        found.extend(event for event in events if isinstance(event, Snapshot | Cached))
        store.close()

    with suppress(Cancelled):
        store.watch(deliver, _nothing)
    if not found:
        raise Retryable("the store does not tell its leases", "see the lines above")
    return found[0]


def _ours(
    snapshot: Snapshot | Cached, attrs: LeaseAttrs, config: Config, previous: LeaseKey, local: LocalFacts
) -> Lease | None:
    """Return the lease that startup would reuse: the previous one, else the proven one, else the lowest."""

    def is_ours(lease: Lease) -> bool:
        return local.is_self(lease.attrs, attrs)

    def precedence(lease: Lease) -> tuple[bool, bool, list[int]]:
        order = [int(net.network_address) for net in lease.key if net is not None]
        return lease.key != previous, is_ours(lease), order

    ours = [lease for lease in snapshot.leases if is_ours(lease) or local.wrote(lease)]
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


class _Scripted(Protocol):
    """Table that tells its changes as shell commands."""

    name: str

    def script(self, scope: Scope) -> Iterator[str]: ...


def print_plan(wanted: Options, store: Store, say: Callable[[str], None]) -> None:
    """Print each command on a line, and changes without a command as comments; nothing if all is right.

    Raises ``Retryable`` and ``Fatal`` where a startup would wait or end.
    """
    outcome = dry_run(wanted, store)
    for line in lines(wanted, outcome):
        say(printable(line) if line.startswith("#") else line)  # a shell may run the plan


def lines(wanted: Options, outcome: Outcome) -> Iterator[str]:
    """Yield the plan in the order of a startup."""
    yield from _lease(outcome)
    yield from kernel_lines(outcome, local=True)
    yield from _host(wanted, outcome)
    yield from kernel_lines(outcome, local=False)
    yield from _rules(wanted, outcome)


def _lease(outcome: Outcome) -> Iterator[str]:
    if outcome.has_lease:
        return
    likely = str(outcome.own)
    yield "# this node has no lease yet; " + (
        f"the plan is for {likely}, which its last run had and nobody has now"
        if likely
        else "its subnet would be any free one, so what rests on that is left out"
    )


def kernel_lines(outcome: Outcome, *, local: bool) -> Iterator[str]:
    """Yield commands for devices and addresses, or for objects of peers and stale ones."""
    notes = outcome.notes
    if local:
        for link, actual in notes.devices.values():
            yield from map(shlex.join, iproute2_commands.link(link, actual, outcome.uplink.name))
    else:
        yield from filter(None, map(_drop, notes.drops))
        for route in notes.behind.values():
            ways = iproute2_commands.bring_to_front(route, outcome.domain.links, spread=outcome.spread)
            yield from map(shlex.join, ways)
    for resource in sorted(notes.puts.values(), key=lambda each: each.kind):
        if (resource.kind is resource.kind.ADDRESS) is local:
            if resource.kind is Kind.REMOTE:
                yield _outside(resource, notes)
            elif made := iproute2_commands.put(resource, outcome.domain.links, spread=outcome.spread):
                yield shlex.join(made)


def _drop(resource: Resource) -> str:
    if resource.kind is Kind.REMOTE:
        return f"# no more: {resource}"
    return shlex.join(iproute2_commands.drop(resource) or ())


def _outside(resource: Resource, notes: Notes) -> str:
    """Return a comment for a change in a backend's own table, which has no command."""
    there = notes.outside.get(resource.key)
    calls = f": {notes.calls[resource.key]}" if notes.calls.get(resource.key) else ""
    if there is None:
        return f"# new: {resource}{calls}"
    was = f" in place of {there}" if str(there) != str(resource) else ", with other settings than it has"
    return f"# changed: {resource}{was}{calls}"


def _host(wanted: Options, outcome: Outcome) -> Iterator[str]:
    """Yield the commands for subnet.env and the kernel's forwarding."""
    config, own, path = outcome.config, outcome.own.key, Path(wanted.subnet_file)
    if any(own):
        env = SubnetEnv.of(config, own, outcome.mtu, ip_masq=wanted.ip_masq)
        yield from _scripts([SubnetFileTable(path)], [SubnetEnvFile.of(path, env)])
        if wanted.cni_conf:
            from flanneld.subnet.cni_conf import open_table

            cni = open_table(wanted)
            yield from _scripts([cni], [cni.desired(env)])
    forwarding = KernelForwardingTable(config.families, lambda: outcome.uplink.name, keep=True)
    yield from _scripts([forwarding], forwarding.desired)


def _rules(wanted: Options, outcome: Outcome) -> Iterator[str]:
    """Yield the commands that install the rules, then those that remove an earlier run's elsewhere."""
    settings = firewall_settings(wanted, outcome.config, outcome.own.key, outcome.former)
    if any(outcome.own.key) and (settings.purpose or settings.former):
        placed = place_rules(settings, threading.Event(), is_dry_run=True)
        yield from _scripts(placed.tables, placed.desired)
    yield from _scripts(old_guards(settings), ())


def _scripts(tables: Iterable[_Scripted], desired: Iterable[Resource]) -> Iterator[str]:
    by_table = desired_by_table(desired)
    for table in tables:
        yield from table.script(Scope(by_table.get(table.name, {})))
