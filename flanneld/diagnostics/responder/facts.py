"""Facts about this node that other nodes may know: what is in its lease, or shows on the wire (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from flanneld import __version__
from flanneld.diagnostics import conditions
from flanneld.diagnostics.components import Components
from flanneld.model import FAMILIES, IPAddress, IPNetwork, Lease, family_of
from flanneld.state.resources import Address, Resource, Vxlan

Facts = dict[str, Any]


class Place(Struct, frozen=True, gc=False):
    """Local address that answers, and the sources that it answers to.

    The node's address in the overlay answers to the network's addresses only, so no answer leaves the
    network. A backend without such an address answers at the uplink, to the public IPs of peers only.
    """

    address: IPAddress
    in_overlay: bool

    def admits(
        self, source: IPAddress, networks: Iterable[IPNetwork], peers: Callable[[], Iterable[Lease]]
    ) -> bool:
        """Return True if a query from this source gets an answer."""
        if self.in_overlay:
            return any(source in network for network in networks)
        return any(peer.attrs.public(family_of(source)) == source for peer in peers())


def places(components: Components) -> frozenset[Place]:
    """Return the addresses to answer at; none before this node has a lease."""
    controller, keeper = components.reconciler, components.lease_keeper
    if controller is None or keeper is None:
        return frozenset()
    in_overlay = {each.address for each in controller.peers.local_resources() if isinstance(each, Address)}
    found = set()
    for family in FAMILIES:
        net = keeper.lease.net(family)
        local = controller.uplink_manager.uplink.local(family)
        if net is not None and net.network_address in in_overlay:
            found.add(Place(net.network_address, in_overlay=True))
        elif net is not None and not in_overlay and local is not None:
            found.add(Place(local, in_overlay=False))
    return frozenset(found)


def about(components: Components, asker: tuple[str, int]) -> Facts:
    """Return the answer to a node; ``seen`` is the address from which its query came."""
    controller, config, keeper = components.reconciler, components.config, components.lease_keeper
    assert controller is not None
    assert config is not None
    assert keeper is not None
    backend, uplink = controller.uplink_manager.backend, controller.uplink_manager.uplink
    return {
        "version": __version__,
        "subnets": [str(net) for net in keeper.lease.key if net is not None],
        "network": [f"{each.network} /{each.subnet_len}" for each in config.ranges],
        "backend": config.backend_type,
        "also": config.also.backend_type if config.also else None,
        **device(controller.peers.local_resources()),
        "mtu": backend.mtu,
        "uplink_mtu": uplink.mtu,
        "store": store_kind(components.manager.name),
        "ready": not components.missing(),
        "conditions": sorted({part.name for part in conditions.unhealthy_parts(components)}),
        "seen": list(asker),
    }


def device(local: Iterable[Resource]) -> Facts:
    """Return VNI and port of this node's VXLAN device, None for each without one."""
    made = next((each for each in local if isinstance(each, Vxlan)), None)
    return {"vni": made.vni if made else None, "port": made.port if made else None}


def store_kind(name: str) -> str:
    """Return the kind of store out of its name, without its address; for etcd with its API."""
    for start, kind in (("Kubernetes ", "kubernetes"), ("flannel server ", "remote"), ("store ", "file")):
        if name.startswith(start):
            return kind
    apis = re.findall(r"\betcd (v[23]) at ", name)
    return f"etcd {'+'.join(sorted(apis))}" if apis else "etcd"
