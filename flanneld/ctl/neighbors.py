"""Neighbours of this host: who answers ARP or NDP for an address, and which MAC addresses are fixed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from flanneld.ctl.paths import BRIEFLY, ELSEWHERE, PathToPeer
from flanneld.diagnostics.status import Status, addresses, known
from flanneld.model import FAMILIES, IPAddress, family_of
from flanneld.network import interfaces
from flanneld.network.host import HostView
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import (
    IFA_F_DADFAILED,
    NUD_PERMANENT,
    NUD_VALID,
    RTM_GETNEIGH,
    decode_neighbor,
    decode_unresolved,
    neighbors_request,
)
from flanneld.state.resources import Neighbor


def unresolved(nodes: Iterable[IPAddress]) -> Iterator[tuple[str, str]]:
    """Yield those nodes whose next hop answered neither ARP nor NDP for a packet just sent, with that hop."""
    view = HostView()
    for node in nodes:
        way = view.look_up_route(node)
        hop = (way.gateway or node) if way is not None else None
        if way is not None and hop is not None and is_mute(view, hop, way.index):
            yield str(node), str(hop)


def is_mute(view: HostView, hop: IPAddress, index: int) -> bool:
    """Return True for a neighbour on an interface that answered neither ARP nor NDP."""
    seen = view.dump(RTM_GETNEIGH, neighbors_request(family_of(hop), index))
    return any(decode_unresolved(*item) == hop for item in seen)


class Claim(Struct, frozen=True, gc=False):
    """An address of this node or of one that loses packets, and the MAC addresses of the hosts that have it.

    For an IPv6 address of this node the kernel tells that another host has it, but no MAC. ``length`` is
    of the prefix.
    """

    address: IPAddress
    macs: frozenset[str] = frozenset()
    length: int = 32
    #: True for a node that answers all echoes, and for the router.
    answers: bool = False


def claims(
    told: Status, paths: Sequence[PathToPeer], passing: Collection[tuple[str, int]]
) -> Iterator[Claim]:
    """Yield who has our addresses on the uplink, and those of nodes; none while all packets are answered."""
    lossy = {
        each.peer
        for each in paths
        if (each.carried != each.required or each.is_losing) and each.end not in passing
    }
    uplink = known(told.uplink)
    if lossy and uplink:
        view, ours, own = HostView(), addresses(uplink.addresses), told.own_subnets
        index = interfaces.index_of(uplink.name)
        nodes = {each.target: each.peer for each in paths if each.name == "underlay"}
        router = view.look_up_route(ELSEWHERE[4])
        ways = ((each, view.look_up_route(each)) for each in nodes)
        # ARP finds a target that needs no router.
        asked = [*ours, *(each for each, way in ways if way and (way.gateway, way.index) == (None, index))]
        asked += [router.gateway] if router and router.gateway and router.index == index else []
        with suppress(OSError):
            for address, macs in interfaces.holders(uplink.name, asked, BRIEFLY).items():
                is_lossy = address in ours or nodes.get(address) in lossy
                yield Claim(address, frozenset(macs), answers=not is_lossy)
        link = view.link(uplink.name)
        # No answer of a clone with our MAC address gets here, but its own requests do.
        for at in neighbors(view, [link], NUD_VALID) if link else ():
            if link and at.mac == link.mac:
                yield Claim(at.address, frozenset({at.mac}))
        for seen in view.addresses(6):
            is_ours = seen.address in ours or any(seen.address in net for net in own)
            if is_ours and seen.flags & IFA_F_DADFAILED:
                yield Claim(seen.address, length=seen.length)


def neighbors(view: HostView, devices: Iterable[SeenLink], states: int = NUD_PERMANENT) -> Iterator[Neighbor]:
    """Yield the neighbours on some devices in a state; by default their MAC addresses are fixed by hand."""
    for link in devices:
        for family in FAMILIES:
            for item in view.dump(RTM_GETNEIGH, neighbors_request(family, link.index)):
                seen = decode_neighbor(*item, {link.index: link.name}.get, states)
                if isinstance(seen, Neighbor):
                    yield seen
