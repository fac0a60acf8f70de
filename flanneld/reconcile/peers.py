"""Translation of the store's leases into the desired state of the kernel, and the log of their changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain

from msgspec import Struct

from flanneld.backends.contract import Backend, OtherBackend
from flanneld.errors import LEASES_END, Refused, Unsafe
from flanneld.model import (
    FAMILIES,
    Added,
    Change,
    Event,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseKey,
    LeaseTable,
    Removed,
    Snapshot,
    name_of,
)
from flanneld.network.obstacles import HostNetworks
from flanneld.reconcile.claims import AddressClaims, Overlaps
from flanneld.runtime.logs import LogBatch, Once
from flanneld.state.desired import LOCAL, Before, Delta, DesiredState, rank
from flanneld.state.permits import Knowledge, RemovalGuard
from flanneld.state.resources import Key, Kind, Resource

log = logging.getLogger(__name__)

#: Lines about single leases in each period, at most, and the period in seconds.
FEW, PERIOD = 10, 1.0


class LeaseChange(Struct, frozen=True, gc=False):
    """A new or changed lease, or the key of one that has gone; told in upstream's words."""

    key: LeaseKey
    lease: Lease | None = None
    is_change: bool = False

    def __str__(self) -> str:
        if self.lease is None:
            return f"Subnet removed: {name_of(self.key)}"
        public = ", ".join(str(ip) for family in FAMILIES if (ip := self.lease.attrs.public(family)))
        was = ", which changed" if self.is_change else ""
        return f"Subnet added: {name_of(self.key)} via {public or 'no public IP'}{was}"


def _counted(changes: Collection[LeaseChange]) -> str:
    gone = sum(change.lease is None for change in changes)
    return f"Leases: {len(changes) - gone} new or changed, {gone} gone"


def lease_log() -> LogBatch[LeaseChange]:
    """Return the log of changes: a line takes a fifth of the time of the change that it is about."""
    return LogBatch(log, logging.INFO, _counted, few=FEW, period=PERIOD)


class Refusal(Struct, frozen=True, gc=False):
    """Reason why a lease is refused; ``code`` is a word for programs, if one asks for it."""

    text: str
    code: str = ""


class View(Struct, frozen=True, gc=False):
    """Snapshot of the peers: their leases, desired objects, contested keys with all claims, refusals.

    ``unsafe`` are the refused leases that would harm this host.
    """

    leases: list[Lease]
    desired: Mapping[LeaseKey, tuple[Resource, ...]]
    rivals: Mapping[Key, Mapping[LeaseKey, Resource]]
    reasons: Mapping[LeaseKey, Refusal]
    unsafe: Mapping[LeaseKey, str]
    synced: bool
    cached: str = ""


class Peers:
    """Peers' leases and the desired state, updated lease by lease. Writes nothing to the kernel.

    ``ranges`` are the cluster's networks, each with the length of this node's subnet. ``beside`` returns what
    a followed lease needs beside the backend's objects.
    """

    def __init__(
        self,
        own: Lease,
        ranges: Iterable[tuple[IPNetwork, int]],
        removal_guard: RemovalGuard,
        beside: Callable[[Lease], Iterable[Resource]] | None = None,
    ) -> None:
        self._beside = beside
        self._own = own
        self._removal_guard = removal_guard
        self._table = LeaseTable(own.key)
        self.claims = AddressClaims(own, ranges, self._table.get)
        self._overlaps = Overlaps(self.claims, self._leads)
        #: Leases that would lead to a peer, and are not followed for one that precedes them.
        self._withheld: set[LeaseKey] = set()
        #: Desired state, including the objects that this node needs for itself.
        self.desired = DesiredState()
        #: Leases with data that the backend cannot parse.
        self._unparsable: set[LeaseKey] = set()
        #: Reason why a lease has no objects, or not all of them.
        self._reasons: dict[LeaseKey, Refusal] = {}
        #: The same for leases that would harm this host.
        self._unsafe: dict[LeaseKey, str] = {}
        #: Last valid value of each lease: the objects for its node are kept after it.
        self._sound: dict[LeaseKey, Lease] = {}
        self._once = Once()
        self._log = lease_log()
        #: Further lines to be logged.
        self._told: list[str] = []

    def __len__(self) -> int:
        return len(self._table)

    @property
    def synced(self) -> bool:
        """Return True if all leases are known. Before that no object can be called stale."""
        return self._table.synced

    @property
    def cached(self) -> str:
        """Return the source of cached leases; empty if they come from the store. From any thread."""
        return self._table.cached

    @property
    def unclear(self) -> set[IPNetwork]:
        """Return the subnets of unreadable leases: existing objects for them may be correct."""
        return {
            net
            for key in self._table.unreadable | self._unparsable
            for net in key
            if net is not None and self.claims.obstacle_in(net) is None
        }

    def _leads(self, key: LeaseKey) -> bool:
        return key in self.desired or key in self._withheld

    def known(self) -> Knowledge:
        """Return what is known of the leases, for the permits of the tables."""
        local = frozenset(resource.key for resource in self.local_resources())
        return Knowledge(self.synced, self.cached, self.unclear, local)

    def view(self) -> View:
        """Return a snapshot that does not change afterwards. May be called from any thread."""
        return View(
            self._table.leases(),
            self.desired.by_owner(),
            self.desired.rivals(),
            self._reasons.copy(),
            self._unsafe.copy(),
            synced=self._table.synced,
            cached=self._table.cached,
        )

    def unsafe(self) -> list[str]:
        """Return one line for each lease that would harm this host. May be called from any thread."""
        return [f"{name_of(key)}: {reason}" for key, reason in self._unsafe.copy().items()]

    def public_ips(self) -> set[IPAddress] | None:
        """Return the public IPs of the peers that are followed; None until all are known. From any thread."""
        if not self.synced:
            return None
        followed = (lease.attrs for lease in self._table.leases() if lease.key in self.desired)
        return {ip for attrs in followed for family in FAMILIES if (ip := attrs.public(family))}

    def desired_kinds(self) -> list[Kind]:
        """Return the kind of each desired object. May be called from any thread."""
        return [resource.kind for resource in self.desired.state.values()]

    def set_local(self, resources: Iterable[Resource]) -> Delta:
        """Set the objects that this node needs without peers. Return the change of the desired state."""
        return self.desired.since(self.desired.set(LOCAL, resources))

    def local_resources(self) -> tuple[Resource, ...]:
        return self.desired.of_owner(LOCAL)

    def take(self, events: Iterable[Event], backend: Backend) -> Delta:
        """Apply events in order. Return the objects to make and to remove.

        Return no change for the first snapshot: then the tables are compared with the whole desired state.
        """
        was_synced = self.synced
        # Diff against the value before the batch: intermediate values never reached the kernel.
        before: Before = {}
        for event in events:
            for change in self._fold(event, backend):
                for key, was in change.items() if was_synced else ():
                    before.setdefault(key, was)
        return self.desired.since(before)

    def _fold(self, event: Event, backend: Backend) -> Iterator[Before]:
        change = self._change(event)
        others = self.claims.update(change.put, change.gone)
        if others:
            others.difference_update([lease.key for lease in change.put])
        for key in change.gone:
            self._forget(key)
            self._sound.pop(key, None)
            if self._leads(key):
                self._overlaps.note(key)
            self._withheld.discard(key)
            self._once.clear(("overlap", key))
            yield self.desired.set(key, ())
        for lease in (*change.put, *filter(None, map(self._table.get, sorted(others, key=rank)))):
            yield self._decide(lease, backend)
            self._warn_of_conflicts(lease)
        yield from self._decide_overlaps(backend)

    def _decide(self, lease: Lease, backend: Backend) -> Before:
        """Set the objects of a lease. Return those that were in effect before."""
        key = lease.key
        led = self._leads(key)
        resources = self._lead_to(lease, backend)
        if led != bool(resources):
            self._overlaps.note(key)
        winner = self._overlaps.winners.get(key)
        if winner is not None and resources:
            self._withheld.add(key)
        else:
            self._withheld.discard(key)
        if winner is not None:
            problem = f"it overlaps the lease {name_of(winner)}, which precedes it"
            reason = Refused(problem, f"give its node a subnet of the usual SubnetLen; {LEASES_END}")
            self._reasons[key] = Refusal(str(reason))
            line = f"Lease {lease} is not followed: {reason}"
            self._once.warn(log, ("overlap", key), line)
            resources = ()
        elif self._once.clear(("overlap", key)):
            self._told.append(f"Lease {lease} is followed: no lease that precedes it overlaps it any more")
        return self.desired.set(key, resources)

    def _decide_overlaps(self, backend: Backend) -> Iterator[Before]:
        """Decide again about leases with another winner than before."""
        for lease in filter(None, map(self._table.get, self._overlaps.settle())):
            yield self._decide(lease, backend)

    def reconsider(self, backend: Backend) -> Delta:
        """Decide again about every lease, after a change of the backend or of the host's routes."""
        return self._decide_all(self._table, backend)

    def look(self, host: HostNetworks, backend: Backend) -> Delta:
        """Apply new facts of this host. Return the objects to make and to remove."""
        self.claims.look(host)
        return self._decide_all(filter(self._may_change, self._table), backend)

    def _may_change(self, lease: Lease) -> bool:
        reason = self.claims.refusal(lease)
        harm = str(reason) if isinstance(reason, Unsafe) else None
        return harm != self._unsafe.get(lease.key) or lease.key in self._unparsable

    def _decide_all(self, leases: Iterable[Lease], backend: Backend) -> Delta:
        before: Before = {}
        decided = (self._decide(lease, backend) for lease in leases)
        for change in chain(decided, self._decide_overlaps(backend)):
            for key, was in change.items():
                before.setdefault(key, was)
        return self.desired.since(before)

    def log_changes(self, now: float) -> None:
        """Log the changes. Called after the write to the kernel, so that packets do not wait for the log."""
        self._log.write(now)
        for line in self._told:
            log.info("%s", line)
        self._told.clear()

    @property
    def log_due(self) -> float:
        """Return the time when changes have to be logged that exceed the log's limit."""
        return self._log.due

    def _change(self, event: Event) -> Change:
        was_synced, guard = self._table.synced, self._removal_guard
        match event:
            case Added(lease) if was_synced:
                guard.heard_of(lease.key)
            case Removed(key) if was_synced:
                guard.heard_of(key)
            case Snapshot() if was_synced:
                if _lacks(event, self._own.key):
                    # The daemon is about to exit, unless the lease is back by then.
                    guard.hold("The store has lost our own lease")
                    return Change()
                event = guard.pass_on(event, [lease.key for lease in self._table])
        change = self._table.apply(event)
        # Of many peers at the start only their number is told, by the sweep.
        if was_synced or len(change.put) <= FEW:
            for key in change.gone:
                self._log.add(LeaseChange(key))
            for lease in change.put:
                self._log.add(LeaseChange(lease.key, lease, is_change=lease.key in self.desired))
        return change

    def _lead_to(self, lease: Lease, backend: Backend) -> tuple[Resource, ...]:
        """Return the objects for a peer; for an invalid lease its former ones, or those of the valid part."""
        resources: list[Resource] = []
        try:
            refusal = self.claims.refusal(lease)
            if refusal is not None:
                raise refusal
            resources.extend(backend.peer(self._own, lease))
        except OtherBackend as reason:
            self._complain(lease, reason, f"Ignoring a lease: {reason}")
            return ()
        except Unsafe as reason:
            self._complain(lease, reason, f"Unsafe lease {lease}: {reason}")
            self._unsafe[lease.key] = str(reason)
            return ()
        except Refused as reason:
            self._complain(lease, reason, f"Refusing the data of lease {lease}: {reason}")
            self._unparsable.add(lease.key)
            sound = self._sound.get(lease.key)
            if sound is not None and not self.claims.is_reachable(sound):
                return ()
            return self.desired.of_owner(lease.key) or tuple(resources)
        self._forget(lease.key)
        self._sound[lease.key] = lease
        if self._beside is not None and resources:
            resources.extend(self._beside(lease))
        return tuple(resources)

    def _complain(self, lease: Lease, reason: Refused, line: str) -> None:
        self._unparsable.discard(lease.key)
        self._unsafe.pop(lease.key, None)
        self._reasons[lease.key] = Refusal(str(reason), reason.code)
        self._once.warn(log, lease.key, line)

    def _forget(self, key: LeaseKey) -> None:
        """Forget the complaints about a lease."""
        self._once.clear(("clone", key))
        if key in self._reasons:
            del self._reasons[key]
            self._unparsable.discard(key)
            if self._unsafe.pop(key, None):
                self._told.append(f"Lease {name_of(key)} no longer harms this host")
            self._once.clear(key)

    def _warn_of_conflicts(self, lease: Lease) -> None:
        clone = self.desired.cloned_device(lease.key)
        if clone is not None:
            self._once.warn(
                log,
                ("clone", lease.key),
                f"{lease} has the MAC {clone.mac} of our own {clone.name}: others reach only one of both;"
                f" on the clone: stop flanneld, ip link set {clone.name} address with a new MAC,"
                " start flanneld",
            )
        for resource, winner, loser in self.desired.conflicts(lease.key):
            self._once.warn(
                log,
                resource.key,
                f"{name_of(winner)} and {name_of(loser)} both claim {resource}; {name_of(winner)} has it: "
                "are these cloned machines, or is one public IP used twice?",
            )


def _lacks(snapshot: Snapshot, own: LeaseKey) -> bool:
    """Return True for a snapshot without our lease: an operator revoked it, or the store lost it."""
    return own not in snapshot.unreadable and all(lease.key != own for lease in snapshot.leases)
