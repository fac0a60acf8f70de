"""Union of the leases in several etcd APIs: those of peers, and our own (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import (
    Added,
    Event,
    Lease,
    LeaseAttrs,
    LeaseKey,
    LeaseTable,
    Removed,
    Snapshot,
    is_same_node,
)
from flanneld.subnet.store import IsSelf

#: Bits per API in the combined index of a lease.
_BITS = 64


class LeaseUnion:
    """Union of the leases in several APIs, named in order of precedence.

    A lease exists if any API has it, and is removed once all have lost it. If several have it, the first
    one's counts, in any order of events. An unreadable lease keeps its previous state.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._sides = {name: LeaseTable(own=(None, None)) for name in names}

    def fold(self, name: str, event: Event) -> list[Event]:
        """Apply an event of one API and return the events of the union.

        Until each API has delivered a ``Snapshot``, the union yields none and removes nothing. An API that
        could not be read yet may have the lease.
        """
        self._sides[name].apply(event)
        synced = all(side.synced for side in self._sides.values())
        match event:
            case Added(lease):
                return [Added(self._found(lease.key)[0])]
            case Removed(key):
                if found := self._found(key):
                    return [Added(found[0])]
                return [Removed(key)] if synced and key not in self._unreadable() else []
        leases = self._leases()
        if synced:
            return [Snapshot(tuple(leases.values()), self._unreadable() - leases.keys())]
        return [Added(lease) for lease in leases.values()]

    def disputes(self) -> Iterator[tuple[Lease, Lease]]:
        """Yield the leases that two APIs assign to different nodes, as pairs with the effective one first."""
        for found in map(self._found, self._leases()):
            if len({each.attrs.public_ips for each in found}) > 1:
                yield found[0], found[1]

    def _found(self, key: LeaseKey) -> list[Lease]:
        """Return a lease in each API that has it, the effective one first."""
        return [lease for side in self._sides.values() if (lease := side.get(key))]

    def _leases(self) -> dict[LeaseKey, Lease]:
        return {lease.key: lease for side in reversed(self._sides.values()) for lease in side}

    def _unreadable(self) -> frozenset[LeaseKey]:
        return frozenset[LeaseKey]().union(*(side.unreadable for side in self._sides.values()))


class _Half(Struct, frozen=True, gc=False):
    """Our lease in one API. ``written`` is the index of our last write, ``asof`` of anyone's last write."""

    written: int = 0
    asof: int = 0
    is_there: bool = False
    expires: float | None = None


class OwnInBoth:
    """Our own lease in several APIs, combined into the one that the lease keeper maintains.

    ``Lease.asof`` of the combined lease contains the indices of all APIs. Each only grows, so the whole grows
    with every event. If a half is lost the combined lease ends now, so that the keeper renews it, which
    restores the half.
    """

    def __init__(self, names: Iterable[str], is_self: IsSelf = is_same_node) -> None:
        self._is_self = is_self
        self._halves = {name: _Half() for name in names}
        self._shifts = {name: _BITS * rank for rank, name in enumerate(self._halves)}
        self._lease = Lease(LeaseAttrs())

    @property
    def is_reserved(self) -> bool:
        return any(half.is_there and half.expires is None for half in self._halves.values())

    @property
    def missing(self) -> int:
        """Count of APIs that lack our lease."""
        return sum(not half.is_there for half in self._halves.values())

    @property
    def is_gone(self) -> bool:
        return self.missing == len(self._halves)

    def ends(self, name: str) -> float | None:
        """Return when our lease in one API expires, as in ``Lease``; minus infinity if it is missing."""
        half = self._halves[name]
        return half.expires if half.is_there else float("-inf")

    def has_written(self, name: str) -> bool:
        """Return True if this run has written our lease in one API."""
        return self._halves[name].written > 0

    def written(self, name: str, lease: Lease) -> None:
        """Record that we wrote our lease in one API."""
        self._halves[name] = _Half(lease.asof, lease.asof, is_there=True, expires=lease.expires)
        self._lease = lease

    def whole(self) -> Lease:
        """Return the combined lease. It expires with the first of the existing halves."""
        ends = [half.expires for half in self._halves.values() if half.is_there]
        return replace(
            self._lease,
            expires=min((end for end in ends if end is not None), default=None),
            asof=sum(half.asof << self._shifts[name] for name, half in self._halves.items()),
        )

    def asof(self, name: str, whole: int) -> int:
        """Return one API's index from a combined one, or the index of our own last write if that is later."""
        return max(whole >> self._shifts[name] & ((1 << _BITS) - 1), self._halves[name].written)

    def hear(self, name: str, event: Event, now: float) -> list[Event]:
        """Apply a watch event of one API and return the keeper's events. Our own writes yield none."""
        half = self._halves[name]
        match event:
            case Added(lease) if half.is_there:
                if lease.asof <= half.asof:
                    # Older than what we know and another: late news, or a store restored from a backup.
                    same = lease.attrs == self._lease.attrs
                    return [] if same else [Added(replace(self._ending(now), attrs=lease.attrs))]
                self._halves[name] = replace(half, asof=lease.asof, expires=lease.expires)
                return [Added(replace(self._ending(now), attrs=lease.attrs))]
            case Added(lease) if self._is_ours(lease) and lease.asof >= half.asof:
                # Another program restored it, as a migration does.
                self._halves[name] = replace(half, asof=lease.asof, is_there=True, expires=lease.expires)
                same = lease.attrs == self._lease.attrs
                return [] if same else [Added(replace(self._ending(now), attrs=lease.attrs))]
            case Removed():
                self._halves[name] = replace(half, is_there=False)
        return [Removed(self._lease.key)] if self.is_gone else [Added(self._ending(now))]

    def _is_ours(self, lease: Lease) -> bool:
        return self._is_self(lease.attrs, self._lease.attrs)

    def _ending(self, now: float) -> Lease:
        """Return the combined lease. It expires now if a half is missing."""
        whole = self.whole()
        return replace(whole, expires=now) if self.missing else whole
