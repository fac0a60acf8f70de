"""The distance from what the kernel holds to what it should hold (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from flanneld.network.resources import Resource, State

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
