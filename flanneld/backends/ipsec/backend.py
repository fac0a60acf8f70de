"""ipsec backend: the kernel encrypts packets between nodes, with keys negotiated by strongSwan's charon.

Options, lease data, policies, connections and MTU are those of upstream's backend/ipsec. Two things differ.
Packets without a tunnel policy are blocked instead of leaving unencrypted. charon and its keys are
reconciled.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

from msgspec import Struct

from flanneld.backends.contract import (
    Backend,
    Host,
    KernelFeature,
    Option,
    OuterPackets,
    Overhead,
    carried,
    inner_mtu,
    peers_public_ip,
    read_options,
    require_type,
)
from flanneld.backends.ipsec.resources import Charon, IkeConnection, SharedKey
from flanneld.config import Config
from flanneld.errors import Fatal
from flanneld.model import Lease, LeaseAttrs, Secret
from flanneld.network.processes import NETLINK_XFRM
from flanneld.network.xfrm import MODULES, guards, tunnel_policies
from flanneld.state.resources import Address, Blackhole, Dummy, Resource, Route
from flanneld.state.table import Table

TYPE = "ipsec"
DEVICE = "flannel-ipsec"
#: Bytes of the UDP header.
UDP_OVERHEAD = 8
#: UDP ports of IKE: the first messages, and all others, with ESP behind NAT (RFC 7296, RFC 4555, RFC 3948).
IKE_PORTS = (500, 4500)
#: Minimum bytes of a PSK, as in upstream.
SHORTEST_PSK = 96
_ESP_PROPOSAL = "aes128gcm16-sha256-prfsha256-ecp256"


class IpsecConfig(Struct, frozen=True, gc=False):
    """The Backend object of the network config."""

    psk: Secret
    udp_encap: bool
    esp_proposal: str

    @property
    def digest(self) -> str:
        """Return a digest of all options: SAs negotiated with others must not go on."""
        text = f"{self.udp_encap} {self.esp_proposal} ".encode()
        return sha256(text + self.psk.value).hexdigest()


def _psk(text: str) -> Secret:
    """Return the PSK. Raises ``Fatal`` for a short one; the message does not contain it."""
    key = text.encode("utf-8", "replace")
    if len(key) < SHORTEST_PSK:
        raise Fatal(
            f"config error, password should be at least {SHORTEST_PSK} characters long",
            "set Backend.PSK, as from: openssl rand -hex 48",
        )
    return Secret(key)


def _esp_proposal(text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise Fatal("Backend.ESPProposal is no proposal", "write it as in strongSwan's documentation")
    return text


class Ipsec(Backend):
    """Backend with XFRM policies of the kernel, and charon.

    Policies apply only to packets that have a route. So the routes to peers lead into a device that drops
    every packet that no policy has encrypted. The device also gives this host's packets a source address
    inside the policies.
    """

    options = (
        Option("PSK", "psk", "", made=_psk),
        Option("UDPEncap", "udp_encap", False),
        Option("ESPProposal", "esp_proposal", _ESP_PROPOSAL, made=_esp_proposal),
    )
    #: Upstream's: outer IPv4, SPI and sequence number, an IV of 16, at most 15 of padding, two of trailer, an
    #: ICV of 16. UDPEncap adds the UDP header.
    overhead: ClassVar[Overhead] = {4: 77}
    flows = (*(OuterPackets("udp", port) for port in IKE_PORTS), OuterPackets("esp"))
    kernel_features = (KernelFeature("XFRM", MODULES, NETLINK_XFRM),)
    encrypts = True
    refuses_others = True

    def __init__(self, config: Config, host: Host) -> None:
        self._settings = settings = IpsecConfig(**read_options(config, self.options))
        self._uplink = uplink = host.uplink
        self._is_shared = host.is_shared
        self._call = host.call
        (pool,) = carried(Ipsec, config)
        if uplink.address is None or uplink.public_ip is None:
            raise Fatal(f"{uplink.name} has no IPv4 address", "give it one")
        assert isinstance(pool.network, IPv4Network)
        self._network = pool.network
        self._local = uplink.address
        self._public = uplink.public_ip
        overhead = self.overhead[4] + (UDP_OVERHEAD if settings.udp_encap else 0)
        self._mtu = inner_mtu(uplink, overhead, 4, "ESP")

    @property
    def mtu(self) -> int:
        return self._mtu

    def attributes(self) -> LeaseAttrs:
        return LeaseAttrs(self._uplink.public_ip, backend_type=TYPE)

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of the kernel's policies, of charon, and of its keys and connections."""
        # Imported only by users of this backend.
        from flanneld.backends.ipsec.tables import CharonTable, ConnectionTable
        from flanneld.network.xfrm_table import XfrmPolicyTable

        connections = ConnectionTable(self._network, self._call)
        charon = CharonTable(connections.note, self._settings.digest, self._call)
        return XfrmPolicyTable(self._network), charon, connections

    def local(self, own: Lease, /) -> Iterator[Resource]:
        """Yield the guards first, which block packets to no peer. Then charon, and our own key.

        The policies among the guards would also block the packets of another backend beside this one.
        """
        yield Blackhole(self._network, unreachable=True)
        yield Dummy(DEVICE, self._mtu)
        if own.subnet is not None:
            yield Address(DEVICE, own.subnet.network_address)
        if not self._is_shared:
            yield from guards(self._network, own.subnet)
        yield Charon()
        yield SharedKey(self._public, self._settings.psk)

    def peer(self, own: Lease, lease: Lease, /) -> Iterator[Resource]:
        require_type(lease, TYPE)
        if lease.subnet is None or own.subnet is None:
            return
        remote = peers_public_ip(lease, 4, self._uplink)
        assert isinstance(remote, IPv4Address)
        yield from tunnel_policies(
            own.subnet, lease.subnet, self._local, remote, accepts_others=self._is_shared
        )
        yield Route(lease.subnet, DEVICE)
        yield SharedKey(remote, self._settings.psk)
        yield IkeConnection(
            self._public,
            self._local,
            own.subnet,
            lease.subnet,
            remote,
            self._settings.esp_proposal,
            self._settings.udp_encap,
        )
