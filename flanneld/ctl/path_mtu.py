"""Path MTU to peers, measured and compared with the required size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import Any

from msgspec import Struct

from flanneld.compat.flags import quoted
from flanneld.ctl.snapshot import values
from flanneld.errors import FlannelError
from flanneld.model import IPAddress
from flanneld.state.resources import Address

#: Peers that the doctor probes.
_FEW = 2


class Path(Struct, frozen=True, gc=False):
    """Path. ``required`` and ``carried`` are bytes with the IP header; None without an answer."""

    name: str
    target: IPAddress
    required: int
    carried: int | None

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
            return f"larger packets are lost or taken apart: set Backend.MTU to {self.carried} or less"
        return "larger packets of containers are lost"


#: Finds the MTU to a target, at most the wanted one.
Find = Callable[[IPAddress, int], int | None]


def peer_named(name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the peer with this subnet, public IP or container's address. Raises ``FlannelError``."""
    try:
        net = ip_network(name, strict=False)
    except ValueError:
        raise FlannelError(f"{quoted(name)} is no address and no subnet", "give one of a peer") from None
    for peer in document.get("peers", ()):
        subnets = map(ip_network, peer["subnets"])
        if str(net.network_address) in peer["public_ips"] or any(
            each.version == net.version and net.network_address in each for each in subnets
        ):
            return dict(peer)
    raise FlannelError(f"no peer is known at {name}", "flannelctl peers lists them")


def paths(peer: Mapping[str, Any], document: Mapping[str, Any], find: Find) -> Iterator[Path]:
    """Yield the path between the nodes and, if the peer's end of the tunnel answers, that through it."""
    for text in peer["public_ips"]:
        yield _path("underlay", ip_address(text), (document.get("uplink") or {})["mtu"], find)
    ours = {each.address for each in values(document.get("local")) if isinstance(each, Address)}
    own = {
        net.version
        for text in (document.get("lease") or {}).get("subnets", ())
        if (net := ip_network(text)).network_address in ours
    }
    for net in map(ip_network, peer["subnets"]):
        if net.version in own:
            yield _path("tunnel", net.network_address, document["mtu"], find)


def sample(document: Mapping[str, Any], find: Find) -> Iterator[Path]:
    """Yield the paths to a few reachable peers."""
    reached = [peer for peer in document.get("peers", ()) if peer["state"] == "in the kernel"]
    for peer in reached[:_FEW]:
        yield from paths(peer, document, find)


def _path(name: str, target: IPAddress, required: int, find: Find) -> Path:
    return Path(name, target, required, find(target, required))
