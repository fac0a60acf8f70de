"""Ownership of kernel objects.

We own everything on our devices, except what the kernel added itself. The protocol number of a route there
does not matter. On other devices we own the routes with our protocol number. An earlier flanneld may have
left routes without it on the uplink (Go's have ``boot``). They are recognised by their shape, and only at the
first start after such a flanneld.
"""

from __future__ import annotations

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.network.rtnetlink.routes import ON_OUR_DEVICES
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Blackhole, Route

#: Prefix of the device names of all flannels.
_DEVICES_OF_FLANNEL = "flannel"


class Domain(Struct, frozen=True, gc=False):
    """Rules that tell our kernel objects from others'.

    - ``links`` are our devices; those in ``bridging`` have a forwarding table.
    - ``ranges`` are the cluster networks, each with its subnet length.
    - ``former`` are the networks of an earlier run.
    - ``unmarked`` is True if another flanneld ran here, whose routes have no protocol number.
    - ``by_name`` is False if commands of an operator make devices and routes, under whatever names.

    Adoption at startup also claims marked routes to ``former``, the routes on flannel's devices, and unmarked
    routes to ``adopted`` destinations, or to any if ``unmarked``.
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
        return tuple(network.version for network, _ in self.ranges)

    def owns_route(self, seen: rtnl.SeenRoute, *, adopt: bool) -> bool:
        if seen.route.device in self.links:
            return seen.protocol != rtnl.RTPROT_KERNEL
        if seen.protocol == PROTO_FLANNEL:
            # Another flanneld on this host has another network.
            networks = [network for network, _ in self.ranges]
            return _within(seen.route.destination, networks + list(self.former if adopt else ()))
        route = seen.route
        if not adopt or not self._is_peer_route(route):
            return False
        if route.device.startswith(_DEVICES_OF_FLANNEL):
            return self.by_name and seen.protocol in ON_OUR_DEVICES
        return seen.protocol == PROTO_BOOT and (self.unmarked or route.destination in self.adopted)

    def is_connected(self, seen: rtnl.SeenRoute) -> bool:
        """Return True for the kernel's connected route on a device of others."""
        return seen.protocol == rtnl.RTPROT_KERNEL and seen.route.device not in self.links

    def owns_address(self, address: IPAddress) -> bool:
        """Return True for addresses inside the cluster networks: others may be an operator's."""
        return any(address in network for network, _ in self.ranges)

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

    def owns_blackhole(self, blackhole: Blackhole) -> bool:
        return _within(blackhole.destination, [network for network, _ in self.ranges])


#: Domain of a host without flanneld.
NOTHING = Domain("", frozenset(), ())


def _within(net: IPNetwork, networks: list[IPNetwork]) -> bool:
    return any(net.version == each.version and net.network_address in each for each in networks)
