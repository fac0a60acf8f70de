"""Ownership of kernel objects, choice among routes to one network, and protocol numbers of our routes (pure).

We own everything on our devices, except what the kernel added itself. The protocol number of a route there
does not matter. On other devices we own the routes with our protocol number. An earlier flanneld may have
left routes without it on the uplink (Go's have ``boot``). They are recognised by their shape, and only at the
first start after such a flanneld.

A kernel may hold several IPv4 routes to one network and uses the first, so its order matters. IPv6 alternates
between routes of the same metric, or ours replaces the first.

A protocol number (RTPROT_*) marks the owner of a route. On our own devices the device does that, so the
number is free to spread many routes over the kernel's hash table. The kernel looks for an equal nexthop
before it adds an IPv4 route. It hashes nexthops by protocol and device, but not by gateway
(net/ipv4/fib_semantics.c, fib_info_hashfn). So the routes of one device share one chain, unless their
protocols differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.state.resources import (
    PROTO_BOOT,
    PROTO_FLANNEL,
    Blackhole,
    Key,
    Kind,
    Resource,
    RivalRoute,
    Route,
    State,
)
from flanneld.state.table import Claim, Seen


class Behind(Struct, frozen=True, gc=False):
    """A correct route that no packet takes, because another route to its network precedes it."""

    kind: ClassVar[Kind] = Kind.ROUTE
    route: Route

    @property
    def key(self) -> Key:
        return self.route.key

    def __str__(self) -> str:
        return f"{self.route}, behind another one"


def in_order(desired: State, found: Iterable[Seen], ours: dict[Key, Resource]) -> Iterator[Seen]:
    """Yield one effective route for each wanted destination, and all routes to other destinations.

    ``ours`` are the routes that we created or adopted. It is updated: routes found to be ours are added,
    those neither wanted nor found are removed.
    """
    missing = set(desired)
    first: dict[Key, Seen] = {}
    stale: dict[Key, Resource] = {}
    for seen in found:
        key = seen.resource.key
        want = desired.get(key)
        if want is None:
            if seen.claim is not Claim.FOREIGN:
                stale[key] = seen.resource
            yield seen
        elif want == seen.resource:
            missing.discard(key)
            if seen.claim is not Claim.FOREIGN:
                ours[key] = want
            rival = first.get(key)
            if rival is not None and key in ours and isinstance(want, Route) and _gives_way(rival.resource):
                yield Seen(Behind(want))
            else:
                yield seen
        elif key in missing and key not in first:
            first[key] = seen
            if seen.claim is not Claim.FOREIGN:
                ours[key] = seen.resource
    yield from (seen for key, seen in first.items() if key in missing)
    # Sets that copy the dictionaries' hashes: 2 ms for all subnets of a /8.
    for key in set(ours).difference(desired):
        del ours[key]
    ours |= stale


def is_connected(resource: Resource | None) -> bool:
    """Return True for the kernel's connected route on one of this host's links."""
    return isinstance(resource, RivalRoute) and resource.is_connected


def _gives_way(rival: Resource) -> bool:
    return isinstance(rival, Route | RivalRoute) and rival.key[1] == 4 and not is_connected(rival)


#: Numbers that neither the kernel nor iproute2 assigns, and no known program uses: 80 is Calico's, 84 OVN's,
#: 99 Open/R's, 186 to 198 are FRR's, 248 is kube-vip's.
SPREAD: tuple[int, ...] = (*range(128, 186), *range(200, 248))
#: Protocols of routes on a device of any flanneld: Go's, and ours.
ON_OUR_DEVICES = frozenset({PROTO_BOOT, *SPREAD})
#: Routes from which on the numbers vary. With fewer, the chain costs little, and ``ip route``
#: shows what it shows with Go flanneld.
MANY = 512


def protocol_for(route: Resource, devices: Collection[str], *, spread: bool) -> int:
    """Return the number for a new route. ``devices`` are our own, ``spread`` is True for many routes.

    It depends on the destination only, so that each run chooses the same one.
    """
    if not isinstance(route, Route) or route.device not in devices:
        return PROTO_FLANNEL
    if not spread or route.gateway is None or route.gateway.version == 6:
        return PROTO_BOOT  # IPv6 hashes no nexthops, and without a gateway all routes share one
    net = route.destination
    subnet_index = int(net.network_address) >> (net.max_prefixlen - net.prefixlen)
    return SPREAD[subnet_index % len(SPREAD)]


#: linux/rtnetlink.h: protocol of the kernel's own routes.
RTPROT_KERNEL = 2
#: Prefix of the device names of all flannels.
_DEVICES_OF_FLANNEL = "flannel"


class SeenRoute(Struct, frozen=True, gc=False):
    """A route in the kernel, with the RTPROT_* number of its creator."""

    route: Route
    protocol: int


class Domain(Struct, frozen=True, gc=False):
    """Rules that tell our kernel objects from others'.

    - ``links`` are our devices; those in ``bridging`` have a forwarding table.
    - ``ranges`` are the cluster networks, each with its subnet length.
    - ``former`` are the networks of an earlier run.
    - ``unmarked`` is True if another flanneld ran here, whose routes have no protocol number.
    - ``by_name`` is False if commands of an operator make devices and routes, under whatever names.

    Adoption at startup also claims addresses in ``former`` on our devices, marked routes to it, the routes on
    flannel's devices, and unmarked routes to ``adopted`` destinations, or to any if ``unmarked``.
    """

    uplink: str
    links: frozenset[str]
    ranges: tuple[tuple[IPNetwork, int], ...]
    former: tuple[IPNetwork, ...] = ()
    bridging: frozenset[str] = frozenset()
    unmarked: bool = False
    adopted: frozenset[IPNetwork] = frozenset()
    by_name: bool = True

    @property
    def families(self) -> tuple[Family, ...]:
        networks = (*(network for network, _ in self.ranges), *self.former)
        return tuple(dict.fromkeys(network.version for network in networks))

    def owns_route(self, seen: SeenRoute, *, adopt: bool) -> bool:
        if seen.route.device in self.links:
            return seen.protocol != RTPROT_KERNEL
        if seen.protocol == PROTO_FLANNEL:
            # Another flanneld on this host has another network.
            return _within(seen.route.destination, self._networks(adopt=adopt))
        route = seen.route
        if not adopt or not self._is_peer_route(route):
            return False
        if route.device.startswith(_DEVICES_OF_FLANNEL):
            return self.by_name and seen.protocol in ON_OUR_DEVICES
        return seen.protocol == PROTO_BOOT and (self.unmarked or route.destination in self.adopted)

    def is_connected(self, seen: SeenRoute) -> bool:
        """Return True for the kernel's connected route on a device of others."""
        return seen.protocol == RTPROT_KERNEL and seen.route.device not in self.links

    def owns_address(self, address: IPAddress, *, adopt: bool) -> bool:
        """Return True for addresses inside the cluster networks: others may be an operator's."""
        return any(address in network for network in self._networks(adopt=adopt))

    def _networks(self, *, adopt: bool) -> list[IPNetwork]:
        return [*(network for network, _ in self.ranges), *(self.former if adopt else ())]

    def _is_peer_route(self, route: Route) -> bool:
        """Return True for a route to a node's subnet, or by a device of flannel to a whole network, as udp's.

        A tunnel device of flannel needs no gateway; elsewhere a route without one is a link's.
        """
        is_flannels = route.device.startswith(_DEVICES_OF_FLANNEL)
        return (route.gateway is not None or is_flannels) and any(
            (route.destination.prefixlen == length and _within(route.destination, [network]))
            or (is_flannels and route.destination == network)
            for network, length in self.ranges
        )

    def owns_blackhole(self, blackhole: Blackhole, *, adopt: bool) -> bool:
        return _within(blackhole.destination, self._networks(adopt=adopt))


#: Domain of a host without flanneld.
NOTHING = Domain("", frozenset(), ())


def _within(net: IPNetwork, networks: list[IPNetwork]) -> bool:
    return any(net.version == each.version and net.network_address in each for each in networks)
