"""The leases of two keyspaces as those of one (pure).

A lease is there if one of them has it; it is gone when both have said so. If both have it, the first
keyspace's word counts, whatever came when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from flanneld.model import Added, Event, Lease, LeaseKey, Removed, Snapshot


class _Side(Struct, gc=False):
    """What one keyspace says. An unreadable lease stays what it was."""

    synced: bool = False
    leases: dict[LeaseKey, Lease] = field(default_factory=dict)
    unreadable: set[LeaseKey] = field(default_factory=set)

    def fold(self, event: Event) -> None:
        match event:
            case Added(lease):
                self.leases[lease.key] = lease
                self.unreadable.discard(lease.key)
            case Removed(key):
                self.leases.pop(key, None)
                self.unreadable.discard(key)
            case Snapshot(leases, unreadable):
                kept = {key: lease for key, lease in self.leases.items() if key in unreadable}
                self.leases = kept | {lease.key: lease for lease in leases}
                self.unreadable = set(unreadable)
                self.synced = True

    def has(self, key: LeaseKey) -> bool:
        return key in self.leases or key in self.unreadable


class LeaseUnion:
    """Folds the events of each side into those of the whole. The names of the sides are in their rank."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sides = {name: _Side() for name in names}

    def fold(self, name: str, event: Event) -> list[Event]:
        """What an event of one side means for the whole.

        Until each side has delivered a ``Snapshot`` there is none of the whole, and nothing is gone: a
        side that nobody could read yet may have it.
        """
        self._sides[name].fold(event)
        match event:
            case Added(lease):
                return self._said(lease.key)
            case Removed(key):
                return self._said(key)
        if all(each.synced for each in self._sides.values()):
            return [self._snapshot()]
        return [Added(lease) for lease in self._leases()]

    def disputes(self) -> Iterator[tuple[Lease, Lease]]:
        """The leases that two sides give to different nodes, each time first the one that counts."""
        for lease in self._leases():
            found = [side.leases[lease.key] for side in self._sides.values() if lease.key in side.leases]
            if len({(each.attrs.public_ip, each.attrs.public_ipv6) for each in found}) > 1:
                yield found[0], found[1]

    def _said(self, key: LeaseKey) -> list[Event]:
        lease = self._lease(key)
        if lease:
            return [Added(lease)]
        sides = self._sides.values()
        is_gone = all(side.synced and not side.has(key) for side in sides)
        return [Removed(key)] if is_gone else []

    def _lease(self, key: LeaseKey) -> Lease | None:
        return next((side.leases[key] for side in self._sides.values() if key in side.leases), None)

    def _leases(self) -> Iterable[Lease]:
        merged: dict[LeaseKey, Lease] = {}
        for side in self._sides.values():
            merged = side.leases | merged
        return merged.values()

    def _snapshot(self) -> Snapshot:
        leases = tuple(self._leases())
        unreadable = {key for side in self._sides.values() for key in side.unreadable}
        return Snapshot(leases, frozenset(unreadable - {lease.key for lease in leases}))
