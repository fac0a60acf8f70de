"""What a data plane is, and what it is given."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import Protocol

from msgspec import Struct


class Plane(Protocol):
    """Carries packets between a TUN and a UDP socket, in threads or a loop of its own."""

    name: str

    def set_peer(self, subnet: IPv4Network, endpoint: IPv4Address) -> None:
        """Add or replace a peer; while traffic flows, too."""
        ...

    def drop_peer(self, subnet: IPv4Network) -> None:
        """Forget a peer; one that is not known is fine."""
        ...

    def run(self) -> None:
        """Carry packets until ``stop``. Raises ``OSError`` when the TUN has gone."""
        ...

    def stop(self) -> None:
        """Let ``run`` return soon; from any thread or a signal handler."""
        ...

    def counters(self) -> dict[str, int]:
        """What was carried and what was dropped, and why."""
        ...


class Wire(Struct, frozen=True, gc=False):
    """The two ends of a plane.

    ``socket`` is the descriptor of a bound UDP socket on which no option is set yet, ``address`` the
    TUN's, ``port`` the peers' UDP port. With ``accept_any`` datagrams are taken from anybody, else only
    from the public IPs of known peers.
    """

    tun: str
    socket: int
    address: IPv4Address
    mtu: int
    port: int
    accept_any: bool
