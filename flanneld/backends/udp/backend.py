"""udp backend: packets are encapsulated in plain UDP by a user-space process on a TUN device.

It is for hosts whose kernel or network supports nothing better. Wire format, port, device and addresses are
those of upstream's backend/udp. Lease attributes contain only the public IP: upstream writes no backend type
and checks none.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

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
)
from flanneld.backends.udp.control import DATA_PLANES, ProxyPeer, UdpProxy
from flanneld.compat.flags import quoted
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs
from flanneld.state.resources import Address, Resource, Route, Tun
from flanneld.state.table import Table

_PORT = 8285


class UdpConfig(Struct, frozen=True, gc=False):
    """The Backend object of the network config."""

    port: int
    plane: str
    accept_any: bool


def _data_plane(text: str) -> str:
    plane = text.lower()
    if plane not in DATA_PLANES:
        raise Fatal(f"Backend.DataPlane is {quoted(plane)}", f"set it to one of: {', '.join(DATA_PLANES)}")
    if plane == "native":
        from flanneld.backends.udp.proxy import native  # imported only if the config insists on it

        missing = native.available()
        if missing is not None:
            raise Fatal(f"there is no native data plane: {missing}", "or set Backend.DataPlane to auto")
    return plane


class Udp(Backend):
    """Backend with one TUN device that leads to all peers.

    It carries IPv4 only, as upstream; IPv6 networks are ignored.
    """

    options = (
        Option("Port", "port", _PORT, least=1),
        Option("DataPlane", "plane", "auto", made=_data_plane),
        Option("AcceptAnySource", "accept_any", False),
    )
    #: The outer IPv4 and UDP headers.
    overhead: ClassVar[Overhead] = {4: 28}
    flows = (OuterPackets("udp", _PORT, "Port"),)
    #: Its leases name no type, and every lease leads to a peer.
    stands_alone = True

    def __init__(self, config: Config, host: Host) -> None:
        settings, uplink = UdpConfig(**read_options(config, self.options)), host.uplink
        (pool,) = carried(Udp, config)
        if uplink.address is None:
            raise Fatal(f"{uplink.name} has no IPv4 address", "give it one")
        assert isinstance(pool.network, IPv4Network)
        self._mtu = inner_mtu(uplink, self.overhead[4], 4, "UDP")
        self._uplink = uplink
        self._local = uplink.address
        self._network = pool.network
        self._config = settings
        self._tun = host.tun_for(pool.network)

    @property
    def mtu(self) -> int:
        return self._mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip)

    def claims(self) -> tuple[str, ...]:
        return (f"UDP port {self._config.port}",)

    def local(self, own: Lease, /) -> Iterator[Resource]:
        """Yield the device, its address, the route to the whole network, and the udp proxy."""
        yield Tun(self._tun, self.mtu)
        if own.subnet is None:
            return
        base = own.subnet.network_address
        yield Address(self._tun, base)
        yield Route(self._network, self._tun)
        yield UdpProxy(
            tun=self._tun,
            local=self._local,
            port=self._config.port,
            address=base,
            mtu=self.mtu,
            accept_any=self._config.accept_any,
            data_plane=self._config.plane,
        )

    def peer(self, _own: Lease, lease: Lease, /) -> Iterator[Resource]:
        if lease.subnet is None:
            return
        public_ip = peers_public_ip(lease, 4, self._uplink)
        assert isinstance(public_ip, IPv4Address)
        yield ProxyPeer(self._tun, lease.subnet, public_ip)

    def tables(self) -> tuple[Table, ...]:
        from flanneld.backends.udp.client import ProxyClient  # imported only by users of this backend
        from flanneld.backends.udp.tables import ProxyPeerTable, ProxyTable

        client = ProxyClient(self._tun)
        return (ProxyTable(client), ProxyPeerTable(client, self._tun))
