"""Resources of the backends for clouds (pure)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

from flanneld.state.resources import Key, Kind

#: Names of the tables.
ROUTES, FORWARDING = "cloud-routes", "cloud-forwarding"


class CloudRoute(Struct, frozen=True, gc=False):
    """Route in a cloud's table. ``table`` is empty for the table of the node's own subnet.

    ``via`` is this node's address, or the cloud's name of another next hop.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    destination: IPv4Network
    via: str
    table: str = ""

    @property
    def key(self) -> Key:
        return (ROUTES, self.table, str(self.destination))

    def __str__(self) -> str:
        where = f"in {self.table}" if self.table else "in this node's table"
        return f"cloud route {self.destination} via {self.via} {where}"


class Forwarding(Struct, frozen=True, gc=False):
    """Permission of a cloud for this node to send and receive packets of containers."""

    kind: ClassVar[Kind] = Kind.REMOTE
    address: IPv4Address
    allowed: bool = True

    @property
    def key(self) -> Key:
        return (FORWARDING, "allowed")

    def __str__(self) -> str:
        return f"permission to forward at {self.address}" + ("" if self.allowed else ", which is not given")
