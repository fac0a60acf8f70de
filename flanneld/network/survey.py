"""The facts about this host that the choice of the uplink rests on, read from the kernel."""

from __future__ import annotations

import logging
from ipaddress import ip_network

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.host import HostView
from flanneld.network.interface import AddressFact, DefaultRoute, HostFacts, LinkFact, RouteFact
from flanneld.network.kernel import Kernel
from flanneld.network.rtnl import SeenAddress

log = logging.getLogger(__name__)

# linux/if_addr.h; for IPv4 the bit of a temporary address means a secondary one.
_IFA_F_TEMPORARY, _IFA_F_DADFAILED, _IFA_F_DEPRECATED = 0x01, 0x08, 0x20
_IFA_F_TENTATIVE, _IFA_F_PERMANENT = 0x40, 0x80


def survey(kernel: Kernel, families: tuple[Family, ...], *, default_routes: bool) -> HostFacts:
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


def route_to(kernel: Kernel, target: IPAddress) -> RouteFact | None:
    """Which way the kernel would send a packet."""
    way = kernel.way_to(target)
    return RouteFact(way.index, way.source, way.gateway) if way else None


def connected_networks(kernel: HostView, families: tuple[Family, ...]) -> tuple[IPNetwork, ...]:
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
