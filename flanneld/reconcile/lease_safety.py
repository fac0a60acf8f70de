"""Safety check of leases: a loop, or a takeover of one of the host's own networks (pure).

The decision depends on the host's networks and on the set of leases, never on the order of events. The
cost of one check does not depend on the number of leases.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import itemgetter

from flanneld.errors import LEASES_END, Unsafe
from flanneld.model import (
    FAMILIES,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseKey,
    lies_in,
    network_around,
    overlap,
)
from flanneld.network.obstacles import Obstacles, concerns

_NUMBER = itemgetter(0)


class LeaseSafety:
    """Index of leases and host networks. Call ``update`` with every change, then ``harm`` for a lease."""

    def __init__(self, own: Lease, networks: Iterable[IPNetwork]) -> None:
        self.obstacles = Obstacles()
        self._own = own
        self._own_nets = tuple(net for net in own.key if net is not None)
        self._networks = tuple(networks)
        #: Routed subnets: those of leases that no network of the host makes unsafe.
        self._led = _Prefixes()
        self._led_keys: set[LeaseKey] = set()
        #: Public IPs inside the cluster's networks. Most clusters have none.
        self._inside = _Addresses()
        self._inside_keys: dict[LeaseKey, tuple[IPAddress, ...]] = {}
        for net in self._own_nets:
            self._led.add(net)

    def concerns(self, net: IPNetwork) -> bool:
        """Return True if a host's route to this network can change a decision."""
        return concerns(net, self._networks, self._own_nets)

    def look(self, obstacles: Obstacles, leases: Iterable[Lease]) -> None:
        """Replace the facts of the host. Any decision may change by that."""
        self.obstacles = obstacles
        for lease in leases:
            self._lead(lease.key, desired=self._is_led(lease.key))

    def update(self, put: Iterable[Lease], gone: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Apply a change of leases. Return the keys of leases whose decision may change."""
        affected: set[LeaseKey] = set()
        for key in gone:
            affected.update(self._lead(key, desired=False))
            self._place(key, ())
        for lease in put:
            key = lease.key
            self._place(key, self._publics_inside(lease))
            affected.update(self._lead(key, desired=self._is_led(key)))
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
            if taken_for := self._taken_for(public_ip):
                return Unsafe(
                    f"it announces {public_ip}, {taken_for}",
                    f"give that node its own --public-ip; {LEASES_END}",
                )
        return None

    def is_reachable(self, lease: Lease) -> bool:
        """Return False if packets to a public IP of the lease would come back or go to all hosts."""
        return not any(self._taken_for(ip) for family in FAMILIES if (ip := lease.attrs.public(family)))

    def _taken_for(self, public_ip: IPAddress) -> str:
        if here := self.obstacles.at(public_ip):
            return here
        subnet = self._led.around(public_ip)
        return f"which lies in the leased subnet {subnet}" if subnet is not None else ""

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

    def _lead(self, key: LeaseKey, *, desired: bool) -> Iterable[LeaseKey]:
        """Count or discount a lease's subnets. Return the leases whose public IPs are in them."""
        if (key in self._led_keys) == desired:
            return ()
        (self._led_keys.add if desired else self._led_keys.discard)(key)
        nets = [net for net in key if net is not None]
        for net in nets:
            (self._led.add if desired else self._led.discard)(net)
        return [owner for net in nets for owner in self._inside.owners(net)] if self._inside_keys else ()

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

    def _place(self, key: LeaseKey, addresses: tuple[IPAddress, ...]) -> None:
        if not (addresses or self._inside_keys):
            return
        for address in self._inside_keys.pop(key, ()):
            self._inside.discard(address, key)
        for address in addresses:
            self._inside.add(address, key)
        if addresses:
            self._inside_keys[key] = addresses


class _Prefixes:
    """Counted set of networks with longest prefix match."""

    def __init__(self) -> None:
        #: Counts by family and number of host bits. In most clusters all subnets have one length.
        self._counts: dict[tuple[int, int], dict[int, int]] = {}

    def add(self, net: IPNetwork) -> None:
        place, number = _place(net)
        counts = self._counts.setdefault(place, {})
        counts[number] = counts.get(number, 0) + 1

    def discard(self, net: IPNetwork) -> None:
        place, number = _place(net)
        counts = self._counts[place]
        counts[number] -= 1
        if not counts[number]:
            del counts[number]

    def around(self, address: IPAddress) -> IPNetwork | None:
        """Return the longest prefix around an address, which decides its route."""
        number = int(address)
        found = [
            bits
            for (version, bits), counts in self._counts.items()
            if version == address.version and number >> bits in counts
        ]
        return network_around(address, address.max_prefixlen - min(found)) if found else None


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


def _place(net: IPNetwork) -> tuple[tuple[int, int], int]:
    bits = net.max_prefixlen - net.prefixlen
    return (net.version, bits), int(net.network_address) >> bits
