"""alloc: a subnet for this node, and no way to any other: something else moves the packets.

The lease has the public IP and neither a type nor data, as upstream's backend/alloc writes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from flanneld.backends.contract import Host
from flanneld.config import Config
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Resource


class Alloc:
    """Takes a lease. Makes no device and no route."""

    has_peers = False

    def __init__(self, config: Config, host: Host) -> None:
        del config  # there is nothing to choose
        self._uplink = host.uplink

    @property
    def mtu(self) -> int:
        return self._uplink.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip, self._uplink.public_ipv6)

    def local(self, own: Lease) -> Iterator[Resource]:
        """Nothing: the packets are carried by others."""
        del own
        return iter(())

    def peer(self, own: Lease, lease: Lease, /) -> Iterator[Resource]:
        """Nothing, whatever the peer announces."""
        del own, lease
        return iter(())
