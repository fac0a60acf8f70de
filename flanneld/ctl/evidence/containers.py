"""Containers of this node, looked at from inside: their addresses and routes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from flanneld.ctl.data_source import ranges_of
from flanneld.ctl.evidence.flows import container_of
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork
from flanneld.network import namespaces
from flanneld.network.host import HostView
from flanneld.network.resource_json import parse_network
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import RTN_UNICAST

#: Namespaces looked at, at most: a node has 110 pods, if Kubernetes is not told otherwise.
_MANY = 256


class Container(Struct, frozen=True, gc=False):
    """A container with an address in the cluster network.

    ``is_routed`` is False if it has no route to the other nodes' containers, or one by a gateway that is none
    of this host's addresses; ``path`` is its namespace.
    """

    path: str
    device: str
    address: IPAddress
    is_routed: bool
    mtu: int
    #: Interface of this host by which packets for it leave, and the one that it is attached to, its bridge
    #: if there is one; the first is empty if it has no route.
    reached_by: str = ""
    attached_to: str = ""


def devices(
    addresses: Collection[tuple[str, IPAddress]], ours: Collection[str], own: Collection[IPNetwork]
) -> dict[Family, str]:
    """Return the device to this node's containers, by family: one with an address in our subnet (pure)."""
    found: dict[Family, str] = {}
    for name, address in addresses:
        if name not in ours and any(address in net for net in own):
            found.setdefault(address.version, name)
    return found


def read(
    document: Mapping[str, Any], host_links: Collection[SeenLink], host_addresses: Collection[IPAddress]
) -> list[Container]:
    """Return the containers in named namespaces; none without the permission to enter those.

    A host may have other namespaces with such addresses: only an end of a veth pair of ours counts.
    """
    networks = [network for network, _ in ranges_of(document)]
    subnets = {
        (net := parse_network(text)).version: net
        for peer in document.get("peers", ())
        for text in peer["subnets"]
    }
    targets = {family: container_of(subnet) for family, subnet in subnets.items()}
    ends: dict[int, dict[int, str]] = {}
    names = {link.index: link.name for link in host_links}
    for link in host_links:
        if link.make.make == "veth" and link.namespace >= 0:
            ends.setdefault(link.namespace, {})[link.link] = names.get(link.master, link.name)
    found: list[Container] = []
    host = HostView()
    for path in islice(namespaces.named() if networks and targets and ends else (), _MANY):
        with suppress(OSError):
            indexes = ends.get(namespaces.number_of(host, path))
            if indexes:
                with namespaces.entered(path):
                    found += _inside(path, HostView(), networks, targets, indexes, host_addresses)
    return [replace(each, reached_by=_device_to(host, each.address, names)) for each in found]


def _device_to(host: HostView, address: IPAddress, names: Mapping[int, str]) -> str:
    way = host.look_up_route(address)
    return names.get(way.index, "") if way is not None and way.kind == RTN_UNICAST else ""


def _inside(
    path: Path,
    view: HostView,
    networks: Collection[IPNetwork],
    targets: Mapping[Family, IPAddress],
    ends: Mapping[int, str],
    host_addresses: Collection[IPAddress],
) -> Iterator[Container]:
    links = {link.index: link for link in view.links() if link.index in ends}
    for family in FAMILIES:
        for seen in view.addresses(family) if family in targets else ():
            link = links.get(seen.index)
            if link is not None and any(seen.address in net for net in networks):
                way = view.look_up_route(targets[family])
                is_routed = way is not None and way.kind == RTN_UNICAST
                if way is not None and way.gateway is not None and not way.gateway.is_link_local:
                    is_routed = is_routed and way.gateway in host_addresses
                attached = ends[link.index]
                yield Container(str(path), link.name, seen.address, is_routed, link.mtu, attached_to=attached)
