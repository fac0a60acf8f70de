"""What of this kernel is ours (pure).

Everything on a device that we make, except what the kernel itself put there; on any other device the
routes that carry our protocol number. Routes that an earlier flanneld left on the uplink without that mark
(Go's carry ``boot``) are told by their shape, and only at the start after such a flanneld ran here.
"""

from __future__ import annotations

from msgspec import Struct

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.rtnetlink import messages as rtnl
from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Blackhole, Route

#: Beginning of the names that all flannels give to their devices.
_DEVICES_OF_FLANNEL = "flannel"


class Domain(Struct, frozen=True, gc=False):
    """What of this kernel is ours.

    ``links`` are the devices we make, ``ranges`` the cluster networks with the length of a subnet, and
    ``former`` the networks of an earlier run. ``bridging`` are the devices that have a forwarding table.
    To adopt what that run left is to claim its marked routes to ``former``, its routes on flannel's devices,
    and unmarked routes to ``adopted`` destinations, or to all if another flanneld ran here (``unmarked``).
    """

    uplink: str
    links: frozenset[str]
    ranges: tuple[tuple[IPNetwork, int], ...]
    former: tuple[IPNetwork, ...] = ()
    bridging: frozenset[str] = frozenset()
    unmarked: bool = False
    adopted: frozenset[IPNetwork] = frozenset()

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
        if not adopt or seen.protocol != PROTO_BOOT or not self._is_peer_route(route):
            return False
        by_flannel = self.unmarked or route.device.startswith(_DEVICES_OF_FLANNEL)
        return by_flannel or route.destination in self.adopted

    def is_connected(self, seen: rtnl.SeenRoute) -> bool:
        """Return True for the kernel's own route to a link, through a device of others."""
        return seen.protocol == rtnl.RTPROT_KERNEL and seen.route.device not in self.links

    def owns_address(self, address: IPAddress) -> bool:
        """Wrong addresses go only inside the cluster network: others may be an operator's."""
        return any(address in network for network, _ in self.ranges)

    def _is_peer_route(self, route: Route) -> bool:
        return route.gateway is not None and any(
            route.destination.prefixlen == length and _within(route.destination, [network])
            for network, length in self.ranges
        )

    def owns_blackhole(self, blackhole: Blackhole) -> bool:
        return _within(blackhole.destination, [network for network, _ in self.ranges])


#: Of a host that no flanneld runs on.
NOTHING = Domain("", frozenset(), ())


def _within(net: IPNetwork, networks: list[IPNetwork]) -> bool:
    return any(net.version == each.version and net.network_address in each for each in networks)
