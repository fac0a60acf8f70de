"""Path MTU to peers, measured and compared with the required size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import ip_network

from msgspec import Struct

from flanneld.backends.contract import Backend
from flanneld.backends.registry import described
from flanneld.compat.flags import quoted
from flanneld.diagnostics.status import PeerStatus, Status, known, resources
from flanneld.errors import FlannelError
from flanneld.model import IPAddress
from flanneld.state.resources import Address

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
            return f"larger packets are lost or taken apart: set {self.setting} to {self.carried} or less"
        return "larger packets of containers are lost"


#: Finds the MTU to a target, at most the wanted one.
Find = Callable[[IPAddress, int], int | None]
#: Finds, for many targets at once, whether the wanted size is carried, and else whether anything is.
Glance = Callable[[Sequence[tuple[IPAddress, int]]], Sequence[int | None]]


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


def paths(peer: PeerStatus, told: Status, find: Find) -> Iterator[PathToPeer]:
    """Yield the path between the nodes and, if the peer's end of the tunnel answers, that through it."""
    for name, target, required in _ends(peer, told):
        yield PathToPeer(name, target, required, find(target, required), peer.subnets[0], _setting(told))


def sample(told: Status, glance: Glance) -> list[PathToPeer]:
    """Return the paths to a few peers, first to those that did not answer the last probe."""
    reached = [peer for peer in told.each_peer if peer.state == "in the kernel"]
    reached.sort(key=lambda peer: (probe := known(peer.probe)) is None or probe.rtt is not None)
    return at_a_glance(reached[:_FEW], told, glance)


def at_a_glance(peers: Iterable[PeerStatus], told: Status, glance: Glance) -> list[PathToPeer]:
    """Return the paths to some peers, all probed at once."""
    ends = [(*end, peer.subnets[0]) for peer in peers for end in _ends(peer, told)]
    setting = _setting(told)
    carried = glance([(target, required) for _, target, required, _ in ends])
    return [
        PathToPeer(name, target, required, size, peer, setting)
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
    """Yield name, target and wanted size of each path to a peer."""
    uplink, mtu = known(told.uplink), known(told.mtu)
    if uplink:
        yield from (("underlay", address, uplink.mtu) for address in peer.addresses)
    ours = {each.address for each in resources(told.local) if isinstance(each, Address)}
    own = {net.version for net in told.own_subnets if net.network_address in ours}
    for net in peer.networks:
        if mtu and net.version in own:
            yield "tunnel", net.network_address, mtu
