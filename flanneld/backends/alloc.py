"""alloc backend: only a lease for this node. Another program routes the packets to peers.

The lease has the public IP and neither a type nor data, as upstream's backend/alloc writes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from flanneld.backends.contract import Backend, Host
from flanneld.config import Config
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Resource


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
