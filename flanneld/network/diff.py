"""The distance from what the kernel holds to what it should hold (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

from flanneld.model import IPNetwork
from flanneld.network.resources import FdbEntry, Key, Neighbor, Resource, Route, State

_BY_KIND = attrgetter("kind")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make, in the order of making, then what to remove, in the order of removal."""

    puts: tuple[Resource, ...] = ()
    drops: tuple[Resource, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)

    def only(self, of: Callable[[Resource], bool]) -> Plan:
        """The part that concerns some of the resources, in the same order."""
        return Plan(tuple(filter(of, self.puts)), tuple(filter(of, self.drops)))


def plan(puts: Iterable[Resource], drops: Iterable[Resource]) -> Plan:
    """Put in order: foundations first, and removed last."""
    return Plan(tuple(sorted(puts, key=_BY_KIND)), tuple(sorted(drops, key=_BY_KIND, reverse=True)))


def diff(wanted: State, actual: State) -> Plan:
    """All of ``actual`` that is not wanted goes: leave out of it what is not ours."""
    return plan(
        (resource for key, resource in wanted.items() if actual.get(key) != resource),
        (resource for key, resource in actual.items() if key not in wanted),
    )


def without_ways_to(subnets: Collection[IPNetwork], actual: State) -> dict[Key, Resource]:
    """What there is, less what leads to these subnets: nobody knows whether that is right."""
    bases = {net.network_address for net in subnets}
    macs = {item.mac for item in actual.values() if isinstance(item, Neighbor) and item.address in bases}

    def leads_there(item: Resource) -> bool:
        match item:
            case Route():
                return item.destination in subnets
            case Neighbor():
                return item.address in bases
            case FdbEntry():
                return item.mac in macs
        return False

    return {key: item for key, item in actual.items() if not leads_there(item)}
