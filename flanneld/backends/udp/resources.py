"""Resources of the udp backend: the udp proxy and its peers (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

from flanneld import __version__
from flanneld.state.resources import Key, Kind

#: Names of the tables.
PROXIES, PROXY_PEERS = "udp-pump", "udp-peers"
#: Values of DataPlane: a certain data plane, or the best that works.
DATA_PLANES = ("auto", "native", "python")


class UdpProxy(Struct, frozen=True, gc=False):
    """A udp proxy with its settings. ``local`` and ``port`` are its socket's, ``address`` is the TUN's.

    ``data_plane`` is one of ``DATA_PLANES``. A proxy of another ``version`` is replaced.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    tun: str
    local: IPv4Address
    port: int
    address: IPv4Address
    mtu: int
    accept_any: bool = False
    data_plane: str = "auto"
    version: str = __version__

    @property
    def key(self) -> Key:
        return (PROXIES, self.tun)

    def __str__(self) -> str:
        return f"udp proxy of {self.tun} on {self.local}:{self.port}"

    def words(self) -> list[str]:
        """Return the settings as command line arguments of the proxy."""
        accept = "any" if self.accept_any else "peers"
        numbers = (self.local, self.port, self.address, self.mtu)
        return [self.version, self.tun, *map(str, numbers), accept, self.data_plane]

    @classmethod
    def of(cls, words: Sequence[str]) -> UdpProxy:
        """Parse the settings. Raises ``ValueError`` for those of an incompatible version."""
        version, tun, local, port, address, mtu, accept, data_plane = words
        return cls(
            tun,
            IPv4Address(local),
            int(port),
            IPv4Address(address),
            int(mtu),
            accept == "any",
            data_plane,
            version,
        )


class ProxyPeer(Struct, frozen=True, gc=False):
    """A peer of the proxy of ``tun``: packets to ``subnet`` are sent to ``endpoint``."""

    kind: ClassVar[Kind] = Kind.REMOTE
    tun: str
    subnet: IPv4Network
    endpoint: IPv4Address

    @property
    def key(self) -> Key:
        return (PROXY_PEERS, self.tun, int(self.subnet.network_address), self.subnet.prefixlen)

    def __str__(self) -> str:
        return f"peer {self.subnet} at {self.endpoint} in the proxy of {self.tun}"
