"""Index of what has addresses, and the rules for leases that harm this host or overlap another (pure).

What a rule says depends on the host's networks and on the set of leases, never on the order of events. A
lease that touches nothing is followed: one look-up for each of its subnets shows that. Else:

| The lease | What is done |
|---|---|
| overlaps our own subnet, or lies outside the network | refused |
| takes over a network, an address or a gateway of this host, or the store's address | unsafe |
| announces an address of this host, or a broadcast or network address of its links | unsafe |
| announces an address in our own subnet, or in one of a lease that is not younger | unsafe |
| is around the public IP of an older lease | unsafe |
| is odd: it has not this node's prefix length; and overlaps one that is not odd | not followed |
| is odd, and overlaps an odd one that is followed and has a lower subnet | not followed |

A lease that is refused, or unsafe by its own subnets, makes no other one unsafe. Age is the order of creation
in the store; if it is unknown, the one with the subnet is followed. A large subnet that was typed by hand
must not cut off the nodes inside it.

Equal subnets claim equal keys, so ``flanneld/state/desired.py`` decides about them. A subnet inside another
one has a key of its own, and no two places agree: a routing table prefers the smaller subnet, WireGuard also
drops what the larger one's peer sends from there, the udp proxy and XFRM take the older entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from flanneld.errors import LEASES_END, LINK_BROADCAST, Refused, Unsafe
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
    single,
)
from flanneld.network.obstacles import HostNetworks, Obstacle, concerns
from flanneld.state.desired import rank

T = TypeVar("T")

#: Prefix lengths of the cells of a family without a network.
_LENGTHS: dict[Family, int] = {4: 24, 6: 64}
_LOCAL = "an address of this host"


class OwnedNet(NamedTuple, Generic[T]):
    """A network with its owner, as its first address and its number of host bits."""

    number: int
    bits: int
    owner: T


_Table = dict[int, "T | OwnedNet[T] | dict[T | OwnedNet[T], None]"]


class Cells(Generic[T]):
    """Index of networks by what they overlap. No owner may be a dict.

    A cell is a network of this node's prefix length, as nearly all leases are. Smaller networks are kept by
    their cell, so that one look-up finds them; larger ones by their length.
    """

    def __init__(self, lengths: Mapping[Family, int]) -> None:
        known = {**_LENGTHS, **lengths}
        self._bits: dict[int, int] = {4: 32 - known[4], 6: 128 - known[6]}
        #: By family and number of host bits, then prefix. An owner alone has the whole prefix, a claim a part
        #: of a cell, and a dict holds several: every node's public IP may lie in one cell.
        self._tables: dict[int, dict[int, _Table[T]]] = {4: {}, 6: {}}

    def add(self, net: IPNetwork, owner: T) -> None:
        """Add a network, unless its owner has it already."""
        table, prefix, entry = self._place(net, owner)
        known = table.setdefault(prefix, entry)
        if isinstance(known, dict):
            known[entry] = None
        elif known != entry:
            table[prefix] = {known: None, entry: None}

    def discard(self, net: IPNetwork, owner: T) -> None:
        table, prefix, entry = self._place(net, owner)
        known = table.get(prefix)
        if isinstance(known, dict):
            known.pop(entry, None)
            if known:
                return
        elif known != entry:
            return
        table.pop(prefix, None)

    def _place(self, net: IPNetwork, owner: T) -> tuple[_Table[T], int, T | OwnedNet[T]]:
        number, own, version = int(net.network_address), net.max_prefixlen - net.prefixlen, net.version
        bits = max(own, self._bits[version])
        tables = self._tables[version]
        table = tables.get(bits)
        if table is None:
            table = tables[bits] = {}
        return table, number >> bits, owner if own == bits else OwnedNet(number, own, owner)

    def is_free(self, version: int, number: int, bits: int) -> bool:
        """Return True if no table can have what overlaps a network: for a cell, if nothing does."""
        for table, prefixes in self._tables[version].items():
            if number >> table in prefixes or (table < bits and prefixes):
                return False
        return True

    def touching(self, version: int, number: int, bits: int) -> Iterator[OwnedNet[T]]:
        """Yield what overlaps a network: equal to it, around it or inside it."""
        for table, prefixes in self._tables[version].items():
            for place in _places(prefixes, table, number, bits):
                known = prefixes[place]
                for entry in known if isinstance(known, dict) else (known,):
                    claim = entry if isinstance(entry, OwnedNet) else OwnedNet(place << table, table, entry)
                    larger = max(claim.bits, bits)
                    if claim.number >> larger == number >> larger:
                        yield claim


def _places(prefixes: dict[int, T], table: int, number: int, bits: int) -> Iterable[int]:
    """Return the prefixes of a table that overlap a network. A list: the table may change meanwhile."""
    if table >= bits:
        return [number >> table] if number >> table in prefixes else []
    more, prefix = bits - table, number >> bits
    if len(prefixes) < 1 << more:
        return [place for place in prefixes if place >> more == prefix]
    return [place for place in range(prefix << more, (prefix + 1) << more) if place in prefixes]


def _numbers(net: IPNetwork) -> tuple[int, int, int]:
    return net.version, int(net.network_address), net.max_prefixlen - net.prefixlen


class AddressClaims:
    """Claims of the host and of leases. Call ``update`` with every change, then ``refusal`` for a lease.

    ``ranges`` are the cluster's networks, each with the prefix length of this node's subnet. ``lease_of``
    returns a peer's lease as of the last change.
    """

    def __init__(
        self,
        own: Lease,
        ranges: Iterable[tuple[IPNetwork, int]],
        lease_of: Callable[[LeaseKey], Lease | None],
    ) -> None:
        lengths = dict(ranges)
        self._own = own
        self._own_nets = tuple(net for net in own.key if net is not None)
        self._lease_of = lease_of
        self._networks: dict[int, IPNetwork] = {network.version: network for network in lengths}
        self._edges = {
            version: (int(network.network_address), int(network.broadcast_address))
            for version, network in self._networks.items()
        }
        self._lengths: dict[Family, int] = {network.version: length for network, length in lengths.items()}
        self._leases: Cells[LeaseKey] = Cells(self._lengths)
        #: Leases with other prefix lengths. Most clusters have none.
        self.odd: set[LeaseKey] = set()
        #: Public IPs inside the cluster's networks, and those of each lease. Most clusters have none.
        self._publics: Cells[LeaseKey] = Cells(self._lengths)
        self._inside: dict[LeaseKey, tuple[IPAddress, ...]] = {}
        self.look(HostNetworks())

    def look(self, host: HostNetworks) -> None:
        """Replace the facts of the host. Any decision may change by that."""
        self.host = host
        #: Devices with obstacles.
        self.devices = frozenset(each.device for each in host.obstacles)
        #: Obstacles, our own subnets, and what local addresses are.
        self._host: Cells[Obstacle | LeaseKey | str] = Cells(self._lengths)
        for net in self._own_nets:
            self._host.add(net, self._own.key)
        for each in host.obstacles:
            self._host.add(each.net, each)
        for local in host.local:
            self._host.add(local, _LOCAL)
        for ip in host.broadcast:
            self._host.add(single(ip), LINK_BROADCAST)

    def update(self, put: Iterable[Lease], gone: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Apply a change of leases. Return those whose decision may change by it, some of these perhaps."""
        affected: set[LeaseKey] = set()
        for key in gone:
            for net in key:
                if net is not None:
                    self._leases.discard(net, key)
            self.odd.discard(key)
            if self._inside:
                affected |= self._note_publics(key, ())
        for lease in put:
            key = lease.key
            for net in key:
                if net is not None:
                    self._leases.add(net, key)
            if self.is_odd(key):
                self.odd.add(key)
            publics = self._publics_inside(lease)
            if publics or self._inside:
                affected |= self._note_publics(key, publics)
        return affected

    def _publics_inside(self, lease: Lease) -> tuple[IPAddress, ...]:
        attrs = lease.attrs
        found: tuple[IPAddress, ...] = ()
        for ip in (attrs.public_ip, attrs.public_ipv6):
            if ip is not None and self._is_in_network(ip.version, int(ip)):
                found = (*found, ip)
        return found

    def _is_in_network(self, version: int, number: int) -> bool:
        edges = self._edges.get(version)
        return edges is not None and edges[0] <= number <= edges[1]

    def _note_publics(self, key: LeaseKey, publics: tuple[IPAddress, ...]) -> set[LeaseKey]:
        """Note the public IPs inside. Return the leases around them and the former ones, and those inside."""
        former = self._inside.pop(key, ())
        for ip in former:
            self._publics.discard(single(ip), key)
        for ip in publics:
            self._publics.add(single(ip), key)
        if publics:
            self._inside[key] = publics
        around = {owner for ip in (*former, *publics) for owner in self._led_around(ip.version, int(ip))}
        inside = (self._publics.touching(*_numbers(net)) for net in key if net is not None)
        return around.union(claim.owner for claims in inside for claim in claims)

    # ---- what touches it -------------------------------------------------------------------------

    def concerns(self, net: IPNetwork) -> bool:
        """Return True if a host's route to this network can change a decision."""
        return concerns(net, self._networks.values(), self._own_nets)

    def is_odd(self, key: LeaseKey) -> bool:
        """Return True for a lease with another prefix length than this node's."""
        # A loop, since a generator would take a tenth of the time of a start.
        for net in key:  # noqa: SIM110
            if net is not None and net.prefixlen != self._lengths.get(net.version):
                return True
        return False

    def obstacle_in(self, net: IPNetwork) -> Obstacle | None:
        """Return an obstacle that equals a subnet or lies in it, None if a lease of it harms none."""
        version, number, bits = _numbers(net)
        if self._host.is_free(version, number, bits):
            return None
        found = (each for each in self._host.touching(version, number, bits) if each.bits <= bits)
        harmed = (each.owner for each in found if isinstance(each.owner, Obstacle))
        return min((each for each in harmed if _is_harmed(each, net)), key=_order, default=None)

    def neighbours(self, key: LeaseKey) -> Iterator[LeaseKey]:
        """Yield the other leases with a subnet that contains one of these, or lies inside one."""
        for net in key:
            if net is not None:
                version, number, bits = _numbers(net)
                for claim in self._leases.touching(version, number, bits):
                    if claim.bits != bits and claim.owner != key:
                        yield claim.owner

    def _is_apart(self, key: LeaseKey) -> bool:
        """Return True if a lease's subnets are inside the network and touch no claim of the host."""
        for net in key:
            if net is not None:
                version, number, bits = _numbers(net)
                edges = self._edges.get(version)
                # A subnet of a family without a network leads nowhere, and its other one does.
                is_inside = edges is None or edges[0] <= number <= edges[1] - (1 << bits) + 1
                if not (is_inside and self._host.is_free(version, number, bits)):
                    return False
        return True

    def _is_led(self, key: LeaseKey) -> bool:
        return self._is_apart(key) or self._refusal_of(key) is None

    def _led_around(self, version: int, number: int) -> Iterator[LeaseKey]:
        """Yield the leases that are led with a subnet around an address, the longest prefix first."""
        for claim in sorted(self._leases.touching(version, number, 0), key=itemgetter(1)):
            if self._is_led(claim.owner):
                yield claim.owner

    # ---- the rules -------------------------------------------------------------------------------

    def refusal(self, lease: Lease) -> Refused | None:
        """Return the reason not to lead to a lease's node, ``Unsafe`` if that does harm; None for none."""
        if not self._is_apart(lease.key) and (reason := self._refusal_of(lease.key)) is not None:
            return reason
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
        return self._harm_to_older(lease) if self._inside else None

    def _refusal_of(self, key: LeaseKey) -> Refused | None:
        """Return the reason against a lease's subnets: routes to them would cut off, or attract, others."""
        nets = [net for net in key if net is not None]
        for net in nets:
            for ours in self._own_nets:
                if overlap(net, ours):
                    return Refused(
                        f"it overlaps our own subnet {ours}", "give one of both nodes another subnet"
                    )
        for net in nets:
            network = self._networks.get(net.version)
            if network is not None and not lies_in(net, network):
                remedy = f"restart its daemon if Network was changed; {LEASES_END}"
                return Refused(f"it is outside our network {network}", remedy)
        for net in nets:
            obstacle = self.obstacle_in(net)
            if obstacle is not None:
                whose = "the store's address" if obstacle.what == "store" else "this host's own addresses"
                return Unsafe(str(obstacle), f"move {whose} out of {net}; {LEASES_END}")
        return None

    def _harm_to_older(self, lease: Lease) -> Unsafe | None:
        for family in FAMILIES:
            net = lease.net(family)
            inside = self._publics.touching(*_numbers(net)) if net is not None else ()
            leases = ((claim.number, self._lease_of(claim.owner)) for claim in inside)
            found = [each for each in leases if each[1] is not None and _is_older(each[1], lease)]
            for _, older in sorted(found, key=itemgetter(0)):
                if older is not None and older.net(family) is not None and self._is_led(older.key):
                    whose = f"{older.attrs.public(family)}, the public IP of the older lease {older}"
                    return Unsafe(
                        f"its subnet {net} is around {whose}", f"give its node another subnet; {LEASES_END}"
                    )
        return None

    def is_reachable(self, lease: Lease) -> bool:
        """Return False if packets to a public IP of the lease would come back or go to all hosts."""
        return not any(
            self._taken_for(lease, ip) for family in FAMILIES if (ip := lease.attrs.public(family))
        )

    def _taken_for(self, lease: Lease, public_ip: IPAddress) -> str:
        version, number = public_ip.version, int(public_ip)
        keys: Iterable[LeaseKey] = ()
        if not self._host.is_free(version, number, 0):
            found = [claim.owner for claim in self._host.touching(version, number, 0)]
            for meaning in (_LOCAL, LINK_BROADCAST):
                if meaning in found:
                    return meaning
            keys = [key for key in found if key == self._own.key]
        if not keys and self._is_in_network(version, number):
            keys = self._led_around(version, number)
        for key in keys:
            # Our own lease is no peer's: this host delivers to its subnet itself, whatever the order.
            around = self._lease_of(key)
            if around is None or not _is_older(lease, around):
                return f"which lies in the leased subnet {key[FAMILIES.index(family_of(public_ip))]}"
        return ""


def _is_harmed(obstacle: Obstacle, net: IPNetwork) -> bool:
    """Return True if a route to a subnet around an obstacle would take over what leads there."""
    if obstacle.route is None or not lies_in(obstacle.route, net):
        return True
    # Of two routes to one destination the metric decides, and ours may have the lower one. A gateway is
    # needed then for that destination only, which the lease takes over on purpose.
    return obstacle.what == "store" and obstacle.route == net


def _order(obstacle: Obstacle) -> tuple[int, int, str]:
    return int(obstacle.net.network_address), obstacle.net.prefixlen, str(obstacle)


def _is_older(one: Lease, other: Lease) -> bool:
    """Return True if the store created one lease before another; False if that is unknown."""
    return 0 < one.created < other.created


class Overlaps:
    """Leases that are not followed because another precedes them. Call ``note``, then ``settle``.

    ``leads`` tells whether a lease leads to a peer, be it followed or not.
    """

    def __init__(self, claims: AddressClaims, leads: Callable[[LeaseKey], bool]) -> None:
        self._claims = claims
        self._leads = leads
        self._noted: list[LeaseKey] = []
        #: By lease that is not followed, one that precedes it, as of the last ``settle``.
        self.winners: dict[LeaseKey, LeaseKey] = {}

    def note(self, key: LeaseKey) -> None:
        """Note a lease that leads to a peer now and did not before, or the reverse."""
        self._noted.append(key)

    def settle(self) -> list[LeaseKey]:
        """Decide about the noted leases and those that overlap them. Return the changed decisions."""
        noted, self._noted = self._noted, []
        if not self._claims.odd and not self.winners:
            return []
        undecided = self._connected(noted)
        changed = []
        for key in sorted(undecided, key=rank):
            undecided.discard(key)
            winner = self._find_winner(key, undecided) if self._leads(key) else None
            if winner != self.winners.get(key):
                changed.append(key)
            self.winners.pop(key, None)
            if winner is not None:
                self.winners[key] = winner
        return changed

    def _find_winner(self, key: LeaseKey, undecided: set[LeaseKey]) -> LeaseKey | None:
        """Return a lease that precedes an odd one and is followed."""
        known = self.winners.get(key)
        if known is not None and self._leads(known) and not self._claims.is_odd(known):
            return known  # No other change matters. A search would look at each subnet inside a large one.
        usual, odd = None, None
        for each in self._claims.neighbours(key):
            if self._leads(each):
                if each not in self._claims.odd:
                    usual = each if usual is None else min(usual, each, key=rank)
                elif each not in undecided and each not in self.winners:
                    odd = each if odd is None else min(odd, each, key=rank)
        return usual or odd

    def _connected(self, keys: Iterable[LeaseKey]) -> set[LeaseKey]:
        """Return the odd leases about which a change of these decides, directly or through one another."""
        found: set[LeaseKey] = set()
        left = set(keys)
        while left:
            key = left.pop()
            if self._claims.is_odd(key):
                found.add(key)
            odd = self._claims.odd
            left.update(
                each
                for each in self._claims.neighbours(key)
                if each in odd and each not in found and self._leads(each)
            )
        return found
