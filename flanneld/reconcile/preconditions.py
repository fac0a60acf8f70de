"""Preconditions of a start: checks before the first change, and results required to go on."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flanneld.errors import Fatal, Retryable
from flanneld.network.host_kernel import HostKernel
from flanneld.network.obstacles import Obstacles
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.links import described, is_not_ours_to_remove
from flanneld.reconcile.reconciler import TableState
from flanneld.state.resources import Kind, Link, Resource, Route

log = logging.getLogger(__name__)


def spare_links_of_others(kernel: HostKernel, links: Iterable[Link]) -> None:
    """Raise ``Fatal`` if another program's device has one of our names; may raise ``OSError``."""
    for link in links:
        seen = kernel.link(link.name)
        if seen and is_not_ours_to_remove(link, seen.make):
            raise Fatal(
                f"{link.name} is {described(seen.make)}, and we need a device of kind {link.make}",
                f"give it another name: ip link set {link.name} down; ip link set {link.name} name OTHER",
            )


def spare_connected_networks(local: Iterable[Resource], obstacles: Obstacles) -> None:
    """Raise ``Fatal`` if a route that this node needs would take over a network of the host."""
    for route in local:
        obstacle = obstacles.connected_at(route.destination) if isinstance(route, Route) else None
        if obstacle is not None and isinstance(route, Route):
            raise Fatal(
                f"{obstacle}, and all of {obstacle.net} would go into {route.device}",
                "give the network config another Network, or use another backend",
            )


def demand_all(states: Iterable[TableState]) -> None:
    """Raise ``Fatal`` for an object that the kernel refuses, ``Retryable`` if it may succeed later."""
    for state in states:
        refused = state.failed[0] if state.failed else None
        if refused is not None and refused.resource.kind is not Kind.REMOTE:
            raise Fatal(
                f"the kernel refuses {refused}",
                refused.remedy or "run with CAP_NET_ADMIN on a kernel that has this kind of device",
            )
        if state.vital and state.problem:
            raise Retryable(f"cannot read the {state.name}: {state.problem}")
        if state.vital and refused is not None:
            raise Retryable(refused.reason, refused.remedy)


def warn_of_networks_around(obstacles: Obstacles, domain: Domain) -> None:
    """Warn of networks on this host's links that overlap the cluster's and exceed a node's subnet."""
    for network in obstacles.around({each.version: length for each, length in domain.ranges}):
        log.warning(
            "Network overlap: %s; its hosts with addresses in a node's subnet are not reached; "
            "choose a Network that no link of any node uses",
            network,
        )
