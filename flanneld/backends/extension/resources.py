"""Resources of the extension backend: the results of commands (pure)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import ClassVar

from msgspec import Struct

from flanneld.model import IPNetwork, name_of
from flanneld.state.resources import Key, Kind

#: Names of the tables.
STARTUP, PEERS = "extension-startup", "extension-peers"


class Startup(Struct, frozen=True, gc=False):
    """Parameters of this node for PostStartupCommand and ShutdownCommand."""

    kind: ClassVar[Kind] = Kind.REMOTE
    network: IPv4Network | None
    ipv6_network: IPv6Network | None
    subnet: IPv4Network | None
    ipv6_subnet: IPv6Network | None
    public_ip: IPv4Address | None
    public_ipv6: IPv6Address | None

    @property
    def key(self) -> Key:
        return (STARTUP, "post-startup")

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the commands."""
        return _variables(
            NETWORK=self.network,
            IPV6NETWORK=self.ipv6_network,
            SUBNET=self.subnet,
            PUBLIC_IP=self.public_ip,
            IPV6SUBNET=self.ipv6_subnet,
            PUBLIC_IPV6=self.public_ipv6,
        )

    def __str__(self) -> str:
        return f"extension startup of {name_of((self.subnet, self.ipv6_subnet))}"


class PeerSetup(Struct, frozen=True, gc=False):
    """Parameters of a peer for SubnetAddCommand and SubnetRemoveCommand.

    ``data`` is their stdin. ``stands`` is False if SubnetAddCommand may not have taken effect.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    ipv4_subnet: IPv4Network | None = None
    ipv6_subnet: IPv6Network | None = None
    public_ip: IPv4Address | None = None
    public_ipv6: IPv6Address | None = None
    data: str = ""
    stands: bool = True

    @property
    def subnet(self) -> IPNetwork | None:
        """The subnet whose unreadable lease keeps this resource."""
        return self.ipv4_subnet or self.ipv6_subnet

    @property
    def key(self) -> Key:
        return (PEERS, self.name)

    @property
    def name(self) -> str:
        return name_of((self.ipv4_subnet, self.ipv6_subnet))

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the commands."""
        return _variables(
            SUBNET=self.ipv4_subnet,
            PUBLIC_IP=self.public_ip,
            IPV6SUBNET=self.ipv6_subnet,
            PUBLIC_IPV6=self.public_ipv6,
        )

    def __str__(self) -> str:
        public = ", ".join(str(ip) for ip in (self.public_ip, self.public_ipv6) if ip)
        return f"extension peer {self.name} at {public}"


def _variables(**values: object) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}
