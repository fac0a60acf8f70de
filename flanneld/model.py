"""Model of the network: this host's uplink, the leases, and a store's events (pure).

Leases and routes are made by the ten thousand, and a lease's subnet is hashed some ten times. ``ipaddress``
takes 1.6 us to make a network from numbers, 0.5 us to hash it and 1 us to compare it; the networks of
``ipv4_prefix`` take 0.5, 0.04 and 0.2 us. They are equal to, and hash as, those of ``ipaddress``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any, Literal, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr

from flanneld.errors import shown

Family = Literal[4, 6]
IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

FAMILIES: tuple[Family, ...] = (4, 6)

#: Addresses that belong to no host, as numbers: broadcast, unspecified, IPv6 loopback. Then the first octets
#: of "this network" (RFC 1122), loopback and multicast addresses, and the first 96 bits of IPv4 within IPv6.
_NO_HOST: dict[Family, frozenset[int]] = {4: frozenset({0xFFFF_FFFF}), 6: frozenset({0, 1})}
_OF_NO_HOST: dict[Family, frozenset[int]] = {4: frozenset({0, 127, *range(224, 240)}), 6: frozenset({0xFF})}
_MAPPED = 0xFFFF


def family_of(of: IPAddress | IPNetwork) -> Family:
    """Return the family of an address or a network."""
    return 4 if of.version == 4 else 6


def is_a_hosts(address: IPAddress) -> bool:
    """Return True if an address can be that of one host.

    240.0.0.0/4 can, as in Linux and upstream: it is reserved, but many private networks use it.
    """
    family, number = family_of(address), int(address)
    octet = number >> (address.max_prefixlen - 8)
    if number in _NO_HOST[family] or octet in _OF_NO_HOST[family]:
        return False
    return number >> 32 != _MAPPED  # nothing is left of IPv4


class Secret(Struct, frozen=True, gc=False):
    """Key material. Neither ``str`` nor ``repr`` shows it, so it gets into no log, status or plan."""

    value: bytes

    def __repr__(self) -> str:
        return "Secret(...)"

    __str__ = __repr__


#: A lease that expires within this time, in seconds, should have been renewed.
LEASE_ENDS_SOON = 600.0


class Uplink(Struct, frozen=True, gc=False):
    """Uplink: the external interface, which carries the packets between the nodes.

    ``address`` is the local address of the interface, ``public_ip`` the one other nodes are told.
    A family that the network does not use has neither.
    """

    name: str
    index: int
    mtu: int
    address: IPv4Address | None = None
    public_ip: IPv4Address | None = None
    ipv6_address: IPv6Address | None = None
    public_ipv6: IPv6Address | None = None

    def local(self, family: Family) -> IPAddress | None:
        return self.address if family == 4 else self.ipv6_address

    def public(self, family: Family) -> IPAddress | None:
        return self.public_ip if family == 4 else self.public_ipv6

    def __str__(self) -> str:
        pairs = ((self.local(family), self.public(family)) for family in FAMILIES)
        places = ", ".join(f"{local} announced as {public}" for local, public in pairs if local or public)
        return f"{self.name}, MTU {self.mtu}, {places}"


class LeaseAttrs(Struct, frozen=True, gc=False):
    """Lease attributes that a node announces; ``backend_data`` is decoded JSON, None if absent."""

    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None
    backend_type: str = ""
    backend_data: Any = None
    backend_v6_data: Any = None

    def public(self, family: Family) -> IPAddress | None:
        return self.public_ip if family == 4 else self.public_ipv6

    @property
    def public_ips(self) -> tuple[IPAddress, ...]:
        """The public IPs that it has, that of IPv4 first."""
        return tuple(ip for ip in (self.public_ip, self.public_ipv6) if ip is not None)

    def data(self, family: Family) -> Any:
        return self.backend_data if family == 4 else self.backend_v6_data

    def __str__(self) -> str:
        """Return addresses, backend and its data for the log. The data may be any text from the store."""
        import json  # the udp proxy, which has no use for it, starts sooner

        ips = list(map(str, self.public_ips)) or ["no public IP"]
        told = [json.dumps(data)[:200] for data in (self.backend_data, self.backend_v6_data) if data]
        return ", ".join([*ips, f"backend {shown(self.backend_type) or 'unnamed'}", *told])


def is_same_node(theirs: LeaseAttrs, ours: LeaseAttrs) -> bool:
    """Return True if both announce one public IP, in the first family that ``ours`` has."""
    family: Family = 4 if ours.public_ip else 6
    return ours.public(family) is not None and theirs.public(family) == ours.public(family)


LeaseKey = tuple[IPv4Network | None, IPv6Network | None]


class Lease(Struct, frozen=True, gc=False):
    """Lease: one node's subnets.

    ``expires`` is in seconds on the boot-time clock (``clock.now``), None for a reservation: a lease
    that an operator made permanent. ``asof`` is the store's index at which this was true. ``created`` orders
    leases by their creation in the store, which no renewal changes; 0 if the order is unknown. ``node`` is
    the name in Kubernetes.
    """

    attrs: LeaseAttrs
    subnet: IPv4Network | None = None
    ipv6_subnet: IPv6Network | None = None
    expires: float | None = None
    asof: int = 0
    created: int = 0
    node: str = ""
    #: The subnets. Made once: it is asked for ten times, and several tables keep it.
    key: LeaseKey = (None, None)

    def __post_init__(self) -> None:
        force_setattr(self, "key", (self.subnet, self.ipv6_subnet))

    def net(self, family: Family) -> IPNetwork | None:
        return self.subnet if family == 4 else self.ipv6_subnet

    def __str__(self) -> str:
        return name_of(self.key)


def network_around(address: IPAddress, length: int) -> IPNetwork:
    """Return the network with this prefix length that has an address."""
    kind = IPv4Network if address.version == 4 else IPv6Network
    return kind((int(address), length), strict=False)


def single(address: IPAddress) -> IPNetwork:
    """Return the network of a single address."""
    return network_around(address, address.max_prefixlen)


def overlap(one: IPNetwork, other: IPNetwork) -> bool:
    """Return True if two networks of one family share addresses; faster than ``ipaddress``'s method."""
    if one.version != other.version:
        return False
    differences = int(one.network_address) ^ int(other.network_address)
    return not differences >> (one.max_prefixlen - min(one.prefixlen, other.prefixlen))


def lies_in(net: IPNetwork, other: IPNetwork) -> bool:
    """Return True if a network is a part of another of the same family."""
    return net.prefixlen >= other.prefixlen and overlap(net, other)


def contests(theirs: LeaseKey, ours: LeaseKey) -> bool:
    """Return True if a lease claims addresses of a usual one: a larger subnet around it loses to it."""
    return any(
        one and other and one.prefixlen >= other.prefixlen and overlap(one, other)
        for one, other in zip(theirs, ours, strict=True)
    )


def name_of(key: LeaseKey) -> str:
    """Return a lease key as text: ``10.1.5.0/24`` or ``10.1.5.0/24,fc00::/64``."""
    return ",".join(str(net) for net in key if net is not None)


class Added(Struct, frozen=True, gc=False):
    """Event: a lease is new, or has new attributes."""

    lease: Lease


class Removed(Struct, frozen=True, gc=False):
    """Event: a lease was removed. The store reports only its key."""

    key: LeaseKey


class Snapshot(Struct, frozen=True, gc=False):
    """Event: the list of all leases.

    ``unreadable`` are the keys whose value could not be parsed. Such a lease exists, so its last
    readable value stays valid.
    """

    leases: tuple[Lease, ...]
    unreadable: frozenset[LeaseKey] = frozenset()


class Cached(Struct, frozen=True, gc=False):
    """Event: leases from a cache, until the store answers. Some may have changed or expired since.

    There may be others, so nothing may be removed because of it. ``source`` says where they were saved.
    """

    leases: tuple[Lease, ...]
    source: str


Event = Added | Removed | Snapshot | Cached


class Change(Struct, frozen=True, gc=False):
    """Difference made by an event: leases that are new or changed, and keys of removed ones."""

    put: tuple[Lease, ...] = ()
    gone: tuple[LeaseKey, ...] = ()


class LeaseTable(Struct, gc=False):
    """Table of the peers' leases as last reported, without our own."""

    own: LeaseKey
    synced: bool = False
    #: Source of the leases until the first snapshot; empty if they come from the store.
    cached: str = ""
    #: Leases that exist but could not be parsed.
    unreadable: set[LeaseKey] = field(default_factory=set)
    _peers: dict[LeaseKey, Lease] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._peers.values())

    def get(self, key: LeaseKey) -> Lease | None:
        return self._peers.get(key)

    def leases(self) -> list[Lease]:
        """Return a copy, made in one step. May be called from any thread."""
        return list(self._peers.values())

    def apply(self, event: Event) -> Change:
        """Apply one event and return the difference. A renewal alone makes none."""
        match event:
            case Added(lease):
                self.unreadable.discard(lease.key)
                return Change(put=self._put((lease,)))
            case Removed(key):
                self.unreadable.discard(key)
                return Change(gone=self._drop((key,)))
            case Cached(leases, source):
                if self.synced:
                    return Change()
                self.cached = source
                return Change(put=self._put(leases))
            case Snapshot(leases, unreadable):
                self.synced = True
                self.cached = ""
                self.unreadable = set(unreadable)
                there = {lease.key for lease in leases} | unreadable
                gone = self._drop([key for key in self._peers if key not in there])
                return Change(put=self._put(leases), gone=gone)

    def _put(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        changed = []
        for lease in leases:
            if lease.key == self.own:
                continue
            known = self._peers.get(lease.key)
            self._peers[lease.key] = lease
            if known is None or known.created != lease.created or known.attrs != lease.attrs:
                changed.append(lease)
        return tuple(changed)

    def _drop(self, keys: Iterable[LeaseKey]) -> tuple[LeaseKey, ...]:
        # The keys of the leases themselves, which other tables find sooner than equal ones.
        gone = [self._peers.pop(key, None) for key in keys]
        return tuple([lease.key for lease in gone if lease is not None])


_OCTETS = tuple(map(str, range(256)))


def dotted(number: int) -> str:
    """Return the text of an IPv4 address."""
    a, b, c, d = number >> 24, number >> 16 & 255, number >> 8 & 255, number & 255
    return f"{_OCTETS[a]}.{_OCTETS[b]}.{_OCTETS[c]}.{_OCTETS[d]}"


class Address4(IPv4Address):
    """IPv4 address whose text takes a third of the time: ten are told of each peer."""

    __slots__ = ()
    _ip: int

    def __str__(self) -> str:
        return dotted(self._ip)


class _Prefix:
    """A network of ``ipaddress`` that keeps its hash."""

    __slots__ = ("_hash",)
    network_address: Any
    _prefixlen: int

    def __init__(self, address: Any, strict: bool = True) -> None:
        super().__init__(address, strict)  # type: ignore[call-arg] # of the other base
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return super().__eq__(other)
        same = self._hash == other._hash and self._prefixlen == other._prefixlen
        return same and bool(self.network_address == other.network_address)


class _Prefix4(_Prefix, IPv4Network):
    version = 4  # attributes, where ``ipaddress`` has properties
    max_prefixlen = 32


class _Prefix6(_Prefix, IPv6Network):
    version = 6
    max_prefixlen = 128


_P = TypeVar("_P", _Prefix4, _Prefix6)

_SAMPLE = IPv4Network("10.5.0.0/16")
#: True if ``ipaddress`` hashes address and mask as a pair, as since Python 3.13, and not their XOR.
_IS_PAIR = hash(_SAMPLE) == hash((int(_SAMPLE.network_address), int(_SAMPLE.netmask)))


def ipv4_prefix(number: int, length: int) -> IPv4Network:
    """Return a network from its first address and its length. Raises ``ValueError`` for host bits."""
    return _filled(_Prefix4.__new__(_Prefix4), Address4(number), number, length, _mask(4, length))


def ipv6_prefix(number: int, length: int) -> IPv6Network:
    """Return a network from its first address and its length. Raises ``ValueError`` for host bits."""
    return _filled(_Prefix6.__new__(_Prefix6), IPv6Address(number), number, length, _mask(6, length))


def prefix(net: IPv4Network | IPv6Network) -> IPv4Network | IPv6Network:
    """Return the equal of a network of ``ipaddress``."""
    make = ipv4_prefix if net.version == 4 else ipv6_prefix
    return make(int(net.network_address), net.prefixlen)


def _filled(net: _P, address: Any, number: int, length: int, mask: tuple[Any, int]) -> _P:
    """Do what ``IPv4Network.__init__`` does, without the parser of texts and tuples."""
    netmask, hosts = mask
    if number & hosts:
        raise ValueError(f"{address}/{length} has host bits set")
    net.network_address = address
    net.netmask = netmask
    net._prefixlen = length  # noqa: SLF001 - this is its constructor
    net._hash = hash((number, int(netmask)) if _IS_PAIR else number ^ int(netmask))  # noqa: SLF001
    return net


@cache
def _mask(version: int, length: int) -> tuple[Any, int]:
    """Return the mask of a length, and its host bits as a number. Raises ``ValueError``."""
    net = (IPv4Network if version == 4 else IPv6Network)((0, length))
    return net.netmask, int(net.hostmask)
