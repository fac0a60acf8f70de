"""Rules for leases that harm this host or overlap another: which leases are followed (pure).

Both rules depend on the host's networks and on the set of leases, never on the order of events.

- Safety: a lease must cause no loop, and take over none of the host's own networks. Of a lease and another
  with a public IP inside its subnet, the one that the store created first is followed; if that is unknown,
  the one with the subnet. What this host needs itself precedes both. The cost of one check does not depend on
  the number of leases, but on that of public IPs inside one subnet.
- Overlap: equal subnets claim equal keys, so ``flanneld/state/desired.py`` decides about them. A subnet
  inside another one has a key of its own, and no two places agree: a routing table prefers the smaller
  subnet, WireGuard also drops what the larger one's peer sends from there, the udp proxy and XFRM take the
  older entry.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter

from flanneld.errors import LEASES_END, Unsafe
from flanneld.model import (
    FAMILIES,
    Family,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseKey,
    family_of,
    lies_in,
    overlap,
)
from flanneld.network.obstacles import Obstacles, concerns
from flanneld.state.desired import rank

_NUMBER = itemgetter(0)


class LeaseSafety:
    """Index of leases and host networks. Call ``update`` with every change, then ``harm`` for a lease.

    ``lease_of`` returns a peer's lease as of the last change.
    """

    def __init__(
        self, own: Lease, networks: Iterable[IPNetwork], lease_of: Callable[[LeaseKey], Lease | None]
    ) -> None:
        self.obstacles = Obstacles()
        self._own = own
        self._lease_of = lease_of
        self._own_nets = tuple(net for net in own.key if net is not None)
        self._networks = tuple(networks)
        #: Routed subnets: those of leases that no network of the host makes unsafe.
        self._led = _Prefixes()
        self._led_keys: set[LeaseKey] = set()
        #: Public IPs inside the cluster's networks. Most clusters have none.
        self._inside = _Addresses()
        self._inside_keys: dict[LeaseKey, tuple[IPAddress, ...]] = {}
        #: Leases whose subnets are or were around one of them. Few of these clusters have any.
        self._surrounding: set[LeaseKey] = set()
        for net in self._own_nets:
            self._led.add(net, own.key)

    def concerns(self, net: IPNetwork) -> bool:
        """Return True if a host's route to this network can change a decision."""
        return concerns(net, self._networks, self._own_nets)

    def look(self, obstacles: Obstacles, leases: Iterable[Lease]) -> None:
        """Replace the facts of the host. Any decision may change by that."""
        self.obstacles = obstacles
        for lease in leases:
            if self._lead(lease.key, desired=self._is_led(lease.key)) and self._inside_of(lease.key):
                self._surrounding.add(lease.key)

    def update(self, put: Iterable[Lease], gone: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Apply a change of leases. Return the keys of leases whose decision may change."""
        affected: set[LeaseKey] = set()
        for key in gone:
            self._lead(key, desired=False)
            affected.update(self._place(key, ()), self._inside_of(key))
            self._surrounding.discard(key)
        for lease in put:
            key = lease.key
            self._lead(key, desired=self._is_led(key))
            around, inside = self._place(key, self._publics_inside(lease)), self._inside_of(key)
            if around or inside:
                affected.update(around, inside)
                self._surrounding.update(around, (key,) if inside else ())
        return affected

    def is_led(self, key: LeaseKey) -> bool:
        """Return True if a known lease is inside the networks, beside our own, and harms none of the host."""
        return key in self._led_keys

    def harm(self, lease: Lease) -> Unsafe | None:
        """Return the reason why a lease is unsafe, None if it is safe."""
        key = lease.key
        for net in () if key in self._led_keys else key:
            obstacle = self.obstacles.in_subnet(net) if net is not None else None
            if obstacle is not None:
                whose = "the store's address" if obstacle.what == "store" else "this host's own addresses"
                return Unsafe(str(obstacle), f"move {whose} out of {net}; {LEASES_END}")
        for family in FAMILIES:
            public_ip = lease.attrs.public(family)
            # A backend explains a conflict with our own lease better.
            if public_ip is None or lease.net(family) is None or public_ip == self._own.attrs.public(family):
                continue
            if taken_for := self._taken_for(lease, public_ip):
                return Unsafe(
                    f"it announces {public_ip}, {taken_for}",
                    f"give that node its own --public-ip; {LEASES_END}",
                )
        return self._harm_to_older(lease) if key in self._surrounding else None

    def _harm_to_older(self, lease: Lease) -> Unsafe | None:
        for family in FAMILIES:
            net = lease.net(family)
            for key in self._inside.owners(net) if net is not None else ():
                older = self._lease_of(key) if key in self._led_keys else None
                if older is not None and older.net(family) is not None and _is_older(older, lease):
                    public_ip = older.attrs.public(family)
                    return Unsafe(
                        f"its subnet {net} is around {public_ip}, the public IP of the older lease {older}",
                        f"give its node another subnet; {LEASES_END}",
                    )
        return None

    def is_reachable(self, lease: Lease) -> bool:
        """Return False if packets to a public IP of the lease would come back or go to all hosts."""
        return not any(
            self._taken_for(lease, ip) for family in FAMILIES if (ip := lease.attrs.public(family))
        )

    def _taken_for(self, lease: Lease, public_ip: IPAddress) -> str:
        if here := self.obstacles.at(public_ip):
            return here
        for key in self._led.around(public_ip):
            # Our own lease is no peer's: this host delivers to its subnet itself, whatever the order.
            around = self._lease_of(key)
            if around is None or not _is_older(lease, around):
                return f"which lies in the leased subnet {key[FAMILIES.index(family_of(public_ip))]}"
        return ""

    def _is_led(self, key: LeaseKey) -> bool:
        """Return True unless the subnets of a lease are refused themselves."""
        # Loops, since generators would take half of the time of a start.
        for net in key:
            if net is None:
                continue
            if self.obstacles.in_subnet(net) is not None:
                return False
            for ours in self._own_nets:
                if overlap(net, ours):
                    return False
            for network in self._networks:
                if lies_in(net, network):
                    break
            else:
                return False
        return True

    def _lead(self, key: LeaseKey, *, desired: bool) -> bool:
        """Count or discount a lease's subnets. Return True if that changes anything."""
        if (key in self._led_keys) == desired:
            return False
        (self._led_keys.add if desired else self._led_keys.discard)(key)
        for net in key:
            if net is not None:
                (self._led.add if desired else self._led.discard)(net, key)
        return True

    def _inside_of(self, key: LeaseKey) -> Iterable[LeaseKey]:
        """Return the leases whose public IPs are in a lease's subnets."""
        if not self._inside_keys:
            return ()
        return [owner for net in key if net is not None for owner in self._inside.owners(net)]

    def _publics_inside(self, lease: Lease) -> tuple[IPAddress, ...]:
        attrs = lease.attrs
        found: list[IPAddress] = []
        for ip in (attrs.public_ip, attrs.public_ipv6):
            if ip is not None:
                for network in self._networks:
                    if ip in network:
                        found.append(ip)
                        break
        return tuple(found)

    def _place(self, key: LeaseKey, addresses: tuple[IPAddress, ...]) -> Iterable[LeaseKey]:
        """Note a lease's public IPs inside. Return the leases around these, and around its former ones."""
        if not (addresses or self._inside_keys):
            return ()
        former = self._inside_keys.pop(key, ())
        for address in former:
            self._inside.discard(address, key)
        for address in addresses:
            self._inside.add(address, key)
        if addresses:
            self._inside_keys[key] = addresses
        return [owner for address in (*former, *addresses) for owner in self._led.around(address)]


class _Prefixes:
    """Networks with their owners, for longest prefix match."""

    def __init__(self) -> None:
        #: Owners by family and number of host bits, then prefix. In most clusters all subnets have one
        #: length, and one owner each: a list holds several.
        self._owners: dict[tuple[int, int], dict[int, LeaseKey | list[LeaseKey]]] = {}

    def add(self, net: IPNetwork, owner: LeaseKey) -> None:
        place, number = _place(net)
        owners = self._owners.setdefault(place, {})
        known = owners.get(number)
        owners[number] = owner if known is None else [*_listed(known), owner]

    def discard(self, net: IPNetwork, owner: LeaseKey) -> None:
        place, number = _place(net)
        owners = self._owners[place]
        if left := [each for each in _listed(owners[number]) if each != owner]:
            owners[number] = left
        else:
            del owners[number]

    def around(self, address: IPAddress) -> list[LeaseKey]:
        """Return the owners of the prefixes around an address, the longest first: it decides the route."""
        number = int(address)
        found = [
            (bits, owners[number >> bits])
            for (version, bits), owners in self._owners.items()
            if version == address.version and number >> bits in owners
        ]
        return [owner for _, known in sorted(found, key=_NUMBER) for owner in _listed(known)] if found else []


class _Addresses:
    """Sorted addresses with their owners: those inside a network are neighbours in the list."""

    def __init__(self) -> None:
        self._sorted: dict[int, list[tuple[int, LeaseKey]]] = {4: [], 6: []}

    def add(self, address: IPAddress, owner: LeaseKey) -> None:
        insort(self._sorted[address.version], (int(address), owner), key=_NUMBER)

    def discard(self, address: IPAddress, owner: LeaseKey) -> None:
        self._sorted[address.version].remove((int(address), owner))

    def owners(self, net: IPNetwork) -> Iterator[LeaseKey]:
        entries = self._sorted[net.version]
        # Not broadcast_address: a network keeps it, and there are as many networks as leases.
        last = int(net.network_address) | ((1 << (net.max_prefixlen - net.prefixlen)) - 1)
        for place in range(bisect_left(entries, int(net.network_address), key=_NUMBER), len(entries)):
            if entries[place][0] > last:
                return
            yield entries[place][1]


def _listed(owners: LeaseKey | list[LeaseKey]) -> list[LeaseKey]:
    return owners if isinstance(owners, list) else [owners]


def _is_older(one: Lease, other: Lease) -> bool:
    """Return True if the store created one lease before another; False if that is unknown."""
    return 0 < one.created < other.created


def _place(net: IPNetwork) -> tuple[tuple[int, int], int]:
    bits = net.max_prefixlen - net.prefixlen
    return (net.version, bits), int(net.network_address) >> bits


class Overlaps:
    """Index of the leases that lead to a peer. Call ``note`` with every change, then ``settle``.

    ``lengths`` are those of this node's subnets, and of all others in most clusters. A lease with them
    precedes all others: a large subnet that was typed by hand must not cut off the nodes inside it. Among
    the others the lower subnet wins, as with equal keys. The result depends on the set of leases only.
    """

    def __init__(self, lengths: Mapping[Family, int]) -> None:
        self._lengths = lengths
        #: Leases with other lengths. Most clusters have none, and need no index of those with these lengths,
        #: which are always followed.
        self._odd = _Index()
        self._regular: _Index | None = None
        self._known: set[LeaseKey] = set()
        self._noted: list[LeaseKey] = []
        #: By lease that is not followed, one that precedes it.
        self._winners: dict[LeaseKey, LeaseKey] = {}

    def note(self, key: LeaseKey, *, leads: bool) -> None:
        """Record whether a lease leads to a peer."""
        if (key in self._known) == leads:
            return
        self._noted.append(key)
        (self._known.add if leads else self._known.discard)(key)
        index = self._odd if self._is_odd(key) else self._regular
        if index is not None:
            (index.add if leads else index.discard)(key)

    def winner(self, key: LeaseKey) -> LeaseKey | None:
        """Return a lease that precedes this one, as of the last ``settle``; None if it is followed."""
        return self._winners.get(key)

    def settle(self) -> list[LeaseKey]:
        """Decide about the noted leases and those that overlap them. Return the changed decisions."""
        noted, self._noted = self._noted, []
        if not self._odd and not self._winners:
            self._regular = None
            return []
        undecided = self._connected(noted)
        changed = []
        for key in sorted(undecided, key=rank):
            undecided.discard(key)
            winner = self._find_winner(key, undecided) if key in self._known else None
            if winner != self._winners.get(key):
                changed.append(key)
            self._winners.pop(key, None)
            if winner is not None:
                self._winners[key] = winner
        return changed

    def _find_winner(self, key: LeaseKey, undecided: set[LeaseKey]) -> LeaseKey | None:
        """Return a lease that precedes an odd one and is followed."""
        known = self._winners.get(key)
        if known in self._known and known is not None and not self._is_odd(known):
            return known  # No other change matters. A search would look at each subnet inside a large one.
        if self._regular is None:
            self._regular = _Index()
            for each in self._known:
                if not self._is_odd(each):
                    self._regular.add(each)
        followed = (
            each for each in self._odd.around(key) if each not in undecided and each not in self._winners
        )
        return min(self._regular.around(key), key=rank, default=None) or min(followed, key=rank, default=None)

    def _connected(self, keys: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Return the odd leases about which a change of these decides, directly or through one another."""
        found: set[LeaseKey] = set()
        left = set(keys)
        while left:
            key = left.pop()
            if self._is_odd(key):
                found.add(key)
            left.update(each for each in self._odd.around(key) if each not in found)
        return found

    def _is_odd(self, key: LeaseKey) -> bool:
        return any(net is not None and net.prefixlen != self._lengths.get(net.version) for net in key)


class _Index:
    """Leases by their subnets: family and number of host bits, then prefix."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], dict[int, set[LeaseKey]]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def add(self, owner: LeaseKey) -> None:
        for net in owner:
            if net is not None:
                place, prefix = _place(net)
                self._owners.setdefault(place, {}).setdefault(prefix, set()).add(owner)

    def discard(self, owner: LeaseKey) -> None:
        for net in owner:
            if net is not None:
                self._discard(net, owner)

    def _discard(self, net: IPNetwork, owner: LeaseKey) -> None:
        place, prefix = _place(net)
        owners = self._owners[place]
        owners[prefix].discard(owner)
        if not owners[prefix]:
            del owners[prefix]
        if not owners:
            del self._owners[place]

    def around(self, key: LeaseKey) -> Iterator[LeaseKey]:
        """Yield the other leases with a subnet that contains one of these, or lies inside one."""
        for net in key:
            if net is not None:
                yield from (owner for owner in self._around(net) if owner != key)

    def _around(self, net: IPNetwork) -> Iterator[LeaseKey]:
        (_, own_bits), own_prefix = _place(net)
        for (version, bits), owners in self._owners.items():
            if version != net.version or bits == own_bits:
                continue
            if bits > own_bits:
                yield from owners.get(own_prefix >> (bits - own_bits), ())
                continue
            more = own_bits - bits
            parts: Iterable[int] = range(own_prefix << more, (own_prefix + 1) << more)
            if len(owners) < 1 << more:
                parts = [prefix for prefix in owners if prefix >> more == own_prefix]
            for prefix in parts:
                yield from owners.get(prefix, ())
