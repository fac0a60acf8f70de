"""The only loop that moves the kernel.

    facts -> wanted state -> difference to what the kernel holds -> apply -> report

News of one lease touches only what belongs to this lease. An audit reads everything back and
repairs the difference: at the start, when somebody else touched what is ours, after a refusal,
and from time to time. Nothing is removed before the first snapshot of the leases: until then what
an earlier run left may be all that keeps the containers talking.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from flanneld import clock
from flanneld.backends import OtherBackend
from flanneld.errors import Fatal, Refused, Retryable
from flanneld.glog import Once, V
from flanneld.inbox import Inbox
from flanneld.model import (
    FAMILIES,
    Change,
    Event,
    IPNetwork,
    Lease,
    LeaseKey,
    LeaseTable,
    Snapshot,
    name_of,
)
from flanneld.network.diff import Plan, compare, plan, without_ways_to
from flanneld.network.kernel import Domain, Kernel
from flanneld.network.monitor import Gone, InterfaceChanged, Monitor, News, Overrun, Seen
from flanneld.network.report import Report
from flanneld.network.resources import Key, Kind, Link, Resource
from flanneld.network.wanted import LOCAL, Wanted
from flanneld.outside import Outside
from flanneld.site import Site

log = logging.getLogger(__name__)

AUDIT_PERIOD = 30.0
#: Lets a burst of notifications end before the kernel is read back.
_SETTLE = 0.005
#: Between two repairs where somebody keeps undoing our work, and as a multiple of what one costs.
_REPAIR_SPACING, _REPAIR_COST_FACTOR = 0.2, 10
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
#: After more writes than this the kernel is read back rather than its echo of them.
_BULK = 500
#: So many lines about single objects are worth reading at a time.
_FEW = 10


class Reconciler:
    """Keeps the kernel in the wanted state. ``inbox`` takes the events of one reading of the store."""

    def __init__(
        self,
        kernel: Kernel,
        monitor: Monitor,
        site: Site,
        own: Lease,
        *,
        extras: Iterable[Resource] = (),
        former: tuple[IPNetwork, ...] = (),
        stop: threading.Event,
        heartbeat: Callable[[float], None],
        on_move: Callable[[], None],
        on_synced: Callable[[], None],
    ) -> None:
        self.inbox: Inbox[list[Event]] = Inbox()
        self._kernel = kernel
        self._site = site
        self._own = own
        self._stop = stop
        self._heartbeat = heartbeat
        self._on_move = on_move
        self._on_synced = on_synced
        self._monitor = monitor
        self._extras = tuple(extras)
        self._table = LeaseTable(own.key)
        #: Leases whose data no backend could make sense of.
        self._riddles: set[LeaseKey] = set()
        self._wanted = Wanted()
        self._outside = Outside(site.backend)
        self._domain = Domain(site.uplink.name, frozenset(), site.ranges, former)
        self._names: dict[int, str] = {}
        self._lines: list[str] = []
        self._once = Once()
        self._next_audit = clock.now()
        self._earliest_repair = 0.0
        self._retry_delay = _FIRST_RETRY
        self._uplink_may_have_moved = False

    # ---- before the first peer ---------------------------------------------------------------

    def prepare(self) -> None:
        """Make what this node needs for itself. Raises ``Fatal`` when the kernel refuses."""
        self._wish_for_ourselves()
        try:
            report = self._converge()
        except OSError as failure:
            raise Retryable(f"cannot read the kernel's tables: {failure}") from failure
        refused = [failure for failure in report.failed if _in_kernel(failure.resource)]
        if refused:
            raise Fatal(
                f"the kernel refuses {refused[0]}",
                "run with CAP_NET_ADMIN on a kernel that has this kind of device",
            )
        for resource in report.made:
            log.info("Made %s", resource)
        self._next_audit = clock.now() + AUDIT_PERIOD
        self._account(report)

    def _wish_for_ourselves(self) -> None:
        self._wanted.set(LOCAL, (*self._site.backend.local(self._own), *self._extras))
        self._domain = replace(
            self._domain,
            uplink=self._site.uplink.name,
            links=frozenset(link.name for link in self._links()),
        )

    def _links(self) -> list[Link]:
        return [item for item in self._wanted.wishes(LOCAL) if isinstance(item, Link)]

    # ---- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        poll = select.poll()
        poll.register(self.inbox, select.POLLIN)
        poll.register(self._monitor, select.POLLIN)
        while not self._stop.is_set():
            self._heartbeat(2 * AUDIT_PERIOD)
            poll.poll(max(0.0, self._next_audit - clock.now()) * 1000)
            self._take_events([event for events in self.inbox.drain() for event in events])
            self.inbox.settle()
            self._take_news(self._monitor.read(self._names.get))
            if clock.now() >= self._next_audit and not self._stop.is_set():
                self._audit()
        self._outside.close()

    def cancel(self) -> None:
        self.inbox.wake()

    # ---- news of leases ----------------------------------------------------------------------

    def _take_events(self, events: list[Event]) -> None:
        if not self._table.synced:
            self._first_sync(events)
            return
        puts: dict[Key, Resource] = {}
        drops: dict[Key, Resource] = {}
        for event in events:
            for made, lost in self._fold(event):
                for resource in lost:
                    puts.pop(resource.key, None)
                    drops[resource.key] = resource
                for resource in made:
                    drops.pop(resource.key, None)
                    puts[resource.key] = resource
        try:
            if puts or drops:
                self._account(self._apply(plan(puts.values(), drops.values())))
        except OSError as failure:
            self._could_not_read(failure)
        # Afterwards, since packets wait for the kernel and not for the log.
        for line in self._lines:
            log.info("%s", line)
        self._lines.clear()

    def _fold(self, event: Event) -> Iterator[tuple[list[Resource], list[Resource]]]:
        """Change the wanted state by one event: what to make and what to remove because of it."""
        if self._domain.sweep and _lacks(event, self._own):
            log.warning("The store has lost our own lease: what it says of the others is not acted on")
            return
        change = self._table.apply(event)
        if self._domain.sweep:
            self._lines += _lines_about(change, self._wanted)
        for key in change.gone:
            self._once.clear(key)
            self._riddles.discard(key)
            yield self._wanted.set(key, ())
        for lease in change.put:
            yield self._wanted.set(lease.key, self._lead_to(lease))
            self._warn_of_conflicts(lease)

    def _lead_to(self, lease: Lease) -> tuple[Resource, ...]:
        """What leads to a peer; if its lease makes no sense, what did before, or the part that does."""
        resources: list[Resource] = []
        try:
            _refuse_overlap(lease, self._own)
            resources.extend(self._site.backend.peer(lease))
        except OtherBackend as reason:
            self._once.warn(log, lease.key, f"Ignoring a lease: {reason}")
            self._riddles.discard(lease.key)
            return ()
        except Refused as reason:
            self._once.warn(log, lease.key, f"Refusing the data of lease {lease}: {reason}")
            self._riddles.add(lease.key)
            return self._wanted.wishes(lease.key) or tuple(resources)
        self._once.clear(lease.key)
        self._riddles.discard(lease.key)
        return tuple(resources)

    def _warn_of_conflicts(self, lease: Lease) -> None:
        for resource, winner, loser in self._wanted.conflicts(lease.key):
            self._once.warn(
                log,
                resource.key,
                f"{name_of(winner)} and {name_of(loser)} both claim {resource}; {name_of(winner)} has it: "
                "are these cloned machines, or is one public IP used twice?",
            )

    def _first_sync(self, events: list[Event]) -> None:
        """Take what comes before and with the first snapshot; from then on what is stale may go."""
        for event in events:
            for _ in self._fold(event):
                pass
        if not self._table.synced:
            return
        self._domain = replace(self._domain, sweep=True, adopt=True)
        try:
            report = self._converge()
        except OSError as failure:
            self._could_not_read(failure)
            return
        self._domain = replace(self._domain, adopt=False)
        log.info(
            "In sync with %d peers: made %d objects, removed %d left by an earlier run",
            len(self._table),
            len(report.made),
            len(report.removed),
        )
        self._account(report)
        self._on_synced()

    # ---- news of the kernel ------------------------------------------------------------------

    def _take_news(self, news: Iterable[News]) -> None:
        for item in news:
            match item:
                case Overrun():
                    log.log(V(1), "Kernel notifications were lost: reading everything back")
                    self._uplink_may_have_moved = True
                    self._repair_soon()
                case InterfaceChanged(index, name):
                    if self._concerns_us(index, name):
                        self._uplink_may_have_moved = True
                        self._repair_soon()
                case Gone(key):
                    if key in self._wanted.state or self._site.asks_routes:
                        self._repair_soon()
                case Seen(resource):
                    if self._is_drift(resource) or self._site.asks_routes:
                        self._repair_soon()

    def _concerns_us(self, index: int, name: str | None) -> bool:
        ours = name == self._site.uplink.name or name in self._domain.links
        return ours or index in self._names or self._site.asks_routes or self._site.is_adrift

    def _is_drift(self, resource: Resource) -> bool:
        wanted = self._wanted.state.get(resource.key)
        if wanted is None:
            return getattr(resource, "device", None) in self._domain.links
        return wanted != resource

    def _repair_soon(self) -> None:
        self._next_audit = min(self._next_audit, max(clock.now() + _SETTLE, self._earliest_repair))

    # ---- the audit ---------------------------------------------------------------------------

    def _audit(self) -> None:
        began = clock.now()
        self._next_audit = began + AUDIT_PERIOD
        try:
            self._follow_uplink()
            report = self._converge()
        except OSError as failure:
            self._could_not_read(failure)
            return
        self._once.clear("read")
        _log_repairs("Healed", report.made)
        _log_repairs("Removed what nobody wants", report.removed)
        if not report.failed:
            self._retry_delay = _FIRST_RETRY
            if self._once.clear("refused"):
                log.info("All that is wanted is there again")
        ended = clock.now()
        self._earliest_repair = ended + max(_REPAIR_SPACING, _REPAIR_COST_FACTOR * (ended - began))
        self._next_audit = max(self._next_audit, self._earliest_repair)
        self._account(report)
        if self._table.synced and self._domain.adopt:
            self._domain = replace(self._domain, adopt=False)
            self._on_synced()

    def _follow_uplink(self) -> None:
        look = self._uplink_may_have_moved or self._site.asks_routes or self._site.is_adrift
        moved = look and self._site.follow()
        self._uplink_may_have_moved = False
        if moved:
            self._outside = Outside(self._site.backend)
            self._wish_for_ourselves()
        if moved or self._site.asks_routes:
            for lease in self._table:
                self._wanted.set(lease.key, self._lead_to(lease))
        if moved:
            self._on_move()

    def _converge(self) -> Report:
        """Read, compare, apply. Raises ``OSError`` if the kernel cannot be read."""
        report = self._kernel.apply_links(self._links())
        links = ((link, True) for link in self._links())
        steps = compare(self._wanted.state, chain(links, self._kernel.read(self._domain, self._wanted.state)))
        steps = Plan(steps.puts, self._without_riddles(steps.drops) if self._domain.sweep else ())
        report.add(self._write(steps.only(_in_kernel) if self._outside else steps))
        report.add(self._outside.converge(self._wanted.state, sweep=self._domain.sweep))
        self._names = self._interfaces()
        return report

    def _without_riddles(self, stale: tuple[Resource, ...]) -> tuple[Resource, ...]:
        """A lease that makes no sense is there all the same: what an earlier run made of it stays."""
        riddles = self._table.unreadable | self._riddles
        return without_ways_to({net for key in riddles for net in key if net is not None}, stale)

    def _apply(self, steps: Plan) -> Report:
        if not self._outside:
            return self._write(steps)
        report = self._write(steps.only(_in_kernel))
        report.add(self._outside.apply(steps.only(lambda resource: not _in_kernel(resource))))
        return report

    def _write(self, steps: Plan) -> Report:
        if len(steps.puts) + len(steps.drops) <= _BULK:
            return self._kernel.apply(steps, self._domain)
        with self._monitor.deaf():
            report = self._kernel.apply(steps, self._domain)
        # Whatever else happened meanwhile was not heard; and reading back is a proof.
        self._uplink_may_have_moved = True
        if report.made or report.removed:
            self._repair_soon()
        return report

    def _interfaces(self) -> dict[int, str]:
        present = {name: index for index, name in socket.if_nameindex()}
        ours = (self._domain.uplink, *self._domain.links)
        return {present[name]: name for name in ours if name in present}

    # ---- afterwards --------------------------------------------------------------------------

    def _account(self, report: Report) -> None:
        """Say what was refused, and when to try again."""
        if report.failed:
            first = report.failed[0]
            more = f", and {len(report.failed) - 1} more" if len(report.failed) > 1 else ""
            self._once.warn(log, "refused", f"Refused: {first}{more}; trying again")
            self._next_audit = min(self._next_audit, clock.now() + self._retry_delay)
            self._retry_delay = min(2 * self._retry_delay, _LAST_RETRY)

    def _could_not_read(self, failure: OSError) -> None:
        self._once.warn(
            log, "read", f"Cannot read the kernel's tables: {failure}; changing nothing until we can"
        )
        self._next_audit = clock.now() + _FIRST_RETRY


def _lacks(event: Event, own: Lease) -> bool:
    """A snapshot without our lease: we were revoked, or the store forgot. Either way we are about to end."""
    if not isinstance(event, Snapshot):
        return False
    return own.key not in event.unreadable and all(lease.key != own.key for lease in event.leases)


def _in_kernel(resource: Resource) -> bool:
    return resource.kind is not Kind.OUTSIDE


def _refuse_overlap(lease: Lease, own: Lease) -> None:
    """Raises ``Refused`` for a peer that claims what is ours: its route would cut off our containers."""
    for theirs, ours in zip(lease.key, own.key, strict=True):
        if theirs is None or ours is None:
            continue
        same_length = theirs.prefixlen == ours.prefixlen
        same_start = theirs.network_address == ours.network_address
        if same_start if same_length else theirs.overlaps(ours):
            raise Refused(f"it overlaps our own subnet {ours}", "remove the lease that is wrong")


def _lines_about(change: Change, wanted: Wanted) -> Iterator[str]:
    if len(change.put) + len(change.gone) > _FEW:
        yield f"Leases: {len(change.put)} new or changed, {len(change.gone)} gone"
        return
    for key in change.gone:
        yield f"Lease {name_of(key)} is gone"
    for lease in change.put:
        word = "changed" if lease.key in wanted else "added"
        public = ", ".join(str(ip) for family in FAMILIES if (ip := lease.attrs.public(family)))
        yield f"Lease {lease} {word}, at {public or 'no public IP'}"


def _log_repairs(what: str, resources: list[Resource]) -> None:
    for resource in resources[:_FEW]:
        log.warning("%s: %s", what, resource)
    if len(resources) > _FEW:
        log.warning("%s: %d more objects", what, len(resources) - _FEW)
