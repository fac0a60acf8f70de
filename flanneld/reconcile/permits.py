"""What the leases permit to write: before they are known, and where they are not clear, little may go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flanneld.reconcile.peers import Peers
from flanneld.state.diff import macs_of, without_ways_to
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import LINKS, NEIGHBORS, ROUTES, Key, Resource
from flanneld.state.table import Put


class LeasePermits:
    """Permits by what is known of the leases.

    Nothing is removed before all leases are known: what an earlier run left may be all that keeps the
    containers talking. Nothing that leads to an unreadable lease is removed. Leases of a cache neither remove
    nor replace anything. ``is_complete`` says whether nothing was refused so far.

    None of that keeps what ``leaks``: routes by which packets leave the host in the clear while the backend
    encrypts. Packets that are lost do less harm.
    """

    def __init__(
        self,
        peers: Peers,
        removal_guard: RemovalGuard,
        is_complete: Callable[[], bool],
        leaks: Callable[[Resource], bool] = lambda _: False,
    ) -> None:
        self._peers = peers
        self._removal_guard = removal_guard
        self._is_complete = is_complete
        self._leaks = leaks
        #: By table, keys of what differed from the leases of a cache when these came.
        self._newer: dict[str, frozenset[Key]] = {}
        #: MACs of VTEPs of unclear leases whose neighbour entries are kept.
        self._kept_macs: frozenset[str] = frozenset()
        #: Whether what an earlier run left is being swept.
        self.sweeps = False

    def puts(self, table: str, puts: list[Put]) -> list[Put]:
        """All, but with the leases of a cache what the tables hold otherwise stays.

        The earlier run that left it there had news that it could not save.
        """
        if not self._peers.cached:
            return puts
        newer = self._newer.get(table)
        if newer is None:
            local = {resource.key for resource in self._peers.local_wishes()}
            differing = (put.want.key for put in puts if put.was is not None)
            newer = self._newer[table] = frozenset(key for key in differing if key not in local)
        return [put for put in puts if put.want.key not in newer]

    def drops(self, stale: Mapping[str, Sequence[Resource]]) -> Mapping[str, Sequence[Resource]]:
        leaks = [resource for resource in stale.get(ROUTES, ()) if self._leaks(resource)]
        if not leaks:
            return self._drops(stale)
        rest = [resource for resource in stale[ROUTES] if not self._leaks(resource)]
        allowed = self._drops({**stale, ROUTES: rest})
        return {**allowed, ROUTES: [*leaks, *allowed.get(ROUTES, ())]}

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
        if self.sweeps and self._removal_guard.holds_sweep(routes, len(self._peers.wanted.table(ROUTES))):
            return {}
        if self._removal_guard.sweep_is_held or not self._is_complete():
            allowed.pop(LINKS, None)  # Packets may take an old device until all other ways are there.
        return allowed
