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
from flanneld.state.resources import Ipip, Tun, Vxlan

#: Hooks that a packet passes if it is for this host, from it, or through it.
INWARDS = frozenset({"ingress", "prerouting", "input"})
OUTWARDS = frozenset({"output", "postrouting"})
THROUGH = frozenset({"ingress", "prerouting", "forward", "postrouting"})
#: Backend.Port of udp, if it is not set.
_UDP_PORT = 8285
#: UDP ports of IKE: the first messages, and all others, with ESP behind NAT (RFC 7296, RFC 4555, RFC 3948).
_IKE_PORTS = (500, 4500)
#: Numbers of IP protocols.
_NUMBERS = {"ipencap": 4, "esp": 50}


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


class Carrier(Struct, frozen=True, gc=False):
    """Packets between this node and a peer that carry those of containers, or agree on their keys.

    ``port`` is ours, ``peer_port`` that of the peer.
    """

    family: Family
    protocol: str
    port: int | None = None
    peer_port: int | None = None

    @property
    def name(self) -> str:
        return named(self.protocol, self.peer_port)


def named(protocol: str, port: int | None) -> str:
    """Return the name of a carrier's packets for people."""
    return f"{protocol.upper()} {port}" if port else f"IP protocol {_NUMBERS.get(protocol, protocol)}"


def carriers(document: Mapping[str, Any], peer: Mapping[str, Any]) -> Iterator[Carrier]:
    """Yield the carriers to a peer.

    A backend without packets of its own has none, and neither has one whose port is not known here.
    """
    for value in values(document.get("local")):
        match value:
            case Vxlan(local=local, port=port):
                yield Carrier(local.version, "udp", port, port)
            case Ipip():
                yield Carrier(4, "ipencap")
            case Tun():
                port = (document.get("network") or {}).get("port") or _UDP_PORT
                yield Carrier(4, "udp", port, port)
    is_ipsec = peer.get("backend") == "ipsec"
    yield from (Carrier(4, "udp", port, port) for port in _IKE_PORTS if is_ipsec)
    for session in peer.get("sessions", ()):
        address, _, port = session["endpoint"].rpartition(":")
        if session.get("port") and address:
            yield Carrier(parse_address(address.strip("[]")).version, "udp", session["port"], int(port))
        elif is_ipsec and session["state"] == "established" and not session.get("encapsulated"):
            yield Carrier(4, "esp")


def _between_nodes(document: Mapping[str, Any], peer: Peer) -> Iterator[Flow]:
    uplink = document.get("uplink") or {}
    name = uplink.get("name")
    ours = [ip_address(text) for text in uplink.get("addresses", ())]
    for each in dict.fromkeys(carriers(document, peer.document)):
        protocol = each.protocol
        here = next((ip for ip in ours if ip.version == each.family), None)
        there = next((ip for ip in peer.public if ip.version == each.family), None)
        if here is None or there is None:
            continue
        for shown, packet, hooks, port in (
            ("from", Packet(name, "", there, here, protocol, each.port), INWARDS, each.port),
            ("to", Packet("", name, here, there, protocol, each.peer_port), OUTWARDS, each.peer_port),
        ):
            title = f"{named(protocol, port)} {shown} its peers"
            yield Flow(title, packet, hooks, (Opening(protocol, port),))


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
