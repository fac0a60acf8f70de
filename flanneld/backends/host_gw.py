"""Backends without a tunnel: host-gw, and alloc, which has no routes either.

With host-gw each node is the gateway to its subnet on a shared link, as in upstream's backend/hostgw: a route
to each peer's subnet through the peer's public IP. With alloc another program routes the packets to peers.
Its lease has the public IP and neither a type nor data, as upstream's backend/alloc writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flanneld.backends.contract import Backend, Host, peers_public_ip, require_type
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Resource, Route

TYPE = "host-gw"


class HostGw(Backend):
    """Backend for nodes on one link, without address translation between them."""

    def __init__(self, config: Config, host: Host) -> None:
        self._families = config.families
        self._uplink = host.uplink
        for family in self._families:
            local, public = host.uplink.local(family), host.uplink.public(family)
            if local != public:
                raise Fatal(
                    f"host-gw cannot announce {public}: {host.uplink.name} has {local}",
                    "drop --public-ip, or use the vxlan backend across address translation",
                )

    @property
    def mtu(self) -> int:
        return self._uplink.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip, self._uplink.public_ipv6, TYPE)

    def peer(self, _own: Lease, lease: Lease, /) -> Iterator[Resource]:
        lease = require_type(lease, TYPE)
        for family in self._families:
            subnet = lease.net(family)
            if subnet is not None:
                yield Route(subnet, self._uplink.name, peers_public_ip(lease, family, self._uplink))


class Alloc(Backend):
    """Backend with a lease, and without devices or routes."""

    has_peers = False

    def __init__(self, config: Config, host: Host) -> None:
        del config  # there are no options
        self._uplink = host.uplink

    @property
    def mtu(self) -> int:
        return self._uplink.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip, self._uplink.public_ipv6)

    def peer(self, own: Lease, lease: Lease, /) -> Iterable[Resource]:
        """Return no objects: another program routes the packets."""
        del own, lease
        return ()
