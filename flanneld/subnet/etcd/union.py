"""The leases in several APIs of etcd as those of one: the peers', and our own (pure)."""

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
from flanneld.subnet.manager import IsSelf

#: An index of one API takes so many bits in that of the whole lease.
_BITS = 64


class LeaseUnion:
    """The leases of several sides as those of one. The names of the sides are in their rank.

    A lease is there if one side has it; it is gone when all have said so. If several have it, the first
    side's word counts, whatever came when. An unreadable lease stays what it was.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._sides = {name: LeaseTable(own=(None, None)) for name in names}

    def fold(self, name: str, event: Event) -> list[Event]:
        """What an event of one side means for the whole.

        Until each side has delivered a ``Snapshot`` there is none of the whole, and nothing is gone: a
        side that nobody could read yet may have it.
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
        """The leases that two sides give to different nodes, each time first the one that counts."""
        for found in map(self._found, self._leases()):
            if len({(each.attrs.public_ip, each.attrs.public_ipv6) for each in found}) > 1:
                yield found[0], found[1]

    def _found(self, key: LeaseKey) -> list[Lease]:
        """A lease as each side has it that does, first the one that counts."""
        return [lease for side in self._sides.values() if (lease := side.get(key))]

    def _leases(self) -> dict[LeaseKey, Lease]:
        return {lease.key: lease for side in reversed(self._sides.values()) for lease in side}

    def _unreadable(self) -> frozenset[LeaseKey]:
        return frozenset[LeaseKey]().union(*(side.unreadable for side in self._sides.values()))


class _Half(Struct, frozen=True, gc=False):
    """Our lease in one API: ``written`` is when we wrote it last, ``asof`` when anybody did."""

    written: int = 0
    asof: int = 0
    is_there: bool = False
    expires: float | None = None


class OwnInBoth:
    """Our own lease in several APIs, as the one that the lease keeper knows.

    A number of the whole, ``Lease.asof``, has the indices of all APIs in it. None of them ever goes
    back, so the whole grows with each thing that is heard. A half that is lost makes the whole end now,
    which has the keeper renew it: that puts the half back.
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
        """How many halves are not there."""
        return sum(not half.is_there for half in self._halves.values())

    @property
    def is_gone(self) -> bool:
        return self.missing == len(self._halves)

    def ends(self, name: str) -> float | None:
        """When that half ends, as in ``Lease``; minus infinity if it is not there."""
        half = self._halves[name]
        return half.expires if half.is_there else float("-inf")

    def written(self, name: str, lease: Lease) -> None:
        """We have written that half."""
        self._halves[name] = _Half(lease.asof, lease.asof, is_there=True, expires=lease.expires)
        self._lease = lease

    def whole(self) -> Lease:
        """The lease, which lasts as long as the half that ends first of those that are there."""
        ends = [half.expires for half in self._halves.values() if half.is_there]
        return replace(
            self._lease,
            expires=min((end for end in ends if end is not None), default=None),
            asof=sum(half.asof << self._shifts[name] for name, half in self._halves.items()),
        )

    def asof(self, name: str, whole: int) -> int:
        """The index of one API in a number of the whole, or of our own last write if that is later."""
        return max(whole >> self._shifts[name] & ((1 << _BITS) - 1), self._halves[name].written)

    def hear(self, name: str, event: Event, now: float) -> list[Event]:
        """What the watch of one API tells, for the keeper. What we wrote ourselves is no news."""
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
                # Somebody else has put it back, as a migration does.
                self._halves[name] = replace(half, asof=lease.asof, is_there=True, expires=lease.expires)
                same = lease.attrs == self._lease.attrs
                return [] if same else [Added(replace(self._ending(now), attrs=lease.attrs))]
            case Removed():
                self._halves[name] = replace(half, is_there=False)
        return [Removed(self._lease.key)] if self.is_gone else [Added(self._ending(now))]

    def _is_ours(self, lease: Lease) -> bool:
        return self._is_self(lease.attrs, self._lease.attrs)

    def _ending(self, now: float) -> Lease:
        """The whole; if a half is missing, it ends now."""
        whole = self.whole()
        return replace(whole, expires=now) if self.missing else whole
