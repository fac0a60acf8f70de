"""The distance from what the kernel holds to what it should hold (pure)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import replace

from flanneld.model import IPNetwork
from flanneld.state.resources import FdbEntry, Key, Kind, Neighbor, Resource, RivalRoute, Route, State
from flanneld.state.table import Claim, Put, Seen

_BY_KIND = attrgetter("kind")


class Plan(Struct, frozen=True):
    """What to make, in the order of making, then what to remove, in the order of removal.

    ``behind`` are routes that are as they should be, save that others to the same network come first.
    ``over`` names, for routes to make, the route of ours whose place they take; all others are made only
    where there is none. ``blocked`` are routes that cannot be made, each with what stands there.
    """

    puts: tuple[Resource, ...] = ()
    drops: tuple[Resource, ...] = ()
    behind: tuple[Route, ...] = ()
    over: State = field(default_factory=dict)
    blocked: tuple[tuple[Resource, Resource], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops or self.behind)

    def only(self, of: Callable[[Resource], bool]) -> Plan:
        """The part that concerns some of the resources, in the same order."""
        return replace(
            self,
            puts=tuple(filter(of, self.puts)),
            drops=tuple(filter(of, self.drops)),
            behind=tuple(filter(of, self.behind)),
        )


def plan(puts: Iterable[Resource], drops: Iterable[Resource], behind: Iterable[Route] = ()) -> Plan:
    """Put in order: foundations first, and removed last."""
    return Plan(
        tuple(sorted(puts, key=_BY_KIND)), tuple(sorted(drops, key=_BY_KIND, reverse=True)), tuple(behind)
    )


def compare(
    wanted: State, found: Iterable[tuple[Resource, bool]], ours: dict[Key, Resource] | None = None
) -> Plan:
    """The way from what is found, each with whether it is ours, to what is wanted.

    Takes what is found one by one and keeps nothing of what is right, so that the audit of a large
    cluster costs no second copy of it. A kernel may hold several IPv4 routes to one network, and takes
    the first: they have to be found in its order.

    ``ours`` are the routes that we made or took over, by key; those found to be ours are added. Where one of
    them was, a route of others took its place: it is replaced. Any other route of others stays.
    """
    ours = {} if ours is None else ours
    missing = set(wanted)
    stale: dict[Key, Resource] = {}
    there: dict[Key, Resource] = {}
    behind: list[Route] = []
    for resource, is_ours in found:
        key = resource.key
        want = wanted.get(key)
        if want is None:
            if is_ours:
                stale[key] = resource
        elif want == resource:
            missing.discard(key)
            if resource.kind is Kind.ROUTE:
                if is_ours:
                    ours[key] = want
                if _comes_after(there.get(key)) and key in ours and isinstance(want, Route):
                    behind.append(want)
        elif key in missing and key not in there and resource.kind is Kind.ROUTE:
            there[key] = resource
            if is_ours:
                ours[key] = resource
    # In the order of the wanted state, which is that of the leases.
    puts = [resource for key, resource in wanted.items() if key in missing] if missing else []
    taken = {key: route for key, route in there.items() if key in missing}
    over = {key: route for key, route in taken.items() if key in ours and not _is_connected(route)}
    blocked = tuple((wanted[key], route) for key, route in taken.items() if key not in over)
    may_be_made = [resource for resource in puts if resource.key not in taken or resource.key in over]
    return replace(plan(may_be_made if blocked else puts, stale.values(), behind), over=over, blocked=blocked)


def _comes_after(first: Resource | None) -> bool:
    """Whether a route that is right is not taken because of another one, which may be put behind it."""
    return first is not None and _may_come_first(first) and not _is_connected(first)


def _is_connected(resource: Resource) -> bool:
    return isinstance(resource, RivalRoute) and resource.is_connected


def _may_come_first(resource: Resource) -> bool:
    """Routes of IPv6 to one network with one metric are taken in turns, or ours replaces the first."""
    return isinstance(resource, Route | RivalRoute) and resource.key[1] == 4


def difference(wanted: State, found: Iterable[Seen]) -> tuple[list[Put], list[Resource]]:
    """Return what a table lacks, each with what is there instead, and what of ours has to go."""
    right: set[Key] = set()
    was: dict[Key, Resource] = {}
    stale: list[Resource] = []
    for seen in found:
        key = seen.resource.key
        want = wanted.get(key)
        if want is None:
            if seen.claim is not Claim.FOREIGN:
                stale.append(seen.resource)
        elif want == seen.resource:
            right.add(key)
        else:
            was[key] = seen.resource
    return [Put(want, was.get(key)) for key, want in wanted.items() if key not in right], stale


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
