"""The nouns: what a kernel, or a table elsewhere, can hold for us (pure).

Each resource is a frozen value with a ``key``. Two resources with one key are two opinions about
the same kernel object; the wanted state is therefore a mapping by key, never a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from ipaddress import IPv4Network, IPv6Network
from typing import ClassVar, Protocol

from msgspec import Struct

from flanneld.model import IPAddress, IPNetwork


class Kind(IntEnum):
    """The kinds of resources, in the order in which they are made; removal goes the other way."""

    LINK = 0
    ADDRESS = 1
    NEIGHBOR = 2
    FDB = 3
    ROUTE = 4
    #: The packet filter's rules of one family, in one place.
    RULES = 5
    #: A file of this host, or a setting of its kernel.
    FILE = 6
    #: In a backend's own table, beyond this kernel.
    REMOTE = 7


#: Names of the kernel's tables.
LINKS, ADDRESSES, NEIGHBORS, FDB, ROUTES = "links", "addresses", "neighbors", "fdb", "routes"

#: The first item names the table, the rest identifies the object there. Numbers and strings only: an address
#: object takes ten times as long to hash, and keys are hashed all the time.
Key = tuple[int | str, ...]

#: linux/rtnetlink.h RTPROT_BOOT: what ``ip route add`` leaves, and what Go flannel's routes carry.
PROTO_BOOT = 3
#: Marks routes of ours on interfaces that are not ours. Free in iproute2's rt_protos.
PROTO_FLANNEL = 70


def route_key(destination: IPNetwork, *more: str) -> Key:
    """The key of a route; ``more`` sets those apart that may be beside others to the same destination."""
    return (ROUTES, destination.version, int(destination.network_address), destination.prefixlen, *more)


def destination_of(key: Key) -> IPNetwork | None:
    """The network that a key of a route names, None for any other key."""
    match key:
        case ("routes", 4, int(number), int(length), *_):
            return IPv4Network((number, length))
        case ("routes", 6, int(number), int(length), *_):
            return IPv6Network((number, length))
    return None


class Link(Struct, frozen=True, gc=False):
    """A device that a backend makes. Each kind of device is a class of its own, with a codec of that kind."""

    kind: ClassVar[Kind] = Kind.LINK
    #: IFLA_INFO_KIND, and the name of the kernel's module.
    make: ClassVar[str] = ""

    @property
    def key(self) -> Key:
        return (LINKS, self.name)

    # Fields of each class, in an order of its own.
    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def mtu(self) -> int:
        raise NotImplementedError

    @property
    def up(self) -> bool:
        raise NotImplementedError


class Vxlan(Link, frozen=True, gc=False):
    """A VXLAN device (linux/if_link.h, IFLA_VXLAN_*). ``port`` is the UDP destination port."""

    make: ClassVar[str] = "vxlan"
    name: str
    vni: int
    parent: int
    local: IPAddress
    port: int
    mac: str
    mtu: int
    learning: bool = False
    gbp: bool = False
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} address {self.mac} vxlan id {self.vni} local {self.local}"


class Ipip(Link, frozen=True, gc=False):
    """A tunnel of IPv4 in IPv4 (linux/if_tunnel.h, IFLA_IPTUN_*). An end that is None is any host."""

    make: ClassVar[str] = "ipip"
    name: str
    local: IPAddress | None
    mtu: int
    remote: IPAddress | None = None
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} ipip local {self.local}"


class Tun(Link, frozen=True, gc=False):
    """A TUN device that stays when no process has it open (linux/if_tun.h, IFF_PERSIST)."""

    make: ClassVar[str] = "tun"
    name: str
    mtu: int
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} tun"


class WireGuard(Link, frozen=True, gc=False):
    """A WireGuard device, without its keys and peers."""

    make: ClassVar[str] = "wireguard"
    name: str
    mtu: int
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} wireguard"


class ForeignLink(Struct, frozen=True, gc=False):
    """A device under a name that we need, not as we would make it: never wanted, only met.

    ``make`` is its IFLA_INFO_KIND, empty for a plain interface.
    """

    kind: ClassVar[Kind] = Kind.LINK
    name: str
    description: str
    make: str = ""

    @property
    def key(self) -> Key:
        return (LINKS, self.name)

    def __str__(self) -> str:
        return f"link {self.name}, {self.description}"


class Address(Struct, frozen=True, gc=False):
    """An address of a device of ours, always of full length: no connected route comes with it."""

    kind: ClassVar[Kind] = Kind.ADDRESS
    device: str
    address: IPAddress

    @property
    def key(self) -> Key:
        return (ADDRESSES, self.device, self.address.version, int(self.address))

    def __str__(self) -> str:
        return f"address {self.address}/{self.address.max_prefixlen} dev {self.device}"


class Neighbor(Struct, frozen=True, gc=False):
    """A permanent ARP or NDP entry."""

    kind: ClassVar[Kind] = Kind.NEIGHBOR
    device: str
    address: IPAddress
    mac: str

    @property
    def key(self) -> Key:
        return (NEIGHBORS, self.device, self.address.version, int(self.address))

    def __str__(self) -> str:
        return f"neigh {self.address} lladdr {self.mac} dev {self.device}"


class FdbEntry(Struct, frozen=True, gc=False):
    """A permanent forwarding entry of a VXLAN device: frames for ``mac`` go to the host ``remote``.

    ``astray`` says that they go to another port, segment or interface there than the device's own: never
    wanted, only met.
    """

    kind: ClassVar[Kind] = Kind.FDB
    device: str
    mac: str
    remote: IPAddress
    astray: bool = False

    @property
    def key(self) -> Key:
        return (FDB, self.device, self.mac)

    def __str__(self) -> str:
        return f"fdb {self.mac} dst {self.remote} dev {self.device}"


class Route(Struct, frozen=True, gc=False):
    """A route of the main table with metric 0 (IPv6: the kernel's default metric)."""

    kind: ClassVar[Kind] = Kind.ROUTE
    destination: IPNetwork
    device: str
    gateway: IPAddress | None = None
    onlink: bool = False

    @property
    def key(self) -> Key:
        return route_key(self.destination)

    def __str__(self) -> str:
        via = f" via {self.gateway}" if self.gateway else ""
        return f"route {self.destination}{via} dev {self.device}{' onlink' if self.onlink else ''}"


class RivalRoute(Struct, frozen=True, gc=False):
    """A route with the key of one of ours that we would not make so: never wanted, only met.

    ``is_connected`` says that the kernel made it, for a network on one of its links.
    """

    kind: ClassVar[Kind] = Kind.ROUTE
    key: Key
    is_connected: bool = False

    def __str__(self) -> str:
        return "the kernel's route to a link of this host" if self.is_connected else "a route of another kind"


class Blackhole(Struct, frozen=True, gc=False):
    """Drops what is for the destination unless another route, of any length or metric, leads there.

    With ``unreachable`` the sender is told so by ICMP.
    """

    kind: ClassVar[Kind] = Kind.ROUTE
    destination: IPNetwork
    unreachable: bool = False

    @property
    def key(self) -> Key:
        return route_key(self.destination, "blackhole")

    def __str__(self) -> str:
        return f"{'unreachable' if self.unreachable else 'blackhole'} {self.destination}"


class Resource(Protocol):
    """Any of the above, or one of a backend's own with kind ``REMOTE``. ``str`` is for the log."""

    kind: ClassVar[Kind]

    @property
    def key(self) -> Key:
        """The name of the table that holds it, and what tells it from the others there."""
        ...


#: What a table holds, or should hold.
State = Mapping[Key, Resource]
