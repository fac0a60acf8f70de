"""Path MTU to peers, measured and compared with the required size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_network

from msgspec import Struct

from flanneld.backends.contract import Backend
from flanneld.backends.registry import described
from flanneld.compat.flags import quoted
from flanneld.ctl.nodes import our_addresses
from flanneld.diagnostics.status import PeerStatus, Status, known
from flanneld.errors import FlannelError
from flanneld.model import IPAddress

#: Peers that the doctor probes.
_FEW = 8


class PathToPeer(Struct, frozen=True, gc=False):
    """Path. ``required`` and ``carried`` are bytes with the IP header; None without an answer."""

    name: str
    target: IPAddress
    required: int
    carried: int | None
    #: The peer's first subnet.
    peer: str = ""
    #: The MTU to lower if the path carries less; this backend takes its own from it.
    setting: str = "Backend.MTU"
    #: Bytes that the outer headers take of this MTU.
    headers: int = 0

    @property
    def state(self) -> str:
        if self.carried is None:
            return "unknown"
        return "ok" if self.carried == self.required else "PROBLEM"

    @property
    def note(self) -> str:
        if self.carried is None:
            return "no answer: ICMP may be filtered, or nothing is there"
        if self.carried == self.required:
            return ""
        if self.name == "underlay":
            return f"larger packets are lost or taken apart: {self.remedy(self.carried)}"
        return f"larger packets of containers are lost: {self.remedy(self.carried + self.headers)}"

    def remedy(self, outer: int) -> str:
        """Return what makes packets between the nodes at most ``outer`` bytes long."""
        inside = f", which leaves {outer - self.headers} inside the tunnel" if self.headers else ""
        return f"set {self.setting} to {outer} or less{inside}; then {MADE_ANEW}"


#: What a new MTU takes: daemons read it when they start, and containers when they are made.
MADE_ANEW = "restart flanneld on all nodes, and make their containers anew"
#: Finds, for many targets at once, a size that each path carries, at most the wanted one.
Find = Callable[[Sequence[tuple[IPAddress, int]]], Sequence[int | None]]


def peer_named(name: str, told: Status) -> PeerStatus:
    """Return the peer with this subnet, public IP or container's address. Raises ``FlannelError``."""
    try:
        net = ip_network(name, strict=False)
    except ValueError:
        raise FlannelError(f"{quoted(name)} is no address and no subnet", "give one of a peer") from None
    for peer in told.each_peer:
        if str(net.network_address) in peer.public_ips or any(
            each.version == net.version and net.network_address in each for each in peer.networks
        ):
            return peer
    raise FlannelError(f"no peer is known at {name}", "flannelctl peers lists them")


def sample(told: Status, find: Find) -> list[PathToPeer]:
    """Return the paths to a few peers, first to those that did not answer the last probe."""
    reached = [peer for peer in told.each_peer if peer.state == "in the kernel"]
    reached.sort(key=lambda peer: (probe := known(peer.probe)) is None or probe.rtt is not None)
    return paths(reached[:_FEW], told, find)


def paths(
    peers: Sequence[PeerStatus], told: Status, find: Find, container: IPAddress | None = None
) -> list[PathToPeer]:
    """Return the paths to some peers, and to a ``container`` of the first, all probed at once.

    They are those between the nodes and, if the peer has an address in the overlay, that through the tunnel.
    """
    ends = [(*end, peer.subnets[0]) for peer in peers for end in _ends(peer, told)]
    if container is not None:
        ends.append(("container", container, known(told.mtu) or 0, peers[0].subnets[0]))
    setting, headers = _setting(told), described(told.backend or "").overhead
    carried = find([(target, required) for _, target, required, _ in ends])
    return [
        PathToPeer(name, target, required, size, peer, setting, headers.get(target.version, 0))
        for (name, target, required, peer), size in zip(ends, carried, strict=True)
    ]


def takes_mtu(backend: type[Backend]) -> bool:
    """Return True for a backend with the option MTU. The others take the MTU of the external interface."""
    return any(each.name == "MTU" for each in backend.options)


def _setting(told: Status) -> str:
    if takes_mtu(described(told.backend or "")):
        return "Backend.MTU"
    return f"the MTU of {told.uplink_name or 'the external interface'} on all nodes"


def _ends(peer: PeerStatus, told: Status) -> Iterator[tuple[str, IPAddress, int]]:
    """Yield name, target and wanted size of each path to a peer.

    Between the nodes that is the size of the tunnel's packets, which Backend.MTU may have made small.
    """
    uplink, mtu = known(told.uplink), known(told.mtu)
    overhead = described(told.backend or "").overhead
    for address in peer.addresses:
        headers = overhead.get(address.version)
        if uplink:
            outer = mtu + headers if mtu and headers else uplink.mtu
            yield "underlay", address, min(uplink.mtu, outer)
    ours = our_addresses(told)
    own = {net.version for net in told.own_subnets if net.network_address in ours}
    for net in peer.networks:
        if mtu and net.version in own:
            yield "tunnel", net.network_address, mtu
