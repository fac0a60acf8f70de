"""Permits for writes, by what is known of the leases, and the guard against a list that lacks most of them.

A store that was restored from an old copy, or returns a partial list, must not cut off a whole cluster.
Single removals are never held back: each of them is an explicit event.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import IPNetwork, LeaseKey, Snapshot
from flanneld.runtime import clock
from flanneld.state.desired import macs_of, without_ways_to
from flanneld.state.resources import GUARDS, LINKS, NEIGHBORS, ROUTES, Key, Resource
from flanneld.state.table import Put

log = logging.getLogger(__name__)

#: Peers that may be missing from a list at once.
FEW = 10
#: Seconds between the first read and the one that decides.
HOLD = 30.0


class RemovalGuard:
    """Guard that delays the removal of many peers. For one thread."""

    def __init__(self, *, is_on: bool = True, now: Callable[[], float] = clock.now) -> None:
        self._is_on = is_on
        self._now = now
        #: When a repeated loss takes effect.
        self._until = math.inf
        self._asked = False
        #: Leases that a list lacked and that no event has mentioned since.
        self._missing: set[LeaseKey] = set()
        self.sweep_is_held = False
        self._may_sweep = False
        #: Number of delays, and the reason of the last one.
        self.holds_total = 0
        self.reason = ""

    @property
    def holds(self) -> bool:
        """True while removals are held back."""
        return self._until < math.inf

    @property
    def next_reading(self) -> float:
        """Time of the next relist; infinite if none is due."""
        return math.inf if self._asked else self._until

    def is_due(self) -> bool:
        """Return True if the leases have to be read again now, once per delay."""
        if self._now() < self.next_reading:
            return False
        self._asked = True
        return True

    def pass_on(self, snapshot: Snapshot, known: Collection[LeaseKey]) -> Snapshot:
        """Return the snapshot, or one that lists missing peers as unreadable, which keeps them."""
        there = {lease.key for lease in snapshot.leases} | snapshot.unreadable
        missing = {key for key in known if key not in there}
        is_another_loss = self._is_too_much(len(missing - self._missing), len(known))
        if is_another_loss or (self._is_too_much(len(missing), len(known)) and not self._is_over()):
            if is_another_loss:
                self._until = math.inf
            self.hold(f"{len(missing)} of {len(known)} peers are gone from the list of leases")
            self._missing = missing
            return replace(snapshot, unreadable=snapshot.unreadable | missing)
        if self._is_over() or not self.sweep_is_held:
            self._release()
        return snapshot

    def hold(self, what: str) -> None:
        """Suspend removals until the leases have been relisted. ``what`` is the reason."""
        if self.holds and not self._is_over():
            return
        self._until, self._asked = self._now() + HOLD, False
        self.holds_total += 1
        self.reason = what
        log.warning("Removals suspended: %s; relisting in %.0f s", what, HOLD)

    def heard_of(self, key: LeaseKey) -> None:
        """Record an event about one lease: it is back, or was removed explicitly."""
        if key not in self._missing:
            return
        self._missing.discard(key)
        if not self._missing and not self.sweep_is_held:
            log.info("Removals resumed: all missing peers are accounted for")
            self._until, self._asked = math.inf, False

    def holds_sweep(self, stale: int, kept: int) -> bool:
        """Return True if an earlier run's routes must stay for now, although no lease has them."""
        if not self.sweep_is_held and not self._may_sweep and self._is_too_much(stale, stale + kept):
            self.sweep_is_held = True
            self.hold(f"{stale} of {stale + kept} routes lead to peers that are not in the list of leases")
        return self.sweep_is_held

    def _is_too_much(self, missing: int, known: int) -> bool:
        return self._is_on and known > FEW and 2 * missing > known

    def _is_over(self) -> bool:
        return self._now() >= self._until

    def _release(self) -> None:
        if self.holds:
            log.warning("Removals resumed: the leases were relisted")
        self._may_sweep |= self.sweep_is_held
        self._missing.clear()
        self._until, self._asked, self.sweep_is_held = math.inf, False, False


class Knowledge(Struct, frozen=True, gc=False):
    """State of the leases: ``synced`` once all are known; ``cached`` names a source other than the store.

    ``unclear`` are the subnets of unreadable leases. ``local`` are the keys of the objects that this node
    needs for itself, whatever the leases.
    """

    synced: bool = False
    cached: str = ""
    unclear: Collection[IPNetwork] = ()
    local: Collection[Key] = ()


def everything() -> Knowledge:
    """Return the knowledge that permits all writes."""
    return Knowledge(synced=True)


class Permits:
    """Permits of a group of tables, the same rule for each. An object without a permit stays as it is.

    Nothing is removed before all leases are known: objects of an earlier run may carry all traffic of the
    containers. No object for an unreadable lease is removed. Leases of a cache remove nothing, and replace
    nothing but what this node needs for itself. ``is_complete`` is True if nothing was refused so far.

    Routes for which ``harms`` returns True are always removed: packets would leave the host unencrypted
    though the backend encrypts, or the store would not be reached. Lost packets do less harm. ``routes``
    returns the number of desired routes, for the removal guard.
    """

    def __init__(
        self,
        known: Callable[[], Knowledge] = everything,
        removal_guard: RemovalGuard | None = None,
        *,
        is_complete: Callable[[], bool] = lambda: True,
        harms: Callable[[Resource], bool] = lambda _: False,
        routes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._known = known
        self._removal_guard = removal_guard or RemovalGuard(is_on=False)
        self._is_complete = is_complete
        self._harms = harms
        self._routes = routes
        #: By table, keys of the objects that differed from the cached leases when these came.
        self._newer: dict[str, frozenset[Key]] = {}
        #: MACs of VTEPs of unclear leases whose neighbour entries are kept.
        self._kept_macs: frozenset[str] = frozenset()
        #: True during the sweep of an earlier run's objects.
        self.sweeps = False

    def puts(self, table: str, puts: list[Put]) -> list[Put]:
        """Return the permitted puts; with leases of a cache, without those that would replace an object.

        The earlier run that left the object may have known newer leases than the cache.
        """
        known = self._known()
        if not known.cached:
            return puts
        newer = self._newer.get(table)
        if newer is None:
            differing = (put.want.key for put in puts if put.was is not None)
            newer = self._newer[table] = frozenset(key for key in differing if key not in known.local)
        return [put for put in puts if put.want.key not in newer]

    def drops(self, stale: Mapping[str, Sequence[Resource]]) -> Mapping[str, Sequence[Resource]]:
        """Return the permitted removals, by table."""
        harmful = [resource for resource in stale.get(ROUTES, ()) if self._harms(resource)]
        if not harmful:
            return self._drops(stale)
        rest = [resource for resource in stale[ROUTES] if not self._harms(resource)]
        allowed = self._drops({**stale, ROUTES: rest})
        return {**allowed, ROUTES: [*harmful, *allowed.get(ROUTES, ())]}

    def _drops(self, stale: Mapping[str, Sequence[Resource]]) -> Mapping[str, Sequence[Resource]]:
        known = self._known()
        if not known.synced:
            return {}
        if NEIGHBORS in stale:
            self._kept_macs = frozenset(macs_of(known.unclear, stale[NEIGHBORS]))
        allowed = {
            name: without_ways_to(known.unclear, resources, self._kept_macs)
            for name, resources in stale.items()
        }
        if known.unclear:  # a node whose lease cannot be read may be any of those that are let in
            allowed = {name: found for name, found in allowed.items() if name not in GUARDS.values()}
        if self.sweeps and self._removal_guard.holds_sweep(len(allowed.get(ROUTES, ())), self._routes()):
            return {}
        if self._removal_guard.sweep_is_held or not self._is_complete():
            allowed.pop(LINKS, None)  # Packets may use an old device until all new routes exist.
        return allowed
