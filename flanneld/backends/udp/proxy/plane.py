"""Interface of a data plane, and its parameters."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Protocol

from msgspec import Struct


class Plane(Protocol):
    """Data plane: carries packets between a TUN and a UDP socket, in its own threads or loop."""

    name: str

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        """Add or replace a peer, also while traffic flows."""
        ...

    def drop_peer(self, subnet: IPv4Network) -> None:
        """Remove a peer. A missing one is no error."""
        ...

    def run(self) -> None:
        """Carry packets until ``stop``. Raises ``OSError`` if the TUN is gone."""
        ...

    def stop(self) -> None:
        """Make ``run`` return soon. May be called from any thread or a signal handler."""
        ...

    def counters(self) -> dict[str, int]:
        """Return the counters of carried packets, and of dropped ones by reason."""
        ...


class Wire(Struct, frozen=True, gc=False):
    """Endpoints of a data plane.

    - ``socket`` is the descriptor of a bound UDP socket without any options set.
    - ``address`` is the TUN's, ``port`` the peers' UDP port.
    - ``accept_any`` accepts datagrams from any source, otherwise only from the public IPs of known peers.
    """

    tun: str
    socket: int
    address: IPv4Address
    mtu: int
    port: int
    accept_any: bool
