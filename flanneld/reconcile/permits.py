"""Permits for writes: restrictions on removals until the leases are known and readable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flanneld.reconcile.peers import Peers
from flanneld.state.diff import macs_of, without_ways_to
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import LINKS, NEIGHBORS, ROUTES, Key, Resource
from flanneld.state.table import Put


class LeasePermits:
    """Permits that depend on the known leases.

    Nothing is removed before all leases are known: objects of an earlier run may carry all traffic of the
    containers. No object for an unreadable lease is removed. Leases of a cache neither remove nor replace
    anything. ``is_complete`` is True if nothing was refused so far.

    Routes for which ``harms`` returns True are always removed: packets would leave the host unencrypted
    though the backend encrypts, or the store would not be reached. Lost packets do less harm.
    """

    def __init__(
        self,
        peers: Peers,
        removal_guard: RemovalGuard,
        is_complete: Callable[[], bool],
        harms: Callable[[Resource], bool] = lambda _: False,
    ) -> None:
        self._peers = peers
        self._removal_guard = removal_guard
        self._is_complete = is_complete
        self._harms = harms
        #: By table, keys of the objects that differed from the cached leases when these came.
        self._newer: dict[str, frozenset[Key]] = {}
        #: MACs of VTEPs of unclear leases whose neighbour entries are kept.
        self._kept_macs: frozenset[str] = frozenset()
        #: True during the sweep of an earlier run's objects.
        self.sweeps = False

    def puts(self, table: str, puts: list[Put]) -> list[Put]:
        """Return all puts; with leases of a cache, without those that would replace an existing object.

        The earlier run that left the object may have known newer leases than the cache.
        """
        if not self._peers.cached:
            return puts
        newer = self._newer.get(table)
        if newer is None:
            local = {resource.key for resource in self._peers.local_resources()}
            differing = (put.want.key for put in puts if put.was is not None)
            newer = self._newer[table] = frozenset(key for key in differing if key not in local)
        return [put for put in puts if put.want.key not in newer]

    def drops(self, stale: Mapping[str, Sequence[Resource]]) -> Mapping[str, Sequence[Resource]]:
        harmful = [resource for resource in stale.get(ROUTES, ()) if self._harms(resource)]
        if not harmful:
            return self._drops(stale)
        rest = [resource for resource in stale[ROUTES] if not self._harms(resource)]
        allowed = self._drops({**stale, ROUTES: rest})
        return {**allowed, ROUTES: [*harmful, *allowed.get(ROUTES, ())]}

    def _drops(self, stale: Mapping[str, Sequence[Resource]]) -> Mapping[str, Sequence[Resource]]:
        if not self._peers.synced:
            return {}
        unclear = self._peers.unclear
        if NEIGHBORS in stale:
            self._kept_macs = frozenset(macs_of(unclear, stale[NEIGHBORS]))
        allowed = {
            name: without_ways_to(unclear, resources, self._kept_macs) for name, resources in stale.items()
        }
        routes = len(allowed.get(ROUTES, ()))
        if self.sweeps and self._removal_guard.holds_sweep(routes, len(self._peers.desired.table(ROUTES))):
            return {}
        if self._removal_guard.sweep_is_held or not self._is_complete():
            allowed.pop(LINKS, None)  # Packets may use an old device until all new routes exist.
        return allowed
