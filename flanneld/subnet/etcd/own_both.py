"""Our own lease in two keyspaces, as the one that the keeper knows (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed
from flanneld.subnet.etcd.manager import node_address

#: An index of a keyspace takes so many bits in that of the whole.
_BITS = 64
_MASK = (1 << _BITS) - 1


class _Half(Struct, frozen=True, gc=False):
    """What one keyspace has of us: ``written`` when we did so last, ``asof`` when anybody did."""

    written: int = 0
    asof: int = 0
    is_there: bool = False
    expires: float | None = None


class OwnInBoth:
    """What is known of each half.

    A number of the whole, ``Lease.asof``, has the indices of all keyspaces in it. None of them ever goes
    back, so the whole grows with each thing that is heard. A half that is lost makes the whole end now,
    which has the keeper renew it: that puts the half back.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._halves = {name: _Half() for name in names}
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
            asof=self._join(),
        )

    def asof(self, name: str, whole: int) -> int:
        """The index of one keyspace in a number of the whole, or of our own last write if that is later."""
        return max(whole >> (_BITS * self._rank(name)) & _MASK, self._halves[name].written)

    def hear(self, name: str, event: Event, now: float) -> list[Event]:
        """What the watch of one keyspace tells, for the keeper. What we wrote ourselves is no news."""
        half = self._halves[name]
        match event:
            case Added(lease) if half.is_there:
                if lease.asof <= half.asof:
                    return []
                self._halves[name] = replace(half, asof=lease.asof, expires=lease.expires)
                return [Added(replace(self._ending(now), attrs=lease.attrs))]
            case Added(lease) if self._is_ours(lease) and lease.asof >= half.asof:
                # Somebody else has put it back, as a migration does.
                self._halves[name] = replace(half, asof=lease.asof, is_there=True, expires=lease.expires)
                same = lease.attrs == self._lease.attrs
                return [] if same else [Added(replace(self._ending(now), attrs=lease.attrs))]
            case Removed():
                self._halves[name] = replace(half, is_there=False)
        if self.is_gone:
            return [Removed(self._lease.key)]
        return [Added(self._ending(now))]

    def _is_ours(self, lease: Lease) -> bool:
        return node_address(lease.attrs) == node_address(self._lease.attrs)

    def _ending(self, now: float) -> Lease:
        """The whole; if a half is missing, it ends now."""
        whole = self.whole()
        return replace(whole, expires=now) if self.missing else whole

    def _rank(self, name: str) -> int:
        return list(self._halves).index(name)

    def _join(self) -> int:
        return sum(half.asof << (_BITS * self._rank(name)) for name, half in self._halves.items())
