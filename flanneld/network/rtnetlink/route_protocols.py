"""Protocol numbers (RTPROT_*) of the routes that this daemon writes (pure).

The number marks the owner of a route. On our own devices the device does that, so the number is free to
spread many routes over the kernel's hash table. The kernel looks for an equal nexthop before it adds an IPv4
route. It hashes nexthops by protocol and device, but not by gateway (net/ipv4/fib_semantics.c,
fib_info_hashfn). So the routes of one device share one chain, unless their protocols differ.
"""

from __future__ import annotations

from collections.abc import Collection

from flanneld.state.resources import PROTO_BOOT, PROTO_FLANNEL, Resource, Route

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
