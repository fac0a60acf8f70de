"""Reconciler tables of a cloud: this node's routes, and its permission to forward packets of containers.

A call may take seconds and cost quota. So the tables have a worker of their own and are read every few
minutes. They back off while the cloud refuses or throttles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address

from msgspec import Struct

from flanneld.backends.cloud.calls import WORKER, CallBackoff, absence_is_fine, audit_period, understood
from flanneld.backends.cloud.contract import (
    FORWARDING,
    ROUTES,
    Cloud,
    CloudError,
    CloudNode,
    CloudRoute,
    CloudTableEntry,
    ErrorKind,
    Forwarding,
    Health,
)
from flanneld.backends.cloud.record import Record
from flanneld.config import SubnetRange
from flanneld.errors import Retryable
from flanneld.model import Snapshot, lies_in
from flanneld.runtime import clock
from flanneld.state.permits import RemovalGuard
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Claim, Failure, Put, Report, Scope, Seen, Table

#: Seconds until a read must show an own write, and seconds between two reads meanwhile.
VISIBLE_WITHIN, _LOOK_AGAIN = 60.0, 5.0
#: Seconds for the cloud to finish a pending route.
_MADE_WITHIN = 100.0
#: Errors that cause a backoff; other failures cost the cloud nothing.
_PACED = frozenset({ErrorKind.THROTTLED, ErrorKind.DENIED, ErrorKind.CREDENTIALS, ErrorKind.NO_TABLE})


class Written(Struct, frozen=True, gc=False):
    """Own write that a read may not show before ``until``. Without ``resource`` it was a removal."""

    resource: CloudRoute | None
    until: float


class CloudRoutes(Table):
    """Table of this node's routes in the cloud. It changes only routes inside the network.

    A route to another running instance is foreign. A route whose instance is gone may be replaced. Any node
    removes it if its destination has the size of a lease, because its owner cannot.
    """

    name = ROUTES
    what = "the routes in the cloud"
    worker = WORKER

    def __init__(self, cloud: Cloud, subnets: SubnetRange, record: Record) -> None:
        self._cloud = cloud
        self._subnets = subnets
        self._record = record
        self._guard = RemovalGuard()
        self._place: tuple[IPv4Address, CloudNode] | None = None
        #: Result of the last read, by resource key.
        self._entries: dict[Key, CloudTableEntry] = {}
        self._written: dict[Key, Written] = {}
        self._pending_since: dict[Key, float] = {}
        self._reading = CallBackoff()
        self._refusals: dict[Key, CallBackoff] = {}
        self.next_look = math.inf

    @property
    def audit(self) -> float:
        return audit_period()

    def look(self) -> bool:
        self.next_look = math.inf
        return True

    # ---- reading -----------------------------------------------------------------------------

    def read(self, scope: Scope) -> list[Seen]:
        """Read the routes. Raises ``CloudError``, or the last one again during the pause after it."""
        desired = [each for each in scope.desired.values() if isinstance(each, CloudRoute)]
        if not desired:
            return []
        self._reading.check()
        try:
            with understood():
                found = self._read(desired)
        except CloudError as failure:
            if failure.trouble in _PACED:
                self._reading.refused(failure)
            raise
        self._reading.succeeded()
        return found

    def _read(self, desired: Sequence[CloudRoute]) -> list[Seen]:
        address = IPv4Address(desired[0].via)
        place = self._cloud.place(address)
        self._place = (address, place)
        inside = [
            each for each in self._cloud.entries(place) if lies_in(each.destination, self._subnets.network)
        ]
        labels = {table: table for table in place.tables} if any(each.table for each in desired) else {}
        keys = {entry: _key(entry, labels) for entry in inside}
        gone = self._gone(place, inside, {want.key for want in desired}, keys)
        self._entries = {}
        for entry, key in keys.items():
            known = self._entries.get(key)
            if known is None or entry.hop == place.hop:
                self._entries[key] = entry
        seen = dict(self._shown(place, address, labels, gone, {want.key for want in desired}))
        return list(self._with_own_writes(seen).values())

    def _gone(
        self,
        place: CloudNode,
        inside: Sequence[CloudTableEntry],
        desired: Collection[Key],
        keys: Mapping[CloudTableEntry, Key],
    ) -> set[CloudTableEntry]:
        """Return the replaceable or sweepable entries whose instance is gone."""
        asked = [
            entry
            for entry in inside
            if entry.hop != place.hop
            and (keys[entry] in desired or self._subnets.contains(entry.destination))
        ]
        return set(self._cloud.gone(place, asked)) if asked else set()

    def _shown(
        self,
        place: CloudNode,
        address: IPv4Address,
        labels: Mapping[str, str],
        gone: Collection[CloudTableEntry],
        desired: Collection[Key],
    ) -> Iterator[tuple[Key, Seen]]:
        may_sweep = self._may_sweep(gone)
        for key, entry in self._entries.items():
            table = labels.get(entry.table, "")
            if entry.hop == place.hop:
                is_mine = self._subnets.contains(entry.destination) or self._record.has(entry)
                via = str(address) if self._works(key, entry) else f"{entry.hop}, {entry.health.value}"
                claim = Claim.OURS if is_mine else Claim.FOREIGN
            else:
                is_left = entry in gone and (may_sweep or key in desired)
                via, claim = entry.hop, Claim.LEFT if is_left else Claim.FOREIGN
            yield key, Seen(CloudRoute(entry.destination, via, table), claim)

    def _works(self, key: Key, entry: CloudTableEntry) -> bool:
        """Return True if our route needs no repair now. A pending route is read again later."""
        if entry.health is not Health.PENDING:
            self._pending_since.pop(key, None)
            return entry.health is Health.ACTIVE
        since = self._pending_since.setdefault(key, clock.now())
        self._look_again()
        return clock.now() - since < _MADE_WITHIN

    def _may_sweep(self, gone: Collection[CloudTableEntry]) -> bool:
        """Return False if most instances are gone at once, until a second read confirms it."""
        if self._guard.is_due():
            self._guard.pass_on(Snapshot(()), ())
        held = self._guard.holds_sweep(len(gone), len(self._entries) - len(gone))
        if held:
            self.next_look = min(self.next_look, self._guard.next_reading)
        elif not gone:
            self._guard = RemovalGuard()
        return not held

    def _with_own_writes(self, seen: dict[Key, Seen]) -> dict[Key, Seen]:
        """Apply recent own writes that a read may not show yet: clouds are eventually consistent."""
        now = clock.now()
        for key, write in list(self._written.items()):
            there = seen.get(key)
            if (there.resource if there else None) == write.resource or now >= write.until:
                del self._written[key]
                continue
            self._look_again()
            if write.resource is None:
                seen.pop(key, None)
            elif there is None or there.claim is not Claim.FOREIGN:
                seen[key] = Seen(write.resource)
        return seen

    def _look_again(self) -> None:
        self.next_look = min(self.next_look, clock.now() + _LOOK_AGAIN)

    # ---- changes -----------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            want = put.want
            assert isinstance(want, CloudRoute)
            if self._is_done(want, partial(self._make, want, put), report):
                report.made.append(want)
        return report

    def _is_done(self, resource: Resource, act: Callable[[], str], report: Report) -> bool:
        """Call ``act`` unless a backoff is active. Add the result or the refusal to the report."""
        pace = self._refusals.setdefault(resource.key, CallBackoff())
        try:
            pace.check()
            report.details[resource.key] = act()
        except Retryable as failure:
            report.failed.append(Failure(resource, failure.problem, failure.remedy))
            if isinstance(failure, CloudError):
                pace.refused(failure)
                if failure.trouble is ErrorKind.THROTTLED:
                    self._reading.refused(failure)
            return False
        del self._refusals[resource.key]
        return True

    def explain(self, put: Put) -> str:
        """Return the calls that ``put`` would make."""
        assert isinstance(put.want, CloudRoute)
        entry, was, place = self._orders(put.want, put)
        if was and put.claim is Claim.FOREIGN:
            return f"none, {_blocked(was).problem}"
        return "; ".join(map(str, self._cloud.put_calls(place, entry, was)))

    def _make(self, want: CloudRoute, put: Put) -> str:
        """Make a route and return the calls for it. Raises ``CloudError``."""
        entry, was, place = self._orders(want, put)
        if was and put.claim is Claim.FOREIGN:
            raise _blocked(was)
        if was and was.hop == place.hop and was.health is Health.PENDING:
            problem = f"the cloud has not made it within {_MADE_WITHIN:g} s"
            raise CloudError(ErrorKind.BUSY, problem, "see what its console says of the route table")
        self._record.add(entry, want.via)
        if was and was.hop == place.hop and was.health is Health.ACTIVE:
            return "it leads to this node already"
        calls = self._cloud.put_calls(place, entry, was)
        for call in calls:
            self._cloud.ask(call)
        self._written[want.key] = Written(want, clock.now() + VISIBLE_WITHIN)
        self._look_again()
        return ", ".join(call.action for call in calls) + (f", it led to {was.hop}" if was else "")

    def _orders(
        self, want: CloudRoute, put: Put
    ) -> tuple[CloudTableEntry, CloudTableEntry | None, CloudNode]:
        """Return the entry to make, the one to replace, and this node. Raises ``CloudError``."""
        address = IPv4Address(want.via)
        if self._place is None or self._place[0] != address:
            with understood():
                self._place = (address, self._cloud.place(address))
        place = self._place[1]
        was = self._entries.get(want.key) if put.was is not None else None
        return CloudTableEntry(want.table or place.tables[0], want.destination, place.hop), was, place

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        for resource in found:
            entry = self._entries.get(resource.key)
            if entry is None or self._is_done(resource, partial(self._remove, resource.key, entry), report):
                report.removed.append(resource)
        return report

    def _remove(self, key: Key, entry: CloudTableEntry) -> str:
        """Remove a route; a missing one is no error. Raises ``CloudError``."""
        calls = self._cloud.drop_calls(entry)
        with absence_is_fine():
            for call in calls:
                self._cloud.ask(call)
        self._record.remove(entry)
        self._written[key] = Written(None, clock.now() + VISIBLE_WITHIN)
        return f"{', '.join(call.action for call in calls)}, {entry.hop} is gone"


def _key(entry: CloudTableEntry, labels: Mapping[str, str]) -> Key:
    return CloudRoute(entry.destination, entry.hop, labels.get(entry.table, "")).key


def _blocked(was: CloudTableEntry) -> CloudError:
    return CloudError(
        ErrorKind.EXISTS,
        f"a route of {was.table} leads {was.destination} to {was.hop}, which exists",
        "if that is no node of this network, delete the route there; else see which node has this lease",
    )


class CloudForwardingTable(Table):
    """Table of this node's permission to forward, for clouds with such a setting."""

    name = FORWARDING
    what = "the cloud's forwarding permissions"
    worker = WORKER
    vital = False

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._place: CloudNode | None = None
        self._reading, self._asking = CallBackoff(), CallBackoff()

    @property
    def audit(self) -> float:
        return audit_period()

    def read(self, scope: Scope) -> list[Seen]:
        self._reading.check()
        desired = [each for each in scope.desired.values() if isinstance(each, Forwarding)]
        try:
            found = [Seen(self._permission(want)) for want in desired]
        except CloudError as failure:
            self._reading.refused(failure)
            raise
        self._reading.succeeded()
        return found

    def _permission(self, want: Forwarding) -> Forwarding:
        """Read the permission from the cloud. Raises ``CloudError``."""
        with understood():
            self._place = self._cloud.place(want.address)
        return Forwarding(want.address, self._place.forwards)

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            try:
                self._asking.check()
                self._allow()
            except Retryable as failure:
                if isinstance(failure, CloudError):
                    self._asking.refused(failure)
                report.failed.append(Failure(put.want, failure.problem, failure.remedy))
            else:
                self._asking.succeeded()
                report.made.append(put.want)
        return report

    def explain(self, put: Put) -> str:
        """Return the calls that ``put`` would make."""
        del put
        return "; ".join(map(str, self._cloud.forwarding_calls(self._place))) if self._place else ""

    def _allow(self) -> None:
        """Set the permission. Raises ``CloudError`` if the cloud refuses or only an operator can do it."""
        assert self._place is not None, "put follows a reading"
        calls = self._cloud.forwarding_calls(self._place)
        remedy = self._cloud.forwarding_remedy(self._place)
        problem = f"the cloud drops packets of containers at {self._place.instance}"
        if not calls:
            raise CloudError(ErrorKind.OTHER, problem, remedy)
        try:
            for call in calls:
                self._cloud.ask(call)
        except CloudError as failure:
            raise CloudError(failure.trouble, f"{problem}: {failure.problem}", remedy) from None

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove nothing: another program may need the permission."""
        return Report(removed=list(found))
