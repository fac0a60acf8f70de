"""ipip backend: containers' packets travel inside IPv4 packets, with 20 bytes of header.

One tunnel device from our address to any host. The gateway of a route through it names the host to
which the kernel sends: an onlink route to a peer's subnet, through the peer's public IP, is all it takes.

Device, MTU, addresses and routes are those of upstream's backend/ipip, which knows IPv4 only.
"""

from __future__ import annotations

from collections.abc import Iterator

from flanneld.backends.contract import Host, peers_public_ip, require_type
from flanneld.compat.json import GoJsonError
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Address, Ipip, Resource, Route

TYPE = "ipip"
DEVICE = "flannel.ipip"

#: The outer IPv4 header.
OVERHEAD = 20
#: Bytes that every link must carry in one piece (RFC 791).
_SMALLEST_MTU = 68


def build(config: Config, host: Host) -> IpipBackend:
    """Return the backend. Raises ``Fatal`` for an unsupported config."""
    if config.families != (4,):
        raise Fatal("ipip carries IPv4 only", "set EnableIPv6 to false and EnableIPv4 to true, or use vxlan")
    try:
        direct_routing = config.backend.boolean("DirectRouting", False)
    except GoJsonError as error:
        raise Fatal(f"the network config is wrong: {error}", "correct Backend in the store") from None
    uplink = host.uplink
    if uplink.address is None:
        raise Fatal(f"{uplink.name} has no IPv4 address", "give it one")
    mtu = uplink.mtu - OVERHEAD
    if mtu < _SMALLEST_MTU:
        raise Fatal(
            f"an uplink MTU of {uplink.mtu} leaves {mtu} bytes inside ipip", f"raise the MTU of {uplink.name}"
        )
    return IpipBackend(host, Ipip(DEVICE, uplink.address, mtu), direct_routing=direct_routing)


class IpipBackend:
    """Backend with one device for all peers. DirectRouting skips it for peers on the uplink's link."""

    def __init__(self, host: Host, device: Ipip, *, direct_routing: bool) -> None:
        self._host = host
        self._device = device
        self._direct_routing = direct_routing

    @property
    def mtu(self) -> int:
        return self._device.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._host.uplink.public_ip, backend_type=TYPE)

    def claims(self) -> tuple[str, ...]:
        return (f"device {DEVICE}",)

    def local(self, own: Lease) -> Iterator[Resource]:
        """Yield the device with the base address of our subnet, the source address of this host's packets."""
        yield self._device
        if own.subnet is not None:
            yield Address(DEVICE, own.subnet.network_address)

    def peer(self, _own: Lease, lease: Lease) -> Iterator[Resource]:
        lease = require_type(lease, TYPE)
        if lease.subnet is None:
            return
        remote = peers_public_ip(lease, 4, self._host.uplink)
        link = self._host.link_to(remote) if self._direct_routing else None
        yield Route(lease.subnet, link or DEVICE, remote, onlink=True)
