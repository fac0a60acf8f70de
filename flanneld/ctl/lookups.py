"""Flows of the network through this host, and route lookups as the kernel makes them for their packets."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from flanneld.backends.contract import OuterPackets
from flanneld.backends.registry import described
from flanneld.ctl.compare import NOWHERE, RouteTaken, follows, wanted_route
from flanneld.diagnostics.status import PeerStatus, Status, addresses, known
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork, family_of
from flanneld.network.firewall.fate import Packet
from flanneld.network.firewall.foreign import SENDERS, SOME_PORT, Opening, of_network
from flanneld.network.host import HostView
from flanneld.network.lookups import RTN_LOCAL, PolicyRule
from flanneld.network.rtnetlink.messages import RTM_GETNEIGH, decode_neighbor, neighbors_request
from flanneld.runtime.shell import Command, command
from flanneld.state.resources import Neighbor

#: Hooks that a packet passes if it is for this host, from it, or through it.
INWARDS = frozenset({"ingress", "prerouting", "input"})
OUTWARDS = frozenset({"output", "postrouting"})
THROUGH = frozenset({"ingress", "prerouting", "forward", "postrouting"})
#: Numbers of IP protocols.
_NUMBERS = {"ipencap": 4, "esp": 50}


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


def host_addresses() -> Iterator[tuple[str, IPAddress]]:
    """Yield the addresses of all interfaces, with the interface's name. Raises ``OSError``."""
    view = HostView()
    names = view.names()
    for family in FAMILIES:
        for seen in view.addresses(family):
            yield names.get(seen.index, ""), seen.address


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
    ours = addresses(uplink.addresses) if uplink else []
    for each in dict.fromkeys(carriers(told, peer.status)):
        protocol = each.protocol
        here = next((ip for ip in ours if ip.version == each.family), None)
        there = next((ip for ip in peer.public if ip.version == each.family), None)
        if here is None or there is None:
            continue
        sources = (min(each.port, SENDERS[0]), SENDERS[1]) if each.port else None
        for shown, packet, hooks, port in (
            ("from", Packet(name, "", there, here, protocol, each.port), INWARDS, each.port),
            ("to", Packet("", name, here, there, protocol, each.peer_port), OUTWARDS, each.peer_port),
        ):
            title = f"{named(protocol, port)} {shown} its peers"
            yield Flow(title, replace(packet, sport=sources), hooks, (Opening(protocol, port),))


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


#: Peers for which routes are looked up, spread over all: rules and filters concern all of them, or a range.
_PEERS = 64
TO_NODES, FROM_NODES = "packets to other nodes", "packets from other nodes"
FROM_CONTAINERS = "packets of its containers to other nodes"
TO_CONTAINERS = "packets of other nodes to its containers"
_STRICT = 1
_FORWARDING = "/proc/sys/net/ipv4/conf/{}/forwarding"
_RP_FILTER = "/proc/sys/net/ipv4/conf/{}/rp_filter"


class Lost(Struct, frozen=True, gc=False):
    """Packets that the kernel drops or misroutes. ``commands`` correct that; none if it takes a decision.

    ``cause`` is ``filter`` (reverse path), ``forwarding`` of an interface, ``uplink`` (another interface than
    the daemon's), ``rule`` or ``route``; ``about`` is its interface or text. ``number`` of the ``asked``
    packets of this kind are lost so, in these ``families``.
    """

    packets: str
    cause: str
    about: str
    evidence: str
    commands: tuple[Command, ...] = ()
    number: int = 1
    asked: int = 1
    families: frozenset[Family] = frozenset({4})
    #: Route of a kind that leads nowhere, as ip-route(8) deletes it; empty if there is none.
    removal: str = ""


class Question(Struct, frozen=True, gc=False):
    """One packet, and how its route should look: ``is_right`` decides."""

    packets: str
    target: IPAddress
    source: IPAddress | None
    iif: str
    is_right: Callable[[RouteTaken], bool]

    def __str__(self) -> str:
        return f"{self.target} from {self.source}" + (f" iif {self.iif}" if self.iif else "")


def lost_packets(
    told: Status,
    names: Mapping[int, str],
    container_devices: Mapping[Family, str],
    chosen: Sequence[ParsedPeer] | None = None,
) -> list[Lost]:
    """Return each cause of a loss once, on the way to the ``chosen`` peers or to some. Raises ``OSError``."""
    host = _Host(HostView(), names)
    asked = list(questions(told, chosen_of(told) if chosen is None else chosen, container_devices))
    wrong = ((each, way) for each in asked if (way := host.ask(each)) is not None)
    return by_cause(asked, ((each, host.explain(each, way, told)) for each, way in wrong))


def by_cause(asked: Iterable[Question], lost: Iterable[tuple[Question, Lost]]) -> list[Lost]:
    """Return each cause once, with the number and the families of the packets that it loses (pure)."""
    found: dict[tuple[str, str], Lost] = {}
    for question, each in lost:
        key, family = (each.cause, each.about), frozenset({question.target.version})
        alike = found.get(key, replace(each, number=0, families=family))
        found[key] = replace(alike, number=alike.number + 1, families=alike.families | family)
    total = Counter(each.packets for each in asked)
    return [replace(each, asked=total[each.packets]) for each in found.values()]


def chosen_of(told: Status) -> list[ParsedPeer]:
    """Return a bounded number of peers, spread over all (pure)."""
    reached = reached_peers(told)
    step = max(1, len(reached) // _PEERS)
    return list(map(parsed, reached[::step][:_PEERS]))


def questions(
    told: Status, chosen: Iterable[ParsedPeer], container_devices: Mapping[Family, str]
) -> Iterator[Question]:
    """Yield what to look up (pure)."""
    own, name = told.own_subnets, told.uplink_name
    uplink = known(told.uplink)
    local = {ip.version: ip for ip in (addresses(uplink.addresses) if uplink else ())}
    for peer in chosen:
        for public in peer.public:
            here = local.get(public.version)
            if here is not None:
                yield Question(TO_NODES, public, here, "", lambda way: way.is_here or way.device == name)
                yield Question(FROM_NODES, here, public, name, lambda way: way.is_here)
        for subnet in own:
            device = container_devices.get(subnet.version)
            theirs = next((each for each in peer.subnets if each.version == subnet.version), None)
            if device is None or theirs is None:
                continue
            here, there = container_of(subnet), container_of(theirs)
            route = wanted_route(there, peer.status, told)
            if route is None:
                continue
            yield Question(
                FROM_CONTAINERS,
                there,
                here,
                device,
                lambda way, route=route: follows(way, route),  # type: ignore[misc]
            )
            yield Question(
                TO_CONTAINERS,
                here,
                there,
                route.device,
                lambda way, device=device: way.device == device,  # type: ignore[misc]
            )


class _Host:
    """The kernel's answers, and what is needed to explain them."""

    def __init__(self, view: HostView, names: Mapping[int, str]) -> None:
        self._view = view
        self._names = names
        self._indexes = {name: index for index, name in names.items()}
        self._rules: list[PolicyRule] | None = None

    def ask(self, question: Question) -> RouteTaken | OSError | None:
        """Return the wrong route, or the kernel's refusal; None if the route is right."""
        if question.iif and question.iif not in self._indexes:
            return None  # a missing device is a finding of its own
        try:
            way = self._way(question.target, question.source, question.iif)
        except OSError as failure:
            if failure.errno == errno.EHOSTUNREACH and question.iif and does_not_forward(question.target):
                return None  # so is forwarding that is off
            return failure
        return None if question.is_right(way) else way

    def explain(self, question: Question, wrong: RouteTaken | OSError, told: Status) -> Lost:
        """Return the cause, as far as it is found."""
        reason = (
            f"the route is {wrong}"
            if isinstance(wrong, RouteTaken)
            else f"the kernel drops it: {wrong.strerror}"
        )
        evidence = f"{question}: {reason}"
        name = question.iif.replace(".", "/")
        if _does_not_pass_on(question):
            fix = command("sysctl", "-w", f"net.ipv4.conf.{name}.forwarding=1")
            return Lost(question.packets, "forwarding", question.iif, evidence, (fix,))
        strict = self._strict(question)
        if strict:
            fix = command("sysctl", "-w", f"net.ipv4.conf.{name}.rp_filter=2")
            return Lost(question.packets, "filter", question.iif, f"{evidence}; {strict}", (fix,))
        rule = self._rule(question)
        if rule is not None:
            return Lost(
                question.packets,
                "rule",
                f"{rule.priority}: {rule.text}",
                evidence,
                tuple(_before(rule, question, told)),
            )
        if isinstance(wrong, RouteTaken) and question.packets == TO_NODES and wrong.device:
            return Lost(question.packets, "uplink", wrong.device, evidence)
        about = str(question.target) if question.packets != TO_CONTAINERS else ""
        removal = self._dead_end(question.target) if isinstance(wrong, OSError) else ""
        return Lost(question.packets, "route", about, evidence, removal=removal)

    def _dead_end(self, target: IPAddress) -> str:
        """Return the most specific route to an address if it is of a kind that leads nowhere."""
        around = [
            (destination, kind)
            for destination, _, kind in self._view.routes(target.version)
            if target in destination
        ]
        destination, kind = max(around, key=lambda each: each[0].prefixlen, default=(None, 0))
        return f"{NOWHERE[kind]} {destination}" if kind in NOWHERE else ""

    def _way(self, target: IPAddress, source: IPAddress | None = None, iif: str = "") -> RouteTaken:
        found = self._view.lookup(target, source, self._indexes[iif] if iif else 0)
        is_here = found.kind == RTN_LOCAL
        return RouteTaken(self._names.get(found.index, ""), found.gateway, is_here=is_here)

    def _strict(self, question: Question) -> str:
        """Return why the reverse path filter drops a packet; empty if it does not."""
        if not question.iif or question.source is None or question.source.version != 4:
            return ""
        values = [number(_RP_FILTER.format(name)) for name in ("all", question.iif)]
        if max(values) != _STRICT:
            return ""
        try:
            back = self._way(question.source)
        except OSError:
            return "rp_filter is strict, and there is no route back to the sender"
        return "" if back.device == question.iif else f"rp_filter is strict, and the route back is {back}"

    def _rule(self, question: Question) -> PolicyRule | None:
        if self._rules is None:
            self._rules = [rule for family in FAMILIES for rule in self._view.rules(family)]
        matching = (
            rule
            for rule in self._rules
            if not rule.is_default
            and (
                rule.may_match(question.target, question.source, question.iif or "lo")
                # The reverse path filter asks for the way back.
                or (question.source and rule.may_match(question.source, question.target, "lo"))
            )
        )
        return next(matching, None)


def _before(rule: PolicyRule, question: Question, told: Status) -> Iterator[Command]:
    """Yield the rule that has packets for the cluster network use the main table before a foreign rule."""
    for network, _ in told.ranges:
        if network.version == rule.family and question.target in network and rule.priority > 0:
            family = ("-6",) if rule.family == 6 else ()
            add = ("rule", "add", "to", str(network), "lookup", "main")
            yield command("ip", *family, *add, "priority", rule.priority - 1)


def pinned(told: Status, indexes: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """Yield address, MAC and device of permanent neighbours on the uplink that are other nodes."""
    device = told.uplink_name
    nodes = {ip for peer in told.each_peer for ip in peer.public_ips}
    if device not in indexes or not nodes:
        return
    view = HostView()
    for family in FAMILIES:
        for item in view.dump(RTM_GETNEIGH, neighbors_request(family, indexes[device])):
            seen = decode_neighbor(*item, lambda _: device)
            if isinstance(seen, Neighbor) and str(seen.address) in nodes:
                yield str(seen.address), seen.mac, device


def _does_not_pass_on(question: Question) -> bool:
    """Return True if the interface by which a packet arrives does not forward."""
    is_passed_on = question.iif and question.packets != FROM_NODES and question.target.version == 4
    return bool(is_passed_on) and not number(_FORWARDING.format(question.iif))


def does_not_forward(target: IPAddress) -> bool:
    path = "ipv4/ip_forward" if target.version == 4 else "ipv6/conf/all/forwarding"
    return number(f"/proc/sys/net/{path}") == 0


def number(path: str | Path) -> int:
    """Return the number in a file, 0 if there is none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 0
