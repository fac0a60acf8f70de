"""Facts about this host from the kernel, for the uplink election and the safety checks of leases.

Also the choice of this daemon's TUN device: several daemons may share a host, each with its own network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cache
from ipaddress import ip_network

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.host import HostKernel
from flanneld.network.obstacles import HostNetworks, HostRoute, Obstacle, host_networks
from flanneld.network.routing import RTN_BROADCAST, SeenHostRoute
from flanneld.network.rtnetlink.domain import SeenRoute
from flanneld.network.rtnetlink.links import SeenLink, is_flannels
from flanneld.network.rtnetlink.messages import SeenAddress
from flanneld.network.uplink_election import AddressFact, DefaultRoute, HostFacts, LinkFact, RouteFact
from flanneld.state.resources import PROTO_FLANNEL, Route, Tun

log = logging.getLogger(__name__)

# linux/if_addr.h; for IPv4 the bit of a temporary address means a secondary one.
_IFA_F_TEMPORARY, _IFA_F_DADFAILED, _IFA_F_DEPRECATED = 0x01, 0x08, 0x20
_IFA_F_TENTATIVE, _IFA_F_PERMANENT = 0x40, 0x80


def survey(kernel: HostKernel, families: tuple[Family, ...], *, default_routes: bool) -> HostFacts:
    """Read interfaces and addresses, and the default routes if they are asked for. Raises ``OSError``."""
    return HostFacts(
        links=tuple(LinkFact(link.name, link.index, link.mtu, link.up) for link in kernel.links()),
        addresses=tuple(_fact(seen) for family in families for seen in kernel.addresses(family)),
        default_routes=tuple(
            DefaultRoute(family, index)
            for family in (families if default_routes else ())
            for index in kernel.default_routes(family)
        ),
    )


def route_to(kernel: HostKernel, target: IPAddress) -> RouteFact | None:
    """Return the way of a packet from this host; None if the kernel has none."""
    way = kernel.look_up_route(target)
    return RouteFact(way.index, way.source, way.gateway) if way else None


def connected_networks(kernel: HostKernel, families: tuple[Family, ...]) -> tuple[IPNetwork, ...]:
    """Return the networks of this host's addresses, flannel's devices included; none if unreadable."""
    try:
        seen = [each for family in families for each in kernel.addresses(family)]
    except OSError as failure:
        log.warning("Cannot read this host's addresses: %s; a new subnet may be one of its networks", failure)
        return ()
    return tuple({ip_network((each.address, each.length), strict=False) for each in seen})


def _fact(seen: SeenAddress) -> AddressFact:
    return AddressFact(
        index=seen.index,
        address=seen.address,
        permanent=bool(seen.flags & _IFA_F_PERMANENT),
        deprecated=bool(seen.flags & (_IFA_F_DEPRECATED | _IFA_F_DADFAILED)),
        temporary=seen.address.version == 6 and bool(seen.flags & _IFA_F_TEMPORARY),
        tentative=bool(seen.flags & _IFA_F_TENTATIVE),
    )


class Way(Struct, frozen=True, gc=False):
    """Way to an address: the destination of the route, None for a default one, and the device."""

    destination: IPNetwork | None
    device: str
    is_ours: bool


def way_to(kernel: HostKernel, target: IPAddress) -> Way | None:
    """Return the way to an address, None without one. It is ours by a route or a device of any flannel."""
    seen = kernel.matching_route(target)
    if seen is None:
        return None
    index, gateway = seen.hops[0]
    device, destination = kernel.name_of(index) or "", seen.destination
    is_ours = seen.protocol == PROTO_FLANNEL or _is_flannels(kernel, device)
    if destination is not None and not is_ours:
        route = SeenRoute(Route(destination, device, gateway), seen.protocol)
        is_ours = device in kernel.domain.links or kernel.domain.owns_route(route, adopt=True)
    return Way(destination, device, is_ours)


def read_host_networks(
    kernel: HostKernel,
    networks: Collection[IPNetwork],
    own: Collection[IPNetwork],
    links: Collection[str],
    store: Collection[Obstacle] = (),
) -> HostNetworks:
    """Read the host's own addresses, networks and gateways. Raises ``OSError``.

    ``networks`` are the cluster's, ``own`` this node's subnets, ``links`` our devices and ``store`` the
    addresses of the store that are obstacles. Devices of other flanneld instances on this host are ignored.
    """
    name_of = _namer(kernel, links)
    routes: list[HostRoute] = []
    local: list[tuple[IPNetwork, str]] = []
    broadcast: set[IPAddress] = set()
    ours = [index for index, name in kernel.names().items() if name in links]
    for family in {network.version for network in networks}:
        routes.extend(_route(seen, name_of) for seen in kernel.ways(family, ours))
        for kind, net, index in kernel.local(family):
            if kind == RTN_BROADCAST:
                broadcast.add(net.network_address)
            else:
                local.append((net, name_of(index)))
    return host_networks(routes, local, broadcast, networks=networks, own=own, store=store)


def _namer(kernel: HostKernel, links: Collection[str]) -> Callable[[int], str]:
    @cache
    def name_of(index: int) -> str:
        """Return an interface's name, nothing for one of flannel's or one that has just gone."""
        name = kernel.name_of(index)
        return "" if name is None or name in links or _is_flannels(kernel, name) else name

    return name_of


def _is_flannels(kernel: HostKernel, name: str) -> bool:
    link = kernel.link(name) if name.startswith("flannel") else None
    return link is not None and is_flannels(link)


def _route(seen: SeenHostRoute, name_of: Callable[[int], str]) -> HostRoute:
    hops = ((name_of(index), gateway) for index, gateway in seen.hops)
    return HostRoute(seen.destination, seen.protocol, tuple(hop for hop in hops if hop[0]))


#: Candidates, as in upstream, where the kernel takes the first free ``flannel%d``.
_NAMES = tuple(f"flannel{number}" for number in range(100))


def tun_for(kernel: HostKernel, networks: Sequence[IPNetwork]) -> str:
    """The device that an earlier run made for one of these networks, else the first free name.

    A device without an address is reused: its creator did not finish. Raises ``OSError``.
    """
    present = {link.name: link for link in kernel.links()}
    ours = (name for name in _NAMES if name in present and _leads_to(kernel, present[name], networks))
    free = (name for name in _NAMES if name not in present)
    return next(ours, None) or next(free)


def _leads_to(kernel: HostKernel, link: SeenLink, networks: Sequence[IPNetwork]) -> bool:
    if not isinstance(link.make, Tun):
        return False
    found = [seen.address for seen in kernel.addresses(4, link.index)]
    return not found or any(address in network for address in found for network in networks)
