"""Desired state, indexed by owner (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from flanneld.model import LeaseKey
from flanneld.state.diff import Delta
from flanneld.state.resources import LINKS, FdbEntry, Key, Resource, Vxlan
from flanneld.state.table import Put

#: Owner of this node's own resources. It ranks before every lease.
LOCAL: LeaseKey = (None, None)

#: By key, the effective resource at an earlier time, None if there was none.
Before = dict[Key, Resource | None]


class DesiredState:
    """Desired state by table and key, with an owner for each resource.

    If two owners claim one key, as cloned machines with one MAC do, the lower subnet wins in any order of
    arrival. The other takes over when the winner leaves.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[Key, Resource]] = {}
        #: Owners of the effective resources, once a key has several claims. Before, no key needs its owner.
        self._holder: dict[Key, LeaseKey] | None = None
        self._wishes: dict[LeaseKey, tuple[Resource, ...]] = {}
        #: Only for keys with several claims, the winner's included.
        self._rivals: dict[Key, dict[LeaseKey, Resource]] = {}

    def __contains__(self, owner: LeaseKey) -> bool:
        return owner in self._wishes

    @property
    def state(self) -> dict[Key, Resource]:
        """Return a copy of all effective resources. May be called from any thread."""
        return dict(chain.from_iterable(table.copy().items() for table in self._tables.copy().values()))

    def table(self, name: object) -> dict[Key, Resource]:
        """Return the desired state of one table: a live mapping, not a copy."""
        assert isinstance(name, str)
        found = self._tables.get(name)
        if found is None:
            found = self._tables[name] = {}
        return found

    def get(self, key: Key) -> Resource | None:
        """Return the effective resource of a key."""
        return self.table(key[0]).get(key)

    def owners(self) -> Iterator[LeaseKey]:
        return iter(self._wishes)

    def of_owner(self, owner: LeaseKey) -> tuple[Resource, ...]:
        return self._wishes.get(owner, ())

    def by_owner(self) -> dict[LeaseKey, tuple[Resource, ...]]:
        """Return a copy of the claims by owner. May be called from any thread."""
        return self._wishes.copy()

    def rivals(self) -> dict[Key, dict[LeaseKey, Resource]]:
        """Return a copy of the keys with several claims, by owner. May be called from any thread."""
        return {key: claims.copy() for key, claims in self._rivals.copy().items()}

    def conflicts(self, owner: LeaseKey) -> Iterator[tuple[Resource, LeaseKey, LeaseKey]]:
        """Yield an owner's conflicts: the effective resource, its owner, and an owner with a different claim.

        Equal claims are no conflict, as those of a node's old and new lease.
        """
        for resource in self._wishes.get(owner, ()) if self._rivals else ():
            key = resource.key
            claims = self._rivals.get(key)
            if claims:
                in_force = self.table(key[0])[key]
                other = next((each for each in chain((owner,), claims) if claims[each] != in_force), None)
                if other is not None and self._holder is not None:
                    yield in_force, self._holder[key], other

    def set(self, owner: LeaseKey, resources: Iterable[Resource]) -> Before:
        """Replace all claims of an owner; an empty set removes it. Return the resources effective before."""
        wish = tuple(resources)
        touched: Before = {}
        for resource in self._wishes.pop(owner, ()):
            key = resource.key
            table = self.table(key[0])
            touched.setdefault(key, table.get(key))
            if self._holder is None:
                table.pop(key, None)
            else:
                self._withdraw(owner, key, self._holder)
        if wish:
            self._wishes[owner] = wish
        for resource in wish:
            key = resource.key
            table = self.table(key[0])
            was = table.get(key)
            touched.setdefault(key, was)
            if was is not None:
                self._contest(owner, key, resource)
                continue
            table[key] = resource
            if self._holder is not None:
                self._holder[key] = owner
        return touched

    def since(self, before: Before) -> Delta:
        """Return the changes to tables that hold the resources effective before."""
        puts, drops = [], []
        for key, was in before.items():
            now = self.get(key)
            if now is None and was is not None:
                drops.append(was)
            elif now is not None and now != was:
                puts.append(Put(now, was))
        return Delta(tuple(puts), tuple(drops))

    def cloned_device(self, owner: LeaseKey) -> Vxlan | None:
        """Return our VXLAN device if an owner's device has the same MAC, else None."""
        for resource in self._wishes.get(owner, ()):
            if isinstance(resource, FdbEntry):
                device = self.get((LINKS, resource.device))
                if isinstance(device, Vxlan) and device.mac == resource.mac:
                    return device
        return None

    def _holders(self) -> dict[Key, LeaseKey]:
        """Return the owners by key. They are indexed at the first contest, which most clusters never have."""
        if self._holder is None:
            self._holder = {}
            # The owner whose claims are being added comes last.
            for owner, wish in self._wishes.items():
                for resource in wish:
                    self._holder.setdefault(resource.key, owner)
        return self._holder

    def _contest(self, owner: LeaseKey, key: Key, resource: Resource) -> None:
        """Claim a key that has an effective resource already."""
        holders = self._holders()
        holder = holders.get(key, owner)
        table = self.table(key[0])
        if holder == owner:
            table[key], holders[key] = resource, owner
            if key in self._rivals:
                self._rivals[key][owner] = resource
            return
        self._rivals.setdefault(key, {holder: table[key]})[owner] = resource
        if rank(owner) < rank(holder):
            table[key], holders[key] = resource, owner

    def _withdraw(self, owner: LeaseKey, key: Key, holders: dict[Key, LeaseKey]) -> None:
        claims = self._rivals.get(key)
        table = self.table(key[0])
        if claims is None:
            if holders.get(key) == owner:
                del table[key], holders[key]
            return
        claims.pop(owner, None)
        if holders[key] == owner:
            winner = min(claims, key=rank)
            table[key], holders[key] = claims[winner], winner
        if len(claims) == 1:
            del self._rivals[key]


def rank(owner: LeaseKey) -> tuple[tuple[int, ...], ...]:
    """Return a sort key of leases by their subnets. One without a subnet of a family comes first."""
    return tuple(() if net is None else (int(net.network_address), net.prefixlen) for net in owner)
