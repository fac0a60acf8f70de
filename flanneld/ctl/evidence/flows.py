"""Flows of the network through this host: the packets that must not get lost here (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

from msgspec import Struct

from flanneld.ctl.data_source import ranges_of
from flanneld.ctl.shadowing_routes import wanted_route
from flanneld.ctl.snapshot import values
from flanneld.model import Family, IPAddress, IPNetwork, family_of
from flanneld.network.firewall.verdicts.packet import Packet
from flanneld.network.firewall.verdicts.ruleset import Opening
from flanneld.network.resource_json import parse_address, parse_network
from flanneld.state.resources import Ipip, Link, Tun, Vxlan

#: Hooks that a packet passes if it is for this host, from it, or through it.
INWARDS = frozenset({"ingress", "prerouting", "input"})
OUTWARDS = frozenset({"output", "postrouting"})
THROUGH = frozenset({"ingress", "prerouting", "forward", "postrouting"})
#: Backend.Port of udp, if it is not set.
_UDP_PORT = 8285


class Flow(Struct, frozen=True, gc=False):
    """Packets of one kind, and what a packet filter has to accept for them. ``name`` is for people."""

    name: str
    packet: Packet
    hooks: frozenset[str]
    openings: tuple[Opening, ...]

    @property
    def family(self) -> Family:
        return family_of(self.packet.source)


class Peer(Struct, frozen=True, gc=False):
    """A peer's subnets and public addresses, parsed."""

    subnets: tuple[IPNetwork, ...]
    public: tuple[IPAddress, ...]
    document: Mapping[str, Any]

    def is_in(self, network: IPNetwork) -> bool:
        return any(ip in network for ip in self.public) or any(
            subnet.network_address in network for subnet in self.subnets
        )


def peers(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the peers that packets are sent to, as the document has them."""
    return [peer for peer in document.get("peers", ()) if peer["state"] not in ("refused", "unsafe")]


def parsed(peer: Mapping[str, Any]) -> Peer:
    return Peer(
        tuple(map(parse_network, peer["subnets"])), tuple(map(parse_address, peer["public_ips"])), peer
    )


def some(known: Sequence[Mapping[str, Any]], networks: Sequence[IPNetwork] = (), few: int = 4) -> list[Peer]:
    """Return a few peers, and one inside each network, which a rule may be about.

    Parsing thousands of peers takes a tenth of a second, so without networks only those few are parsed.
    """
    chosen = list(map(parsed, known[:few]))
    candidates = list(map(parsed, known)) if networks else []
    for network in networks:
        found = next((peer for peer in candidates if peer.is_in(network)), None)
        if found is not None and found not in chosen:
            chosen.append(found)
    return chosen


def flows(
    document: Mapping[str, Any], chosen: Iterable[Peer], container_devices: Mapping[Family, str]
) -> Iterator[Flow]:
    """Yield the flows from and to some peers.

    ``container_devices`` lead to this node's containers; without one their packets have an unknown interface.
    """
    own = [ip_network(text) for text in (document.get("lease") or {}).get("subnets", ())]
    for peer in chosen:
        yield from _between_nodes(document, peer)
        for subnet in own:
            theirs = next((each for each in peer.subnets if each.version == subnet.version), None)
            if theirs is not None:
                device = container_devices.get(subnet.version)
                yield from _between_containers(document, peer, subnet, theirs, device)


def container_of(subnet: IPNetwork) -> IPAddress:
    """Return an address of a subnet that a container may have."""
    return subnet[2 % subnet.num_addresses]


def carriers(document: Mapping[str, Any]) -> Iterator[tuple[Family, str, int | None, Link]]:
    """Yield family, protocol and port of the packets between the nodes, for each device.

    A backend without packets of its own, or with one whose port is not known here, has none.
    """
    for value in values(document.get("local")):
        match value:
            case Vxlan(local=local, port=port):
                yield local.version, "udp", port, value
            case Ipip():
                yield 4, "ipencap", None, value
            case Tun():
                yield 4, "udp", (document.get("network") or {}).get("port") or _UDP_PORT, value


def _between_nodes(document: Mapping[str, Any], peer: Peer) -> Iterator[Flow]:
    uplink = document.get("uplink") or {}
    name = uplink.get("name")
    ours = [ip_address(text) for text in uplink.get("addresses", ())]
    for family, protocol, port, _ in carriers(document):
        here = next((ip for ip in ours if ip.version == family), None)
        there = next((ip for ip in peer.public if ip.version == family), None)
        if here is None or there is None:
            continue
        shown = f"{protocol.upper()} {port}" if port else f"protocol {protocol}"
        opening = (Opening(protocol, port),)
        yield Flow(f"{shown} from its peers", Packet(name, "", there, here, protocol, port), INWARDS, opening)
        yield Flow(f"{shown} to its peers", Packet("", name, here, there, protocol, port), OUTWARDS, opening)


def _between_containers(
    document: Mapping[str, Any], peer: Peer, own: IPNetwork, theirs: IPNetwork, device: str | None
) -> Iterator[Flow]:
    route = wanted_route(container_of(theirs), peer.document, document)
    if route is None:
        return
    network = next((each for each, _ in ranges_of(document) if each.version == own.version), own)
    openings = (Opening(side="saddr", network=network), Opening(side="daddr", network=network))
    here, there = container_of(own), container_of(theirs)
    out, back = Packet(device, route.device, here, there), Packet(route.device, device, there, here)
    yield Flow("packets of its containers to other nodes", out, THROUGH, openings)
    yield Flow("packets of other nodes to its containers", back, THROUGH, openings)
