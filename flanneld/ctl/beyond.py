"""Beyond this node: containers of peers, and routers to other networks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct

from flanneld.ctl.neighbors import unresolved
from flanneld.ctl.nodes import told
from flanneld.ctl.paths import BRIEFLY, ELSEWHERE, PathToPeer
from flanneld.diagnostics.status import Status, known
from flanneld.model import Family, IPAddress
from flanneld.network import survey
from flanneld.network.bridges import MOST_TOLD
from flanneld.network.host import HostView
from flanneld.runtime import files


class LostWay(Struct, frozen=True, gc=False):
    """A default route by which packets get lost, as ip-route(8) shows it; and how that was seen."""

    family: Family
    route: str
    device: str
    evidence: str


#: Addresses far from ``ELSEWHERE`` (RFC 5737, RFC 9637): what leads to both leads to all other networks.
_FAR: Mapping[Family, IPAddress] = {4: ip_address("198.51.100.1"), 6: ip_address("3fff::1")}


def lost_ways(families: Iterable[Family]) -> Iterator[LostWay]:
    """Yield the default routes to a router that is not there.

    Many routers report no packet without hops, so that their silence alone tells nothing.
    """
    view = HostView()
    for family in families:
        target = ELSEWHERE[family]
        way, other = map(view.look_up_route, (target, _FAR[family]))
        route = view.matching_route(target)
        if way is None or other is None or route is None:
            continue
        # VPN clients cut the default route into halves, which take precedence.
        is_general = route.destination is None or route.destination.prefixlen <= 1
        if not is_general or (way.index, way.gateway) != (other.index, other.gateway):
            continue
        name = view.name_of(way.index) or ""
        with suppress(OSError):
            if not survey.passing([target], 1, BRIEFLY, 1) and (seen := _silence(name, target)):
                yield LostWay(family, f"{route.destination or 'default'} dev {name}", name, seen)


def _silence(name: str, target: IPAddress) -> str:
    """Return what shows that nothing takes packets for a target, just sent; empty if that cannot be told."""
    for _, router in unresolved([target]):
        return f"{router} answers no {'ARP' if target.version == 4 else 'neighbour discovery'}"
    received = files.number(Path(f"/sys/class/net/{name}/statistics/rx_packets"))
    return "" if received else f"nothing ever came in by {name}"


def containers_of_peers(status: Status, paths: Collection[PathToPeer], port: int) -> Iterator[PathToPeer]:
    """Yield the path to a container of each peer that answers on all paths, and names some; by family.

    The one that carries most stands for all: another may filter what it gets. Raises ``OSError``.
    """
    silent = {each.peer for each in paths if each.carried is None}
    tunnels = {each.peer for each in paths if each.name == "tunnel"}
    ends = {
        each.target: each.peer
        for each in paths
        if each.peer not in silent and (each.name == "tunnel" or each.peer not in tunnels)
    }
    mtu, asked = known(status.mtu) or 0, dict[IPAddress, str]()
    networks = {peer.subnets[0]: peer.networks for peer in (status.each_peer if ends else ())}
    for end, reply in survey.queries(ends, port, BRIEFLY, 1).items():
        for text in told(reply.facts).containers[:MOST_TOLD]:
            with suppress(ValueError):
                address = ip_address(text)
                if any(address in net and address != end for net in networks[ends[end]]):
                    asked[address] = ends[end]
    sizes = dict(zip(asked, survey.glance_at_mtu([(each, mtu) for each in asked]), strict=True))
    sizes |= dict.fromkeys(survey.reached([each for each, size in sizes.items() if not size], BRIEFLY), mtu)
    found: dict[tuple[str, int], list[PathToPeer]] = defaultdict(list)
    for address, peer in asked.items():
        found[peer, address.version].append(PathToPeer("container", address, mtu, sizes[address], peer))
    for some in found.values():
        yield max(some, key=lambda each: each.carried or 0)
