"""Desired state, indexed by owner, and its difference to a table's contents (pure)."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from itertools import chain
from typing import TypeVar

from msgspec import Struct

from flanneld.model import IPNetwork, LeaseKey
from flanneld.state.resources import LINKS, FdbEntry, Key, Neighbor, Resource, Route, State, Vxlan
from flanneld.state.table import Claim, Put, Seen

T = TypeVar("T")

#: Objects of a table that are compared before other work gets its turn, which takes 1 ms.
AT_ONCE = 256


class Delta(Struct, frozen=True, gc=False):
    """Resources to create and to remove, in any number of tables."""

    puts: tuple[Put, ...] = ()
    drops: tuple[Resource, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)


#: Objects to put, each with what is there instead, and our stale objects.
Difference = tuple[list[Put], list[Resource]]


def difference(desired: State, found: Iterable[Seen]) -> Difference:
    """Return the resources to put, each with what is there instead, and our stale resources.

    Resources to put are in the order of the desired state.
    """
    return finish(compare(desired, found))


def compare(
    desired: State, found: Iterable[Seen], changed: Collection[Key] = ()
) -> Generator[None, None, Difference]:
    """Return the ``difference``; yield in between, so that a large table delays no other work.

    ``desired`` may change meanwhile; ``changed`` are the keys that did, which are left out. ``found`` is
    consumed item by item and correct items are dropped, so that the audit of a large cluster needs no second
    copy.
    """
    missing = set(desired)
    there: dict[Key, Seen] = {}
    stale: list[Resource] = []
    for count, seen in enumerate(found, 1):
        key = seen.resource.key
        want = desired.get(key)
        if want is None:
            if seen.claim is not Claim.FOREIGN:
                stale.append(seen.resource)
        elif want == seen.resource:
            missing.discard(key)
        else:
            there[key] = seen
        if not count % AT_ONCE:
            yield
    missing.difference_update(changed)
    if changed:
        stale = [resource for resource in stale if resource.key not in changed]
    if not missing:
        return [], stale
    lacking = ((want, there.get(key)) for key, want in desired.items() if key in missing)
    return [Put(want, was.resource, was.claim) if was else Put(want) for want, was in lacking], stale


def finish(work: Generator[None, None, T]) -> T:
    """Do work that yields in between in one go."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def without_ways_to(
    subnets: Collection[IPNetwork], stale: Collection[Resource], macs: Collection[str] = ()
) -> tuple[Resource, ...]:
    """Return the stale resources except those that lead to these subnets, whose leases are unreadable.

    ``macs`` are the MACs of their VTEPs that no stale neighbour entry contains.
    """
    bases = {net.network_address for net in subnets}
    known = {*macs, *macs_of(subnets, stale)}

    def leads_there(item: Resource) -> bool:
        match item:
            case Route():
                return item.destination in subnets
            case Neighbor():
                return item.address in bases
            case FdbEntry():
                return item.mac in known
        # A backend's own resource may have a subnet.
        return getattr(item, "subnet", None) in subnets

    return tuple(item for item in stale if not leads_there(item))


def macs_of(subnets: Iterable[IPNetwork], resources: Iterable[Resource]) -> Iterator[str]:
    """Yield the MACs of these subnets' VTEPs in neighbour entries."""
    bases = {net.network_address for net in subnets}
    for item in resources:
        if isinstance(item, Neighbor) and item.address in bases:
            yield item.mac


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
        self._by_owner: dict[LeaseKey, tuple[Resource, ...]] = {}
        #: Only for keys with several claims, the winner's included.
        self._rivals: dict[Key, dict[LeaseKey, Resource]] = {}

    def __contains__(self, owner: LeaseKey) -> bool:
        return owner in self._by_owner

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
        return iter(self._by_owner)

    def of_owner(self, owner: LeaseKey) -> tuple[Resource, ...]:
        return self._by_owner.get(owner, ())

    def by_owner(self) -> dict[LeaseKey, tuple[Resource, ...]]:
        """Return a copy of the claims by owner. May be called from any thread."""
        return self._by_owner.copy()

    def rivals(self) -> dict[Key, dict[LeaseKey, Resource]]:
        """Return a copy of the keys with several claims, by owner. May be called from any thread."""
        return {key: claims.copy() for key, claims in self._rivals.copy().items()}

    def conflicts(self, owner: LeaseKey) -> Iterator[tuple[Resource, LeaseKey, LeaseKey]]:
        """Yield an owner's conflicts: the effective resource, its owner, and an owner with a different claim.

        Equal claims are no conflict, as those of a node's old and new lease.
        """
        for resource in self._by_owner.get(owner, ()) if self._rivals else ():
            key = resource.key
            claims = self._rivals.get(key)
            if claims:
                in_force = self.table(key[0])[key]
                other = next((each for each in chain((owner,), claims) if claims[each] != in_force), None)
                if other is not None and self._holder is not None:
                    yield in_force, self._holder[key], other

    def set(self, owner: LeaseKey, resources: Iterable[Resource]) -> Before:
        """Replace all claims of an owner; an empty set removes it. Return the resources effective before."""
        claims = tuple(resources)
        touched: Before = {}
        for resource in self._by_owner.pop(owner, ()):
            key = resource.key
            table = self.table(key[0])
            touched.setdefault(key, table.get(key))
            if self._holder is None:
                table.pop(key, None)
            else:
                self._withdraw(owner, key, self._holder)
        if claims:
            self._by_owner[owner] = claims
        for resource in claims:
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
        for resource in self._by_owner.get(owner, ()):
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
            for owner, claims in self._by_owner.items():
                for resource in claims:
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
