"""Networks and addresses of this host that a peer's lease must not take over (pure).

A route to a peer's subnet harms the host if the subnet contains a connected network, of any metric. The same
holds for the host's addresses and gateways, and for the address of a store outside the cluster. A tunnel to a
public IP that is local here would loop. One to a broadcast address would reach every host of a LAN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from msgspec import Struct

from flanneld.model import IPAddress, IPNetwork, lies_in, network_around, overlap, single

#: linux/rtnetlink.h RTPROT_*: creators of connected routes: the kernel, router advertisements, DHCP.
_ON_LINK_PROTOCOLS = frozenset({2, 9, 16})
#: Longest prefix with a broadcast address: a /31 has none (RFC 3021).
_LONGEST_WITH_BROADCAST = 30

What = Literal["network", "address", "gateway", "store"]


class HostRoute(Struct, frozen=True, gc=False):
    """A unicast route of the main table, of any metric. A next hop is a device and an optional gateway."""

    destination: IPNetwork | None
    protocol: int
    hops: tuple[tuple[str, IPAddress | None], ...]

    def __str__(self) -> str:
        hops = (f"{f' via {gateway}' if gateway else ''} dev {device}" for device, gateway in self.hops)
        return f"{self.destination or 'default'}{' nexthop'.join(hops)}"


class Obstacle(Struct, frozen=True, gc=False):
    """A connected network, an address or a gateway of the host, or an address of the store.

    A ``route`` that leads there takes precedence over the route to a subnet around its destination. That of a
    gateway is the smallest network around it and all destinations behind it, None with a default route.
    """

    net: IPNetwork
    device: str
    what: What
    route: IPNetwork | None = None

    def __str__(self) -> str:
        if self.what == "network":
            return f"{self.device} is connected to {self.net}"
        if self.what == "gateway":
            return f"{self.net.network_address} is a gateway of this host through {self.device}"
        if self.what == "store":
            return f"{self.net.network_address} is an address of the store"
        is_single = self.net.prefixlen == self.net.max_prefixlen
        return f"{self.device} has {self.net.network_address if is_single else self.net}"


class HostNetworks(Struct, frozen=True, gc=False):
    """The host's own addresses and networks, derived from its routes.

    ``obstacles`` are those on devices of others. ``local`` are all of the host's addresses, and ``broadcast``
    the broadcast and network addresses of its links. ``detours`` are routes of others into the cluster's
    networks, but for those to a network on a link.
    """

    obstacles: frozenset[Obstacle] = frozenset()
    local: frozenset[IPNetwork] = frozenset()
    broadcast: frozenset[IPAddress] = frozenset()
    detours: frozenset[HostRoute] = frozenset()


def host_networks(
    routes: Iterable[HostRoute],
    local: Collection[tuple[IPNetwork, str]],
    broadcast: Iterable[IPAddress],
    *,
    networks: Collection[IPNetwork],
    own: Collection[IPNetwork],
    store: Iterable[Obstacle] = (),
) -> HostNetworks:
    """Return the host's networks. ``routes`` must not contain hops through flannel's devices.

    ``local`` are all local addresses, with an empty device if it is flannel's. ``store`` are the addresses of
    the store that are obstacles. Only obstacles that overlap ``networks``, the cluster's, and are outside
    ``own``, this node's subnets, are kept.
    """
    homes: dict[str, list[IPNetwork]] = {}
    for net, device in local:
        homes.setdefault(device, []).append(net)
    obstacles = {Obstacle(net, device, "address") for net, device in local if device} | {*store}
    broadcasts = set(broadcast)
    detours: set[HostRoute] = set()
    #: Prefix lengths of the networks around each gateway and what is behind it.
    gateways: dict[tuple[str, IPAddress], int] = {}
    for route in routes:
        if _is_connected(route, homes):
            assert route.destination is not None
            obstacles.add(Obstacle(route.destination, route.hops[0][0], "network"))
            broadcasts.update(_broadcasts(route.destination))
        elif _is_detour(route, networks, own):
            detours.add(route)
        for device, gateway in route.hops:
            if gateway is not None:
                reach = _common_length(gateway, route.destination)
                gateways[device, gateway] = min(gateways.get((device, gateway), reach), reach)
    for (device, gateway), reach in gateways.items():
        around = network_around(gateway, reach) if reach else None
        obstacles.add(Obstacle(single(gateway), device, "gateway", around))
    relevant = (each for each in obstacles if concerns(each.net, networks, own))
    # Loopback addresses are left to the backend: they are no host's public IP.
    addresses = frozenset(net for net, _ in local if not net.is_loopback)
    return HostNetworks(frozenset(relevant), addresses, frozenset(broadcasts), frozenset(detours))


def concerns(net: IPNetwork, networks: Iterable[IPNetwork], own: Iterable[IPNetwork]) -> bool:
    """Return True if a network overlaps the cluster's, unless it is part of this node's subnet."""
    if any(overlap(net, ours) and net.prefixlen >= ours.prefixlen for ours in own):
        return False
    return any(overlap(net, network) for network in networks)


def _common_length(gateway: IPAddress, destination: IPNetwork | None) -> int:
    """Return the prefix length of the smallest network around both, 0 if they have different families."""
    if destination is None or destination.version != gateway.version:
        return 0  # a default route, or IPv4 through an IPv6 gateway
    different = int(gateway) ^ int(destination.network_address)
    return min(destination.prefixlen, gateway.max_prefixlen - different.bit_length())


def _is_connected(route: HostRoute, homes: dict[str, list[IPNetwork]]) -> bool:
    """Return True for a connected network: created by the kernel, or containing an address of its device."""
    net = route.destination
    if net is None or len(route.hops) != 1 or route.hops[0][1] is not None:
        return False
    return route.protocol in _ON_LINK_PROTOCOLS or any(
        lies_in(home, net) for home in homes.get(route.hops[0][0], ())
    )


def _is_detour(route: HostRoute, networks: Iterable[IPNetwork], own: Iterable[IPNetwork]) -> bool:
    """Return True for a route of others into the cluster's networks, but for one into our subnet."""
    net = route.destination
    if net is None or not route.hops:
        return False
    return concerns(net, networks, own) and any(lies_in(net, network) for network in networks)


def _broadcasts(net: IPNetwork) -> Iterator[IPAddress]:
    """Yield the broadcast addresses. Before Linux 5.14 the network's own address is one, too."""
    if net.version == 4 and net.prefixlen <= _LONGEST_WITH_BROADCAST:
        yield net.network_address
        yield net.broadcast_address
