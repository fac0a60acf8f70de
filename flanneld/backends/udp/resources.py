"""Resources of the udp backend: the packet pump and its peers (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

from flanneld import __version__
from flanneld.state.resources import Key, Kind

#: Names of the tables.
PUMPS, PUMP_PEERS = "udp-pump", "udp-peers"
#: Values of DataPlane: a certain data plane, or the best that works.
WISHES = ("auto", "native", "python")


class Pump(Struct, frozen=True, gc=False):
    """A packet pump with its settings. ``local`` and ``port`` are its socket's, ``address`` is the TUN's.

    ``wish`` is one of ``WISHES``. A pump of another ``version`` is replaced.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    tun: str
    local: IPv4Address
    port: int
    address: IPv4Address
    mtu: int
    accept_any: bool = False
    wish: str = "auto"
    version: str = __version__

    @property
    def key(self) -> Key:
        return (PUMPS, self.tun)

    def __str__(self) -> str:
        return f"packet pump of {self.tun} on {self.local}:{self.port}"

    def words(self) -> list[str]:
        """Return the settings as command line arguments of the pump."""
        accept = "any" if self.accept_any else "peers"
        numbers = (self.local, self.port, self.address, self.mtu)
        return [self.version, self.tun, *map(str, numbers), accept, self.wish]

    @classmethod
    def of(cls, words: Sequence[str]) -> Pump:
        """Parse the settings. Raises ``ValueError`` for those of an incompatible version."""
        version, tun, local, port, address, mtu, accept, wish = words
        return cls(
            tun, IPv4Address(local), int(port), IPv4Address(address), int(mtu), accept == "any", wish, version
        )


class PumpPeer(Struct, frozen=True, gc=False):
    """A peer of the pump of ``tun``: packets to ``subnet`` are sent to ``endpoint``."""

    kind: ClassVar[Kind] = Kind.REMOTE
    tun: str
    subnet: IPv4Network
    endpoint: IPv4Address

    @property
    def key(self) -> Key:
        return (PUMP_PEERS, self.tun, int(self.subnet.network_address), self.subnet.prefixlen)

    def __str__(self) -> str:
        return f"peer {self.subnet} at {self.endpoint} in the pump of {self.tun}"
