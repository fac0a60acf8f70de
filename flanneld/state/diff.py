"""Difference between a table's contents and its desired state (pure)."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator
from typing import TypeVar

from msgspec import Struct

from flanneld.model import IPNetwork
from flanneld.state.resources import FdbEntry, Key, Neighbor, Resource, Route, State
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
