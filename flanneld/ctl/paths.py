"""Packets and paths between this node and its peers: what flows there, and the size that a path carries."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from msgspec import UNSET, Struct
from msgspec.structs import replace

from flanneld.backends.contract import Backend, OuterPackets
from flanneld.backends.registry import described
from flanneld.compat.flags import quoted
from flanneld.ctl.compare import follows, route_lookup, wanted_route
from flanneld.ctl.nodes import our_addresses
from flanneld.ctl.output import State
from flanneld.ctl.source import NothingKnown
from flanneld.diagnostics.status import PeerStatus, Status, addresses, known
from flanneld.errors import FlannelError
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, family_of
from flanneld.network import survey
from flanneld.network.firewall.fate import Packet
from flanneld.network.firewall.foreign import SENDERS, SOME_PORT, Opening, of_network

#: Peers for which routes are looked up, spread over all: rules and filters concern all of them, or a range.
_PEERS = 64
#: Ports of a bridge for which rules are looked up, at most.
_PORTS = 64
#: Hooks that a packet passes if it is for this host, from it, or through it.
INWARDS = frozenset({"ingress", "prerouting", "input"})
OUTWARDS = frozenset({"output", "postrouting", "egress"})
THROUGH = frozenset({"ingress", "prerouting", "forward", "postrouting", "egress"})
#: Hooks of a bridge's port that packets of containers pass on their way to this host, and from it.
FROM_PORTS = frozenset({"ingress", "bridge prerouting", "bridge input"})
TO_PORTS = frozenset({"bridge output", "bridge postrouting", "egress"})
#: Numbers of IP protocols.
_NUMBERS = {"ipencap": 4, "esp": 50}
TO_NODES, FROM_NODES = "packets to other nodes", "packets from other nodes"
FROM_CONTAINERS = "packets of its containers to other nodes"
TO_CONTAINERS = "packets of other nodes to its containers"
#: Addresses outside any network of a cluster (RFC 5737, RFC 3849).
ELSEWHERE: Mapping[Family, IPAddress] = {4: ip_address("203.0.113.1"), 6: ip_address("2001:db8::1")}
DISCOVERY = "neighbour discovery (ICMPv6) of its peers"


class Flow(Struct, frozen=True, gc=False):
    """Packets of one kind, and what a packet filter has to accept for them. ``name`` is for people."""

    name: str
    packet: Packet
    hooks: frozenset[str]
    openings: tuple[Opening, ...]
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()

    @property
    def family(self) -> Family:
        return family_of(self.packet.source)


class ParsedPeer(Struct, frozen=True, gc=False):
    """A peer's subnets and public addresses, parsed."""

    subnets: tuple[IPNetwork, ...]
    public: tuple[IPAddress, ...]
    status: PeerStatus

    def is_in(self, network: IPNetwork) -> bool:
        return any(ip in network for ip in self.public) or any(
            subnet.network_address in network for subnet in self.subnets
        )


def reached_peers(told: Status) -> list[PeerStatus]:
    """Return the peers that packets are sent to."""
    return [peer for peer in told.each_peer if peer.state not in ("refused", "unsafe")]


def parsed(peer: PeerStatus) -> ParsedPeer:
    return ParsedPeer(tuple(peer.networks), tuple(peer.addresses), peer)


def some(peers: Sequence[PeerStatus], networks: Sequence[IPNetwork] = (), few: int = 4) -> list[ParsedPeer]:
    """Return a few peers, and one inside each network, which a rule may be about.

    Parsing thousands of peers takes a tenth of a second, so without networks only those few are parsed.
    """
    chosen = list(map(parsed, peers[:few]))
    candidates = list(map(parsed, peers)) if networks else []
    for network in networks:
        found = next((peer for peer in candidates if peer.is_in(network)), None)
        if found is not None and found not in chosen:
            chosen.append(found)
    return chosen


def chosen_of(told: Status) -> list[ParsedPeer]:
    """Return a bounded number of peers, spread over all (pure)."""
    reached = reached_peers(told)
    step = max(1, len(reached) // _PEERS)
    return list(map(parsed, reached[::step][:_PEERS]))


def flows(
    told: Status, chosen: Iterable[ParsedPeer], container_devices: Mapping[Family, str]
) -> Iterator[Flow]:
    """Yield the flows from and to some peers.

    ``container_devices`` lead to this node's containers; without one their packets have an unknown interface.
    """
    own = told.own_subnets
    for peer in chosen:
        yield from _between_nodes(told, peer)
        for subnet in own:
            theirs = next((each for each in peer.subnets if each.version == subnet.version), None)
            if theirs is not None:
                device = container_devices.get(subnet.version)
                yield from _between_containers(told, peer, subnet, theirs, device)


def at_ports(flow: Flow, held: Mapping[tuple[str, Family], IPAddress]) -> Iterator[Flow]:
    """Yield a flow of containers as it passes each port of their bridge.

    Behind a port are the addresses ``held`` there, as far as they are known.
    """
    is_out = flow.name == FROM_CONTAINERS
    bridge = flow.packet.iif if is_out else flow.packet.oif
    ports = Path(f"/sys/class/net/{bridge}/brif").glob("*") if flow.hooks == THROUGH and bridge else ()
    for port in islice(ports, _PORTS):
        iif, oif = (port.name, "") if is_out else ("", port.name)
        at_port = replace(flow, packet=replace(flow.packet, iif=iif, oif=oif))
        address = held.get((port.name, flow.family))
        seen = at_port if address is None else of_container(at_port, address)
        yield replace(seen, hooks=FROM_PORTS if is_out else TO_PORTS)


def of_container(flow: Flow, address: IPAddress) -> Flow:
    """Return a flow of containers as that of the one with this address (pure)."""
    is_out = flow.name == FROM_CONTAINERS
    packet = flow.packet
    return replace(
        flow,
        packet=replace(packet, source=address) if is_out else replace(packet, destination=address),
    )


def container_of(subnet: IPNetwork) -> IPAddress:
    """Return an address of a subnet that a container may have."""
    return subnet[2 % subnet.num_addresses]


class TunnelPackets(Struct, frozen=True, gc=False):
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


def listed(packets: Iterable[OuterPackets]) -> str:
    """Return the names of packets for people, with the option that may give them another port."""
    names = [
        f"the UDP port of Backend.{each.option} ({each.port})"
        if each.option not in ("", "Port")
        else f"UDP port {each.port}"
        if each.port
        else named(each.protocol, None)
        for each in packets
    ]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def named(protocol: str, port: int | None) -> str:
    """Return the name of a carrier's packets for people."""
    return f"{protocol.upper()} {port}" if port else f"IP protocol {_NUMBERS.get(protocol, protocol)}"


def between_nodes(told: Status, kind: str | None = None) -> Iterator[OuterPackets]:
    """Yield the packets of a type of backend between nodes, with the port of the network config.

    By default the type is that of the network config.
    """
    network = known(told.network)
    port = known(network.port) if network else None
    for each in described(kind or told.backend or "").flows:
        yield replace(each, port=port or each.port, option="") if each.option == "Port" else each


def carriers(told: Status, peer: PeerStatus) -> Iterator[TunnelPackets]:
    """Yield the carriers to a peer.

    A backend without packets of its own has none, and neither has one whose port is not known here.
    """
    kind = (peer.backend if peer.backend in told.backends else None) or told.backend
    sessions, backend = known(peer.sessions) or (), described(kind or "")
    is_plain = any(each.state == "established" and not each.encapsulated for each in sessions)
    families = [net.version for net, _ in told.ranges] or FAMILIES[:1]
    for each in between_nodes(told, kind):
        if each.option or not (each.port or is_plain or not backend.encrypts):
            continue  # each node has a port of its own; or no SA sends these packets
        for family in families:
            if family in backend.overhead:
                yield TunnelPackets(family, each.protocol, each.port or None, each.port or None)
    for session in sessions:
        address, _, theirs = session.endpoint.rpartition(":")
        ours = known(session.port)
        if ours and address:
            yield TunnelPackets(addresses([address.strip("[]")])[0].version, "udp", ours, int(theirs))


def _between_nodes(told: Status, peer: ParsedPeer) -> Iterator[Flow]:
    uplink = known(told.uplink)
    name = uplink.name if uplink else None
    ours = {ip.version: ip for ip in (reversed(addresses(uplink.addresses)) if uplink else ())}
    public = {ip.version: ip for ip in reversed(peer.public)}
    for each in dict.fromkeys(carriers(told, peer.status)):
        protocol = each.protocol
        if each.family not in ours or each.family not in public:
            continue
        here, there = ours[each.family], public[each.family]
        sources = (min(each.port, SENDERS[0]), SENDERS[1]) if each.port else None
        for shown, packet, hooks, port in (
            ("from", Packet(name, "", there, here, protocol, each.port), INWARDS, each.port),
            ("to", Packet("", name, here, there, protocol, each.peer_port), OUTWARDS, each.peer_port),
        ):
            title = f"{named(protocol, port)} {shown} its peers"
            yield Flow(title, replace(packet, sport=sources), hooks, (Opening(protocol, port),))
    for kind in ("nd-neighbor-solicit", "nd-neighbor-advert") if 6 in ours and 6 in public else ():
        message = Packet(name, "", public[6], ours[6], "ipv6-icmp", state="untracked", icmp=kind)
        yield Flow(DISCOVERY, message, INWARDS, (Opening("ipv6-icmp"),))


def _between_containers(
    told: Status, peer: ParsedPeer, own: IPNetwork, theirs: IPNetwork, device: str | None
) -> Iterator[Flow]:
    route = wanted_route(container_of(theirs), peer.status, told)
    if route is None:
        return
    network = next((each for each, _ in told.ranges if each.version == own.version), own)
    openings = of_network(network)
    here, there = container_of(own), container_of(theirs)
    out, back = Packet(device, route.device, here, there), Packet(route.device, device, there, here)
    for name, packet in ((FROM_CONTAINERS, out), (TO_CONTAINERS, back)):
        tcp = replace(packet, protocol="tcp", dport=SOME_PORT, sport=SENDERS)
        ping = replace(packet, protocol="icmp" if own.version == 4 else "ipv6-icmp")
        yield Flow(name, tcp, THROUGH, openings, "TCP")
        yield Flow(name, ping, THROUGH, openings, "ICMP")


#: Peers that the doctor probes.
_FEW = 8
#: Lost packets of a sample from which on a path loses packets at random.
_LOSES = 2


class PathToPeer(Struct, frozen=True, gc=False):
    """Path. ``required`` and ``carried`` are bytes with the IP header; None without an answer."""

    name: str
    target: IPAddress
    required: int
    carried: int | None
    #: The peer's first subnet.
    peer: str = ""
    #: The MTU to lower if the path carries less; this backend takes its own from it.
    setting: str = "Backend.MTU"
    #: Bytes that the outer headers take of this MTU.
    headers: int = 0
    #: Small packets of ``survey.SAMPLE`` that this path lost.
    lost: int = 0

    @property
    def end(self) -> tuple[str, Family]:
        """The peer, and the family of the path to it."""
        return self.peer, self.target.version

    @property
    def is_losing(self) -> bool:
        """True if the path loses packets at random: one may be lost by chance."""
        return self.lost >= _LOSES

    @property
    def state(self) -> State:
        if self.carried is None:
            return State.UNKNOWN
        return State.OK if self.carried == self.required else State.PROBLEM

    @property
    def note(self) -> str:
        if self.carried is None:
            return "no answer: ICMP may be filtered, or nothing is there"
        if self.carried == self.required:
            return ""
        if self.name == "underlay":
            return f"larger packets are lost or taken apart: {self.remedy(self.carried)}"
        return f"larger packets of containers are lost: {self.remedy(self.carried + self.headers)}"

    def remedy(self, outer: int) -> str:
        """Return what makes packets between the nodes at most ``outer`` bytes long."""
        inside = f", which leaves {outer - self.headers} inside the tunnel" if self.headers else ""
        return f"set {self.setting} to {outer} or less{inside}; then {AFTER_NEW_MTU}"


#: What a new MTU takes: daemons read it when they start, and containers when they are made.
AFTER_NEW_MTU = "restart flanneld on all nodes, and recreate their containers"
#: Finds, for many targets at once, a size that each path carries, at most the wanted one.
Find = Callable[[Sequence[tuple[IPAddress, int]]], Sequence[int | None]]


def peer_named(name: str, told: Status) -> PeerStatus:
    """Return the peer with this node's name, subnet, public IP or container. Raises ``FlannelError``."""
    if named := next((each for each in told.each_peer if each.node == name), None):
        return named
    try:
        net = ip_network(name, strict=False)
    except ValueError:
        raise FlannelError(f"{quoted(name)} is no peer, address or subnet", "give one of a peer") from None
    for peer in told.each_peer:
        if str(net.network_address) in peer.public_ips or any(
            each.version == net.version and net.network_address in each for each in peer.networks
        ):
            return peer
    if told.peers is UNSET:
        raise NothingKnown("no peers are known here", "start flanneld, or give -etcd-endpoints")
    raise FlannelError(f"no peer is known at {name}", "flannelctl peers lists them")


def sample(told: Status, find: Find) -> list[PathToPeer]:
    """Return the paths to a few peers, first to those that did not answer the last probe."""
    reached = [peer for peer in told.each_peer if peer.state == "in the kernel"]
    reached.sort(key=lambda peer: (probe := known(peer.probe)) is None or probe.rtt is not None)
    return paths(reached[:_FEW], told, find)


def with_losses(
    found: Sequence[PathToPeer], losses: Mapping[IPAddress, tuple[int, int]]
) -> Iterator[PathToPeer]:
    """Yield the paths with the packets of a sample that they lost (pure).

    A node that limits echoes does so on all paths: if it answers all of those between the nodes, the tunnel
    loses the others.
    """
    free = {each.end for each in found if each.name == "underlay" and losses.get(each.target) == (0, 0)}
    for each in found:
        between, after = losses.get(each.target, (0, 0))
        is_free = each.name == "tunnel" and each.end in free
        yield replace(each, lost=between + after * is_free)


def paths(
    peers: Sequence[PeerStatus], told: Status, find: Find, container: IPAddress | None = None
) -> list[PathToPeer]:
    """Return the paths to some peers, and to a ``container`` of the first, all probed at once.

    They are those between the nodes and, if the peer has an address in the overlay, that through the tunnel.
    """
    ends = [(*end, peer.subnets[0]) for peer in peers for end in _ends(peer, told)]
    if container is not None:
        ends.append(("container", container, known(told.mtu) or 0, peers[0].subnets[0]))
    setting, headers = _setting(told), described(told.backend or "").overhead
    carried = find([(target, required) for _, target, required, _ in ends])
    return [
        PathToPeer(name, target, required, size, peer, setting, headers.get(target.version, 0))
        for (name, target, required, peer), size in zip(ends, carried, strict=True)
    ]


def takes_mtu(backend: type[Backend]) -> bool:
    """Return True for a backend with the option MTU. The others take the MTU of the external interface."""
    return any(each.name == "MTU" for each in backend.options)


def _setting(told: Status) -> str:
    if takes_mtu(described(told.backend or "")):
        return "Backend.MTU"
    return f"the MTU of {told.uplink_name or 'the external interface'} on all nodes"


def _ends(peer: PeerStatus, told: Status) -> Iterator[tuple[str, IPAddress, int]]:
    """Yield name, target and wanted size of each path to a peer.

    Between the nodes that is the size of the tunnel's packets, which Backend.MTU may have made small.
    """
    uplink, mtu = known(told.uplink), known(told.mtu)
    overhead = described(told.backend or "").overhead
    for address in peer.addresses:
        headers = overhead.get(address.version)
        if uplink:
            outer = mtu + headers if mtu and headers else uplink.mtu
            yield "underlay", address, min(uplink.mtu, outer)
    ours = our_addresses(told)
    own = {net.version for net in told.own_subnets if net.network_address in ours}
    for net in peer.networks:
        if mtu and net.version in own:
            yield "tunnel", net.network_address, mtu


#: Seconds for a node to refuse a port, or a packet with no hop left; with udp the proxies of both nodes pass
#: that on: programs, which a busy host makes wait.
BRIEFLY, _BY_PROXIES = 0.3, 1.0
#: Seconds for a report that may have been left out before.
BEYOND_LIMIT = 0.7
#: Hops to the kernel of a peer: with udp the proxies of both nodes take one each. 0 is any number.
_HOPS, _HOPS_UDP, _ANY_HOPS = 1, 3, 0
#: Reports of a peer about a packet for a container: no hop is left, or an idle peer has no route to it.
_TAKEN = (errno.ETIME, errno.EHOSTUNREACH, errno.ENETUNREACH)


def passing(told: Status, paths: Collection[PathToPeer]) -> Iterator[tuple[str, int]]:
    """Yield the silent peers that pass packets on, or refuse TCP: a filter here or there drops ICMP."""
    silent = {path.peer for path in paths if path.carried is None}
    tunnels = {path.end for path in paths if path.name == "tunnel"}
    ends = {
        path.target: path.end
        for path in paths
        if path.carried is None and (path.name == "tunnel" or path.end not in tunnels)
    }
    is_udp = told.backend == "udp"
    yield from map(ends.__getitem__, survey.reached(ends, _BY_PROXIES if is_udp else BRIEFLY))
    asked = {target: (peer, target.version) for target, peer, _ in _behind(told, silent)}
    with suppress(OSError):
        for target in survey.passing(asked, _HOPS_UDP if is_udp else _HOPS, BRIEFLY):
            yield asked[target]


def _behind(told: Status, names: Collection[str]) -> Iterator[tuple[IPAddress, str, str]]:
    """Yield a container's address of each peer with one of these first subnets, that, and our device to it.

    By another way than the daemon's the first hop, which reports a packet without hops, would be a router.
    """
    look_up = route_lookup()
    for peer in told.each_peer if names else ():
        for target in map(container_of, peer.networks if peer.subnets[0] in names else ()):
            route = wanted_route(target, peer, told)
            if route is not None and follows(look_up(target), route):
                yield target, peer.subnets[0], route.device


def taken(
    targets: Collection[IPAddress], hops: int, sources: Mapping[Family, IPAddress] = MappingProxyType({})
) -> set[IPAddress]:
    """Return the targets whose nodes report a packet that has no hop left there. Raises ``OSError``.

    A kernel reports one a second to each host (icmp(7), icmp_ratelimit): the last try comes after that time.
    """
    found = survey.passing(targets, hops, BRIEFLY, sources=sources, errors=_TAKEN)
    rest = {*targets} - found
    return found | survey.passing(rest, hops, BEYOND_LIMIT, sources=sources, errors=_TAKEN)


def addresses_behind(told: Status, paths: Iterable[PathToPeer]) -> Iterator[IPAddress]:
    """Yield a container's address of each peer that answers and is reached without a tunnel."""
    there = {each.peer for each in paths if each.name == "underlay" and each.carried is not None}
    return (target for target, _, device in _behind(told, there) if device == told.uplink_name)


def turned_away(
    told: Status, paths: Collection[PathToPeer], own: Mapping[Family, IPAddress]
) -> Iterator[tuple[str, IPAddress, bool]]:
    """Yield peer and sender of packets of containers that get lost, though the peer's node answers.

    Last comes True if the node answers this sender, too: then the network passes it. ``own`` are addresses of
    ours in the network. Only packets without a tunnel may be turned away so.
    """
    there = (each for each in paths if each.name == "underlay" and each.carried is not None)
    nodes = {each.end: each.target for each in there}
    asked = {
        target: (peer, nodes[peer, target.version])
        for target, peer, device in _behind(told, {peer for peer, _ in nodes})
        if device == told.uplink_name and target.version in own and (peer, target.version) in nodes
    }
    with suppress(OSError):
        lost = asked.keys() - taken(asked, _HOPS, own)
        heard = survey.passing({asked[each][1] for each in lost}, _ANY_HOPS, BRIEFLY, sources=own)
        for target in lost:
            peer, node = asked[target]
            yield peer, own[target.version], node in heard
