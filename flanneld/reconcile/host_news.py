"""Which of the kernel's notifications may change what leases are safe to follow (pure)."""

from __future__ import annotations

from collections.abc import Collection

from flanneld.model import IPAddress, IPNetwork
from flanneld.network.obstacles import single
from flanneld.network.rtnetlink.monitor import Gone, HostRouteChanged, InterfaceChanged, News, Seen
from flanneld.reconcile.lease_safety import LeaseSafety
from flanneld.state.resources import Resource, Route, destination_of


def may_be_obstacle(item: News, safety: LeaseSafety, links: Collection[str]) -> bool:
    """Return True if an address, a network on a link or a gateway of the host may be another one now.

    ``links`` are the devices that are ours.
    """
    match item:
        case InterfaceChanged(name=name, address=address):
            # The kernel does not tell of IPv4 routes that go with their link.
            is_known = name in safety.obstacles.devices
            return is_known or (address is not None and name not in links)
        case HostRouteChanged(destination, gateways):
            return _may_harm(safety, destination, *gateways)
        case Gone(key, gateway=gateway):
            return _may_harm(safety, destination_of(key), gateway)
        case Seen(Route() as route):
            return route.device not in links and _may_harm(safety, route.destination, route.gateway)
    return False


def is_drift(resource: Resource, wanted: Resource | None, links: Collection[str]) -> bool:
    """Return True if what somebody made is not as wanted, or is on a device of ours and not wanted at all."""
    if wanted is None:
        return getattr(resource, "device", None) in links
    return wanted != resource


def _may_harm(safety: LeaseSafety, destination: IPNetwork | None, *gateways: IPAddress | None) -> bool:
    """Return True if one of these is where a lease may be."""
    nets = (destination, *(single(gateway) for gateway in gateways if gateway is not None))
    return any(net is not None and safety.concerns(net) for net in nets)
