"""Difference between a table's contents and its desired state (pure)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from flanneld.model import IPNetwork
from flanneld.state.resources import FdbEntry, Key, Neighbor, Resource, Route, State
from flanneld.state.table import Claim, Put, Seen


class Delta(Struct, frozen=True, gc=False):
    """Resources to create and to remove, in any number of tables."""

    puts: tuple[Put, ...] = ()
    drops: tuple[Resource, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)


def difference(desired: State, found: Iterable[Seen]) -> tuple[list[Put], list[Resource]]:
    """Return the resources to put, each with what is there instead, and our stale resources.

    ``found`` is consumed item by item and correct items are dropped, so that the audit of a large cluster
    needs no second copy. Resources to put are in the order of the desired state.
    """
    missing = set(desired)
    there: dict[Key, Seen] = {}
    stale: list[Resource] = []
    for seen in found:
        key = seen.resource.key
        want = desired.get(key)
        if want is None:
            if seen.claim is not Claim.FOREIGN:
                stale.append(seen.resource)
        elif want == seen.resource:
            missing.discard(key)
        else:
            there[key] = seen
    if not missing:
        return [], stale
    lacking = ((want, there.get(key)) for key, want in desired.items() if key in missing)
    return [Put(want, was.resource, was.claim) if was else Put(want) for want, was in lacking], stale


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
