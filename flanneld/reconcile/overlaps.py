"""Leases with overlapping subnets of different lengths: which of them the daemon follows (pure).

Equal subnets claim equal keys, so ``flanneld/state/desired_state.py`` decides about them. A subnet inside
another one has a key of its own, and no two places agree: a routing table prefers the smaller subnet,
WireGuard also drops what the larger one's peer sends from there, the udp proxy and XFRM take the older entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from flanneld.model import Family, IPNetwork, LeaseKey
from flanneld.state.desired_state import rank


class Overlaps:
    """Index of the leases that lead to a peer. Call ``note`` with every change, then ``settle``.

    ``lengths`` are those of this node's subnets, and of all others in most clusters. A lease with them
    precedes all others: a large subnet that was typed by hand must not cut off the nodes inside it. Among
    the others the lower subnet wins, as with equal keys. The result depends on the set of leases only.
    """

    def __init__(self, lengths: Mapping[Family, int]) -> None:
        self._lengths = lengths
        #: Leases with other lengths. Most clusters have none, and need no index of those with these lengths,
        #: which are always followed.
        self._odd = _Index()
        self._regular: _Index | None = None
        self._known: set[LeaseKey] = set()
        self._noted: list[LeaseKey] = []
        #: By lease that is not followed, one that precedes it.
        self._winners: dict[LeaseKey, LeaseKey] = {}

    def note(self, key: LeaseKey, *, leads: bool) -> None:
        """Record whether a lease leads to a peer."""
        if (key in self._known) == leads:
            return
        self._noted.append(key)
        (self._known.add if leads else self._known.discard)(key)
        index = self._odd if self._is_odd(key) else self._regular
        if index is not None:
            (index.add if leads else index.discard)(key)

    def winner(self, key: LeaseKey) -> LeaseKey | None:
        """Return a lease that precedes this one, as of the last ``settle``; None if it is followed."""
        return self._winners.get(key)

    def settle(self) -> list[LeaseKey]:
        """Decide about the noted leases and those that overlap them. Return the changed decisions."""
        noted, self._noted = self._noted, []
        if not self._odd and not self._winners:
            self._regular = None
            return []
        undecided = self._connected(noted)
        changed = []
        for key in sorted(undecided, key=rank):
            undecided.discard(key)
            winner = self._find_winner(key, undecided) if key in self._known else None
            if winner != self._winners.get(key):
                changed.append(key)
            self._winners.pop(key, None)
            if winner is not None:
                self._winners[key] = winner
        return changed

    def _find_winner(self, key: LeaseKey, undecided: set[LeaseKey]) -> LeaseKey | None:
        """Return a lease that precedes an odd one and is followed."""
        known = self._winners.get(key)
        if known in self._known and known is not None and not self._is_odd(known):
            return known  # No other change matters. A search would look at each subnet inside a large one.
        if self._regular is None:
            self._regular = _Index()
            for each in self._known:
                if not self._is_odd(each):
                    self._regular.add(each)
        followed = (
            each for each in self._odd.around(key) if each not in undecided and each not in self._winners
        )
        return min(self._regular.around(key), key=rank, default=None) or min(followed, key=rank, default=None)

    def _connected(self, keys: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Return the odd leases about which a change of these decides, directly or through one another."""
        found: set[LeaseKey] = set()
        left = set(keys)
        while left:
            key = left.pop()
            if self._is_odd(key):
                found.add(key)
            left.update(each for each in self._odd.around(key) if each not in found)
        return found

    def _is_odd(self, key: LeaseKey) -> bool:
        return any(net is not None and net.prefixlen != self._lengths.get(net.version) for net in key)


class _Index:
    """Leases by their subnets: family and number of host bits, then prefix."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], dict[int, set[LeaseKey]]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def add(self, owner: LeaseKey) -> None:
        for net in owner:
            if net is not None:
                bits, prefix = _place(net)
                self._owners.setdefault((net.version, bits), {}).setdefault(prefix, set()).add(owner)

    def discard(self, owner: LeaseKey) -> None:
        for net in owner:
            if net is not None:
                self._discard(net, owner)

    def _discard(self, net: IPNetwork, owner: LeaseKey) -> None:
        bits, prefix = _place(net)
        owners = self._owners[net.version, bits]
        owners[prefix].discard(owner)
        if not owners[prefix]:
            del owners[prefix]
        if not owners:
            del self._owners[net.version, bits]

    def around(self, key: LeaseKey) -> Iterator[LeaseKey]:
        """Yield the other leases with a subnet that contains one of these, or lies inside one."""
        for net in key:
            if net is not None:
                yield from (owner for owner in self._around(net) if owner != key)

    def _around(self, net: IPNetwork) -> Iterator[LeaseKey]:
        own_bits, own_prefix = _place(net)
        for (version, bits), owners in self._owners.items():
            if version != net.version or bits == own_bits:
                continue
            if bits > own_bits:
                yield from owners.get(own_prefix >> (bits - own_bits), ())
                continue
            more = own_bits - bits
            parts: Iterable[int] = range(own_prefix << more, (own_prefix + 1) << more)
            if len(owners) < 1 << more:
                parts = [prefix for prefix in owners if prefix >> more == own_prefix]
            for prefix in parts:
                yield from owners.get(prefix, ())


def _place(net: IPNetwork) -> tuple[int, int]:
    bits = net.max_prefixlen - net.prefixlen
    return bits, int(net.network_address) >> bits
