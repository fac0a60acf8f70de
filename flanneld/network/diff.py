"""The distance from what the kernel holds to what it should hold (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

from flanneld.model import IPNetwork
from flanneld.network.resources import FdbEntry, Key, Neighbor, Resource, RivalRoute, Route, State

_BY_KIND = attrgetter("kind")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make, in the order of making, then what to remove, in the order of removal.

    ``behind`` are routes that are as they should be, save that others to the same network come first.
    """

    puts: tuple[Resource, ...] = ()
    drops: tuple[Resource, ...] = ()
    behind: tuple[Route, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops or self.behind)

    def only(self, of: Callable[[Resource], bool]) -> Plan:
        """The part that concerns some of the resources, in the same order."""
        return Plan(
            tuple(filter(of, self.puts)), tuple(filter(of, self.drops)), tuple(filter(of, self.behind))
        )


def plan(puts: Iterable[Resource], drops: Iterable[Resource], behind: Iterable[Route] = ()) -> Plan:
    """Put in order: foundations first, and removed last."""
    return Plan(
        tuple(sorted(puts, key=_BY_KIND)), tuple(sorted(drops, key=_BY_KIND, reverse=True)), tuple(behind)
    )


def compare(wanted: State, found: Iterable[tuple[Resource, bool]]) -> Plan:
    """The way from what is found, each with whether it is ours, to what is wanted.

    Takes what is found one by one and keeps nothing of what is right, so that the audit of a large
    cluster costs no second copy of it. A kernel may hold several IPv4 routes to one network, and takes
    the first: they have to be found in its order.
    """
    missing = set(wanted)
    stale: dict[Key, Resource] = {}
    rivals: set[Key] = set()
    behind: list[Route] = []
    for resource, ours in found:
        key = resource.key
        want = wanted.get(key)
        if want is None:
            if ours:
                stale[key] = resource
        elif want == resource:
            missing.discard(key)
            if key in rivals and isinstance(want, Route):
                behind.append(want)
        elif key in missing and _may_come_first(resource):
            rivals.add(key)
    # In the order of the wanted state, which is that of the leases.
    puts = [resource for key, resource in wanted.items() if key in missing] if missing else []
    return plan(puts, stale.values(), behind)


def _may_come_first(resource: Resource) -> bool:
    """Routes of IPv6 to one network with one metric are taken in turns, or ours replaces the first."""
    return isinstance(resource, Route | RivalRoute) and resource.key[1] == 4


def diff(wanted: State, actual: State) -> Plan:
    """The same for what is all ours."""
    return compare(wanted, ((resource, True) for resource in actual.values()))


def without_ways_to(subnets: Collection[IPNetwork], stale: Collection[Resource]) -> tuple[Resource, ...]:
    """What is stale, less what leads to these subnets: nobody knows whether that is right."""
    bases = {net.network_address for net in subnets}
    macs = {item.mac for item in stale if isinstance(item, Neighbor) and item.address in bases}

    def leads_there(item: Resource) -> bool:
        match item:
            case Route():
                return item.destination in subnets
            case Neighbor():
                return item.address in bases
            case FdbEntry():
                return item.mac in macs
        # What a driver moves may say so.
        return getattr(item, "subnet", None) in subnets

    return tuple(item for item in stale if not leads_there(item))
