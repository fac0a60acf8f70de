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

    A lease with the cluster's subnet lengths precedes all others: a large subnet that was typed by hand must
    not cut off the nodes inside it. Among the others the lower subnet wins, as with equal keys. The result
    depends on the set of leases only.
    """

    def __init__(self, lengths: Mapping[Family, int]) -> None:
        self._lengths = lengths
        self._index = _Index()
        self._known: set[LeaseKey] = set()
        self._noted: set[LeaseKey] = set()
        #: By lease that is not followed, the lease that precedes it.
        self._winners: dict[LeaseKey, LeaseKey] = {}

    def note(self, key: LeaseKey, *, leads: bool) -> None:
        """Record whether a lease leads to a peer."""
        if (key in self._known) == leads:
            return
        self._noted.add(key)
        (self._known.add if leads else self._known.discard)(key)
        for net in key:
            if net is not None:
                (self._index.add if leads else self._index.discard)(net, key)

    def winner(self, key: LeaseKey) -> LeaseKey | None:
        """Return the lease that precedes this one, as of the last ``settle``; None if it is followed."""
        return self._winners.get(key)

    def settle(self) -> list[LeaseKey]:
        """Decide about the noted leases and those that overlap them. Return the changed decisions."""
        noted, self._noted = self._noted, set()
        changed: list[LeaseKey] = []
        if not self._index.is_nested and not self._winners:
            return changed
        affected = self._connected(noted)
        for key in sorted(affected, key=self._precedence):
            winner = self._find_winner(key, affected)
            if winner != self._winners.pop(key, None):
                changed.append(key)
            if winner is not None:
                self._winners[key] = winner
        return changed

    def _find_winner(self, key: LeaseKey, undecided: set[LeaseKey]) -> LeaseKey | None:
        """Return the first lease that precedes a lease and is followed; ``undecided`` loses this lease."""
        undecided.discard(key)
        if key not in self._known or not self._is_odd(key):
            return None
        followed = (
            each for each in self._index.around(key) if each not in undecided and each not in self._winners
        )
        return min(followed, key=self._precedence, default=None)

    def _connected(self, keys: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Return the leases about which a change of these decides, directly or through one another."""
        found = set(keys)
        left = list(found)
        while left:
            more = {each for each in self._index.around(left.pop()) if self._is_odd(each)} - found
            found |= more
            left += more
        return found

    def _is_odd(self, key: LeaseKey) -> bool:
        return any(net is not None and net.prefixlen != self._lengths.get(net.version) for net in key)

    def _precedence(self, key: LeaseKey) -> tuple[bool, tuple[tuple[int, ...], ...]]:
        return self._is_odd(key), rank(key)


class _Index:
    """Owners of networks, by family and number of host bits. In most clusters all have one length."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], dict[int, set[LeaseKey]]] = {}

    @property
    def is_nested(self) -> bool:
        """Return True if a network may lie inside another one: a family has several lengths."""
        return len(self._owners) > len({version for version, _ in self._owners})

    def add(self, net: IPNetwork, owner: LeaseKey) -> None:
        bits, prefix = _place(net)
        self._owners.setdefault((net.version, bits), {}).setdefault(prefix, set()).add(owner)

    def discard(self, net: IPNetwork, owner: LeaseKey) -> None:
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
            # The smaller of both sets is searched: all parts of the network, or all known prefixes.
            parts = range(own_prefix << more, (own_prefix + 1) << more)
            for prefix in owners if len(owners) < 1 << more else parts:
                if prefix >> more == own_prefix:
                    yield from owners.get(prefix, ())


def _place(net: IPNetwork) -> tuple[int, int]:
    bits = net.max_prefixlen - net.prefixlen
    return bits, int(net.network_address) >> bits
