"""Resources of the wireguard backend: a device's key and port, its peers, and their allowed IPs (pure).

Allowed IPs are resources of their own, because each belongs to at most one peer of a device: the kernel moves
it silently from one to another. So two leases with the same allowed IP are found like any other conflict.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from flanneld.backends.wireguard import keys
from flanneld.backends.wireguard.keys import NO_PRESHARED_KEY
from flanneld.model import IPAddress, IPNetwork, Secret
from flanneld.state.resources import Key, Kind

#: Name of the table of all these resources.
TABLE = "wireguard"


class DeviceKey(Struct, frozen=True, gc=False):
    """Private key and UDP port of a device. ``public_key`` is derived from the private one."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    private_key: Secret
    public_key: bytes
    listen_port: int
    #: Firewall mark of the device's own packets; a nonzero mark can divert them from the main routing table.
    fwmark: int = 0

    @property
    def key(self) -> Key:
        return (TABLE, self.device)

    def __str__(self) -> str:
        return f"key {keys.text_of(self.public_key)} listen-port {self.listen_port} dev {self.device}"


class WgPeer(Struct, frozen=True, gc=False):
    """Peer with its public key. ``endpoint`` and ``port`` are its initial address."""

    kind: ClassVar[Kind] = Kind.REMOTE
    device: str
    public_key: bytes
    endpoint: IPAddress | None
    port: int
    #: Seconds between keepalive packets, which keep a NAT's mapping open; 0 for none.
    keepalive: int = 0
    preshared_key: Secret = NO_PRESHARED_KEY

    @property
    def key(self) -> Key:
        return (TABLE, self.device, keys.text_of(self.public_key))

    def __str__(self) -> str:
        where = f"[{self.endpoint}]" if self.endpoint and self.endpoint.version == 6 else str(self.endpoint)
        return f"peer {keys.text_of(self.public_key)} endpoint {where}:{self.port} dev {self.device}"


class AllowedIp(Struct, frozen=True, gc=False):
    """Allowed IP: a subnet whose packets go to one peer, and are accepted only from this peer."""

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
