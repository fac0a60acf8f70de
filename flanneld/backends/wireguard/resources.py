"""The nouns of the WireGuard backend: a device's key and port, its peers, and what each may send (pure).

A peer's allowed IPs are resources of their own, because each belongs to at most one peer of a device: the
kernel moves it from one to another without a word. So two leases that claim one are found where all conflicts
are found.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import NO_PRESHARED_KEY
from flanneld.model import IPAddress, IPNetwork, Secret
from flanneld.state.resources import Key, Kind

#: Name of the table that holds all of these.
TABLE = "wireguard"


class DeviceKey(Struct, frozen=True, gc=False):
    """The private key and the UDP port of a device. ``public_key`` follows from the private one."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    private_key: Secret
    public_key: bytes
    listen_port: int
    #: The mark on the device's own packets; any but 0 can lead them past the main routing table.
    fwmark: int = 0

    @property
    def key(self) -> Key:
        return (TABLE, self.device)

    def __str__(self) -> str:
        return f"key {keys.text_of(self.public_key)} listen-port {self.listen_port} dev {self.device}"


class Peer(Struct, frozen=True, gc=False):
    """Another node, known by its public key. ``endpoint`` and ``port`` are where it is called at first."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    public_key: bytes
    endpoint: IPAddress | None
    port: int
    #: Seconds between two packets that keep a NAT's mapping open; 0 for none.
    keepalive: int = 0
    preshared_key: Secret = NO_PRESHARED_KEY

    @property
    def key(self) -> Key:
        return (TABLE, self.device, keys.text_of(self.public_key))

    def __str__(self) -> str:
        where = f"[{self.endpoint}]" if self.endpoint and self.endpoint.version == 6 else str(self.endpoint)
        return f"peer {keys.text_of(self.public_key)} endpoint {where}:{self.port} dev {self.device}"


class AllowedIp(Struct, frozen=True, gc=False):
    """A subnet whose packets go to one peer, and are taken from this peer alone."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    subnet: IPNetwork
    public_key: bytes

    @property
    def key(self) -> Key:
        net = self.subnet
        return (TABLE, self.device, net.version, int(net.network_address), net.prefixlen)

    def __str__(self) -> str:
        return f"allowed-ip {self.subnet} peer {keys.text_of(self.public_key)} dev {self.device}"
