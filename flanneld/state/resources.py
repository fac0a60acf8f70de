"""Resources: objects of the kernel or of another table (pure).

Each resource is a frozen value with a ``key``. Two resources with one key are two states of the same object,
so the desired state is a mapping by key. Those that each peer has make their key once: it is asked for ten
times, and several tables keep it. It is also what they are hashed by: an address object takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from ipaddress import IPv4Network, IPv6Network
from typing import ClassVar, Protocol

from msgspec import Struct
from msgspec.structs import force_setattr

from flanneld.model import IPAddress, IPNetwork


class Kind(IntEnum):
    """Kinds of resources in the order of creation. Removal is in reverse order."""

    LINK = 0
    ADDRESS = 1
    NEIGHBOR = 2
    FDB = 3
    ROUTE = 4
    #: The packet filter's rules of one family, in one place.
    RULES = 5
    #: A file of this host, or a kernel setting.
    FILE = 6
    #: An object in a backend's own table, outside this kernel.
    REMOTE = 7


#: Names of the kernel's tables.
LINKS, ADDRESSES, NEIGHBORS, FDB, ROUTES = "links", "addresses", "neighbors", "fdb", "routes"

#: The kernel's table that guards the tunnel, one for each family, and our names of the two.
GUARD = "flannel-guard"
GUARDS = {4: "guard-ipv4", 6: "guard-ipv6"}

#: The table's name, then the object's identity there. Only numbers and strings: an address object takes ten
#: times as long to hash.
Key = tuple[int | str, ...]

#: linux/rtnetlink.h RTPROT_BOOT: protocol of ``ip route add`` and of Go flannel's routes.
PROTO_BOOT = 3
#: Protocol number of our routes on other devices. Unassigned in iproute2's rt_protos.
PROTO_FLANNEL = 70


def route_key(destination: IPNetwork, *more: str) -> Key:
    """Return the key of a route; ``more`` distinguishes several routes to one destination."""
    return (ROUTES, destination.version, int(destination.network_address), destination.prefixlen, *more)


def destination_of(key: Key) -> IPNetwork | None:
    """Return the destination in a route's key, None for any other key."""
    match key:
        case ("routes", 4, int(number), int(length), *_):
            return IPv4Network((number, length))
        case ("routes", 6, int(number), int(length), *_):
            return IPv6Network((number, length))
    return None


class Link(Struct, frozen=True, gc=False):
    """A backend's device. Each kind of device has a class of its own, and a codec."""

    kind: ClassVar[Kind] = Kind.LINK
    #: IFLA_INFO_KIND, and the name of the kernel module.
    make: ClassVar[str] = ""

    @property
    def key(self) -> Key:
        return (LINKS, self.name)

    # Fields of the subclasses, each in its own order.
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
    """A VXLAN device (linux/if_link.h, IFLA_VXLAN_*). ``port`` is the UDP destination port.

    With ``cpu_checksums`` the CPU computes the checksums of sent packets. False leaves that as it is.
    """

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
    cpu_checksums: bool = False

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} address {self.mac} vxlan id {self.vni} local {self.local}"


class Ipip(Link, frozen=True, gc=False):
    """An IPIP tunnel (linux/if_tunnel.h, IFLA_IPTUN_*). An end of None means any host."""

    make: ClassVar[str] = "ipip"
    name: str
    local: IPAddress | None
    mtu: int
    remote: IPAddress | None = None
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} ipip local {self.local}"


class Tun(Link, frozen=True, gc=False):
    """A persistent TUN device (linux/if_tun.h, IFF_PERSIST)."""

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


class Dummy(Link, frozen=True, gc=False):
    """A device that drops what is sent there: packets get past it only if a policy encrypts them before."""

    make: ClassVar[str] = "dummy"
    name: str
    mtu: int
    up: bool = True

    def __str__(self) -> str:
        return f"link {self.name} mtu {self.mtu} dummy"


class ForeignLink(Struct, frozen=True, gc=False):
    """A device of another kind with a name that we need: never desired, only found.

    ``make`` is its IFLA_INFO_KIND, empty for a plain interface.
    """

    kind: ClassVar[Kind] = Kind.LINK
    name: str
    description: str
    make: str = ""
    #: UDP port that a vxlan device with other flags than ours keeps for itself while it is up.
    port: int = 0

    @property
    def key(self) -> Key:
        return (LINKS, self.name)

    def __str__(self) -> str:
        return f"link {self.name}, {self.description}"


class Address(Struct, frozen=True, gc=False):
    """A host address (/32, /128) on our device, which implies no connected route."""

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
    key: Key = ()

    def __post_init__(self) -> None:
        force_setattr(self, "key", (NEIGHBORS, self.device, self.address.version, int(self.address)))

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return neighbor_text(self.address, self.mac, self.device)


def neighbor_text(address: object, mac: object, device: object) -> str:
    """Return a neighbour entry as text, as iproute2 has it; the address is one or a text."""
    return f"neigh {address!s} lladdr {mac} dev {device}"


class FdbEntry(Struct, frozen=True, gc=False):
    """A permanent forwarding entry of a VXLAN device: frames for ``mac`` go to the host ``remote``.

    ``has_overrides`` is True if port, VNI or interface differ from the device's: never desired, only found.
    """

    kind: ClassVar[Kind] = Kind.FDB
    device: str
    mac: str
    remote: IPAddress
    has_overrides: bool = False
    key: Key = ()

    def __post_init__(self) -> None:
        force_setattr(self, "key", (FDB, self.device, self.mac))

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        text = fdb_text(self.mac, self.remote, self.device)
        return f"{text}, by another port, VNI or interface" if self.has_overrides else text


def fdb_text(mac: object, remote: object, device: object) -> str:
    """Return a forwarding entry as text, with an address or its text."""
    return f"fdb {mac} dst {remote!s} dev {device}"


class Route(Struct, frozen=True, gc=False):
    """A route of the main table with metric 0 (IPv6: the kernel's default metric)."""

    kind: ClassVar[Kind] = Kind.ROUTE
    destination: IPNetwork
    device: str
    gateway: IPAddress | None = None
    onlink: bool = False
    key: Key = ()

    def __post_init__(self) -> None:
        force_setattr(self, "key", route_key(self.destination))

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return route_text(self.destination, self.gateway, self.device, onlink=self.onlink)


def route_text(destination: object, gateway: object, device: str, *, onlink: bool) -> str:
    """Return a route as text, with a network and an address or their texts; the gateway may be None."""
    via = f" via {gateway!s}" if gateway else ""
    return f"route {destination!s}{via} dev {device}{' onlink' if onlink else ''}"


class RivalRoute(Struct, frozen=True, gc=False):
    """A route with the key of one we own, but of another form: never desired, only found.

    ``is_connected`` means that it is the kernel's own connected route.
    """

    kind: ClassVar[Kind] = Kind.ROUTE
    key: Key
    is_connected: bool = False

    def __str__(self) -> str:
        return "the kernel's route to a link of this host" if self.is_connected else "a route of another kind"


class Blackhole(Struct, frozen=True, gc=False):
    """A route that drops packets unless a route at least as specific, of any metric, matches.

    With ``unreachable`` the sender gets an ICMP error.
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
    """Any of the classes above, or a backend's own with kind ``REMOTE``. ``str`` is for the log."""

    kind: ClassVar[Kind]

    @property
    def key(self) -> Key:
        """The name of its table, then its identity there."""
        ...


#: Contents of a table, actual or desired.
State = Mapping[Key, Resource]
