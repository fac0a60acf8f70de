"""Who wants what: the wanted state, kept lease by lease (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from flanneld.model import LeaseKey
from flanneld.state.resources import FdbEntry, Key, Kind, Resource, Vxlan

#: Ranks before every lease: what this node needs for itself.
LOCAL: LeaseKey = (None, None)

#: By key, the resources that were in force at some time, None for those that were not wanted.
Before = dict[Key, Resource | None]


class DesiredState:
    """The wanted state by key, with an owner for each resource.

    When two owners claim one key - cloned machines with one MAC - the lower subnet wins whatever the
    order in which they came, and the other takes over when the winner leaves.
    """

    def __init__(self) -> None:
        self.state: dict[Key, Resource] = {}
        self._holder: dict[Key, LeaseKey] = {}
        self._wishes: dict[LeaseKey, tuple[Resource, ...]] = {}
        #: Only for keys with several claims, winner included.
        self._rivals: dict[Key, dict[LeaseKey, Resource]] = {}

    def __contains__(self, owner: LeaseKey) -> bool:
        return owner in self._wishes

    def owners(self) -> Iterator[LeaseKey]:
        return iter(self._wishes)

    def wishes(self, owner: LeaseKey) -> tuple[Resource, ...]:
        return self._wishes.get(owner, ())

    def all_wishes(self) -> dict[LeaseKey, tuple[Resource, ...]]:
        """A copy, made in one step: from any thread."""
        return self._wishes.copy()

    def rivals(self) -> dict[Key, dict[LeaseKey, Resource]]:
        """The keys with several claims, and who claims what. A copy: from any thread."""
        return {key: claims.copy() for key, claims in self._rivals.copy().items()}

    def conflicts(self, owner: LeaseKey) -> Iterator[tuple[Resource, LeaseKey, LeaseKey]]:
        """What an owner wants and another one wants otherwise: the resource in force, its holder, the other.

        Two that want the same are at peace: a node that moved to a new lease, and its old one.
        """
        for resource in self._wishes.get(owner, ()) if self._rivals else ():
            key = resource.key
            claims = self._rivals.get(key)
            if claims:
                in_force = self.state[key]
                other = next((each for each in chain((owner,), claims) if claims[each] != in_force), None)
                if other is not None:
                    yield in_force, self._holder[key], other

    def set(self, owner: LeaseKey, resources: Iterable[Resource]) -> Before:
        """Replace all that an owner wants; an empty wish is a farewell. Returns what was in force before."""
        wish = tuple(resources)
        old = self._wishes.pop(owner, ())
        if wish:
            self._wishes[owner] = wish
        touched: Before = {}
        for resource in old:
            key = resource.key
            touched.setdefault(key, self.state.get(key))
            self._withdraw(owner, key)
        for resource in wish:
            key = resource.key
            touched.setdefault(key, self.state.get(key))
            self._claim(owner, key, resource)
        return touched

    def since(self, before: Before) -> tuple[list[Resource], list[Resource]]:
        """What the kernel must get and what it must lose, if it holds what was in force before."""
        puts, drops = [], []
        for key, was in before.items():
            now = self.state.get(key)
            if now is None and was is not None:
                drops.append(was)
            elif now is not None and now != was:
                puts.append(now)
        return puts, drops

    def cloned_device(self, owner: LeaseKey) -> Vxlan | None:
        """Return our VXLAN device whose MAC an owner's device has, too."""
        for resource in self._wishes.get(owner, ()):
            if isinstance(resource, FdbEntry):
                device = self.state.get((Kind.LINK, resource.device))
                if isinstance(device, Vxlan) and device.mac == resource.mac:
                    return device
        return None

    def _claim(self, owner: LeaseKey, key: Key, resource: Resource) -> None:
        holder = self._holder.get(key)
        if holder is None or holder == owner:
            self.state[key], self._holder[key] = resource, owner
            if key in self._rivals:
                self._rivals[key][owner] = resource
            return
        self._rivals.setdefault(key, {holder: self.state[key]})[owner] = resource
        if rank(owner) < rank(holder):
            self.state[key], self._holder[key] = resource, owner

    def _withdraw(self, owner: LeaseKey, key: Key) -> None:
        claims = self._rivals.get(key)
        if claims is None:
            if self._holder.get(key) == owner:
                del self.state[key], self._holder[key]
            return
        claims.pop(owner, None)
        if self._holder[key] == owner:
            winner = min(claims, key=rank)
            self.state[key], self._holder[key] = claims[winner], winner
        if len(claims) == 1:
            del self._rivals[key]


def rank(owner: LeaseKey) -> tuple[tuple[int, int], ...]:
    """Orders leases by their subnets; one without a subnet of a family comes first there."""
    return tuple((-1, -1) if net is None else (int(net.network_address), net.prefixlen) for net in owner)
