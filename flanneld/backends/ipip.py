"""ipip backend: containers' packets travel inside IPv4 packets, with 20 bytes of header.

One tunnel device from our address to any host. The gateway of a route through it names the host to
which the kernel sends: an onlink route to a peer's subnet, through the peer's public IP, is all it takes.

Device, MTU, addresses and routes are those of upstream's backend/ipip, which knows IPv4 only. In dual stack
it serves IPv4, as upstream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from flanneld.backends.contract import (
    Backend,
    Host,
    Option,
    OuterPackets,
    Overhead,
    carried,
    inner_mtu,
    peers_public_ip,
    read_options,
    require_type,
)
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Address, Ipip, Resource, Route

TYPE = "ipip"
DEVICE = "flannel.ipip"


class IpipBackend(Backend):
    """Backend with one device for all peers. DirectRouting skips it for peers on the uplink's link."""

    options = (Option("DirectRouting", "direct_routing", False),)
    #: The outer IPv4 header.
    overhead: ClassVar[Overhead] = {4: 20}
    flows = (OuterPackets("ipencap"),)

    def __init__(self, config: Config, host: Host) -> None:
        carried(IpipBackend, config)
        self._direct_routing: bool = read_options(config, self.options)["direct_routing"]
        uplink = host.uplink
        if uplink.address is None:
            raise Fatal(f"{uplink.name} has no IPv4 address", "give it one")
        self._host = host
        self._device = Ipip(DEVICE, uplink.address, inner_mtu(uplink, self.overhead[4], 4, "ipip"))

    @property
    def mtu(self) -> int:
        return self._device.mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._host.uplink.public_ip, backend_type=TYPE)

    def claims(self) -> tuple[str, ...]:
        return (f"device {DEVICE}",)

    def local(self, own: Lease, /) -> Iterator[Resource]:
        """Yield the device with the base address of our subnet, the source address of this host's packets."""
        yield self._device
        if own.subnet is not None:
            yield Address(DEVICE, own.subnet.network_address)

    def peer(self, _own: Lease, lease: Lease, /) -> Iterator[Resource]:
        lease = require_type(lease, TYPE)
        if lease.subnet is None:
            return
        remote = peers_public_ip(lease, 4, self._host.uplink)
        link = self._host.link_to(remote) if self._direct_routing else None
        yield Route(lease.subnet, link or DEVICE, remote, onlink=True)
