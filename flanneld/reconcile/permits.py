"""Permits for writes: what may be made, replaced and removed, by what is known of the leases (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from flanneld.model import IPNetwork
from flanneld.state.desired import macs_of, without_ways_to
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import LINKS, NEIGHBORS, ROUTES, Key, Resource
from flanneld.state.table import Put


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
        if self.sweeps and self._removal_guard.holds_sweep(len(allowed.get(ROUTES, ())), self._routes()):
            return {}
        if self._removal_guard.sweep_is_held or not self._is_complete():
            allowed.pop(LINKS, None)  # Packets may use an old device until all new routes exist.
        return allowed
