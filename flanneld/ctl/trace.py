"""Trace of a packet's path from this node to an address, hop by hop, with the state of each hop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.ctl.compare import (
    ActualState,
    RouteTaken,
    differences,
    follows,
    read,
    route_lookup,
    wanted_route,
)
from flanneld.ctl.drops import Drop, bases_of, drops_towards, masquerading_rules
from flanneld.ctl.losses import Lost, does_not_forward, host_addresses, lost_packets
from flanneld.ctl.nodes import handshake
from flanneld.ctl.output import State
from flanneld.ctl.paths import container_of, parsed, reached_peers
from flanneld.diagnostics.status import PeerStatus, Status, known, networks, resources
from flanneld.errors import FlannelError
from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.firewall.fate import MASQUERADE, Packet, Rule
from flanneld.network.firewall.iptables_text import rule_text
from flanneld.state.resources import FdbEntry, Neighbor, Resource, Route

if TYPE_CHECKING:
    from flanneld.ctl.inside import Container

WayTo = Callable[[IPAddress], RouteTaken]
#: Our masquerading rules for a family's packets; None if they cannot be read.
MasqueradeOf = Callable[[Family], Sequence[Rule] | None]


class Hop(Struct, frozen=True, gc=False):
    """One hop; ``note`` gives the reason."""

    hop: str
    found: str
    state: State
    note: str = ""


def examine(target: IPAddress, told: Status, sender: IPAddress | None) -> list[Hop]:
    """Return the hops from this host to an address, or from the container with the address ``sender``.

    Raises ``FlannelError`` without such a container, ``OSError`` if the kernel does not tell.
    """
    from flanneld.ctl.inside import container_devices, read_containers

    found = read(told)
    addresses = tuple(host_addresses())
    devices = container_devices(told, addresses)
    first: list[Hop] = []
    if sender is not None:
        containers = read_containers(told, found.links, [address for _, address in addresses])
        container = next((each for each in containers if each.address == sender), None)
        if container is None:
            raise FlannelError(
                f"no container with {sender} is found here",
                "run as root; flannel's containers have namespaces",
            )
        first = [from_container(container, told)]
        devices = {**devices, sender.version: container.attached_to}
    names = {link.index: link.name for link in found.links}
    peers = [parsed(each) for each in reached_peers(told) if _subnet_with(target, each.networks)]
    bases = bases_of(told)
    lost = lost_packets(told, names, devices, bases, peers) if peers else []
    drops = drops_towards(target, told, devices, bases)
    hops = trace(target, told, found, route_lookup(), drops, partial(masquerading_rules, told), lost)
    if peers and does_not_forward(target):
        first.append(Hop("forwarding", "off", State.PROBLEM, "this node passes no packet of a container on"))
    return [*first, *hops]


def from_container(container: Container, told: Status) -> Hop:
    """Return the hop of a container that sends the packet (pure)."""
    shown = f"{container.address} on {container.attached_to}, MTU {container.mtu}"
    mtu = known(told.mtu)
    if not container.is_routed:
        note = "it has no route to the containers of other nodes by an address of this host"
    elif container.reached_by != container.attached_to:
        note = f"packets for it leave by {container.reached_by or 'no interface'}"
    elif mtu and container.mtu > mtu:
        note = f"its MTU is above that of the network, {mtu}: recreate it"
    else:
        note = ""
    return Hop("container", shown, _verdict(not note), note)


def trace(
    target: IPAddress,
    told: Status,
    found: ActualState,
    look_up_route: WayTo,
    drops: Sequence[Drop] = (),
    rules_of: MasqueradeOf = lambda _: (),
    lost: Sequence[Lost] = (),
) -> list[Hop]:
    """Return the hops, as far as they are known.

    ``drops`` and ``lost`` are what filters and routes of this host do to packets from and to the peer.
    """
    own = _subnet_with(target, told.own_subnets)
    if own:
        return list(_to_a_container(target, own, told, look_up_route))
    peer = next((each for each in told.each_peer if _subnet_with(target, each.networks)), None)
    if peer is not None:
        hops = list(_to_a_peer(target, peer, told, found, look_up_route))
        # A route that is wrong has a hop already, and so has an uplink.
        is_wrong = any(each.state == State.PROBLEM for each in hops)
        causes = {"filter", "forwarding", "rule", "no rule", *(() if is_wrong else ("route", "no route"))}
        hops += (
            Hop("lookup", each.packets, State.PROBLEM, each.note) for each in lost if each.cause in causes
        )
        return [*hops, *(Hop("filter", each.chain, each.state, each.note) for each in drops)]
    way = look_up_route(target)
    if not told.ranges:
        state = State.OK if way.is_here else State.UNKNOWN if way.device else State.PROBLEM
        return [Hop("lease", "", State.UNKNOWN, "the network is not known"), Hop("route", str(way), state)]
    if not any(target in network for network, _ in told.ranges):
        hops = [
            Hop("lease", "outside the network", State.OK),
            Hop("route", str(way), _verdict(bool(way.device))),
        ]
        return [*hops, *(() if way.is_here else _seen_source(target, told, way, rules_of))]
    if not told.knows_peers:
        return [
            Hop("lease", "", State.UNKNOWN, "the leases are not known"),
            Hop("route", str(way), State.UNKNOWN if way.device else State.PROBLEM),
        ]
    return [
        Hop("lease", "none", State.PROBLEM, "no node has a lease for it"),
        Hop("route", str(way), State.UNKNOWN),
    ]


def _seen_source(target: IPAddress, told: Status, way: RouteTaken, rules_of: MasqueradeOf) -> Iterator[Hop]:
    """Yield the source that the target sees of a container's packets, and our rule that decides."""
    own = next((net for net in told.own_subnets if net.version == target.version), None)
    firewall = known(told.firewall)
    if own is None or not way.device:
        return
    rules = rules_of(own.version) if firewall and firewall.masquerade else ()
    if rules is None:
        yield Hop("source", "", State.UNKNOWN, "the rules cannot be read: run as root")
        return
    packet = Packet(None, way.device, container_of(own), target)
    rule = next((each for each in rules if each.matches(packet)), None)
    if rule and rule.verdict == MASQUERADE:
        seen = f"this node's address on {way.device}"
    else:
        seen = f"the container's address in {own}"
    yield Hop(
        "source", seen, State.OK, f"by {rule_text(rule)}" if rule else "no rule of flannel's is about it"
    )


def _to_a_container(target: IPAddress, own: str, told: Status, look_up_route: WayTo) -> Iterator[Hop]:
    way = look_up_route(target)
    outwards = {*(known(told.devices) or ()), told.uplink_name}
    yield Hop("lease", f"{own}, ours", State.OK)
    stays = way.is_here or (bool(way.device) and way.device not in outwards)
    note = "" if stays else "no bridge of this node has this subnet: is the container runtime up?"
    yield Hop("route", str(way), _verdict(stays), note)


def _to_a_peer(
    target: IPAddress, peer: PeerStatus, told: Status, found: ActualState, look_up_route: WayTo
) -> Iterator[Hop]:
    public = ", ".join(peer.public_ips)
    good = peer.state not in ("refused", "unsafe", "contested")
    yield Hop(
        "lease",
        f"{peer.name} of {public}",
        _verdict(good),
        "" if good else f"{peer.state}: {peer.reason or ', '.join(peer.conflicts)}",
    )
    route = wanted_route(target, peer, told)
    way = look_up_route(target)
    yield _route_hop(route, way, found)
    neighbours = (each for each in resources(peer.objects) if isinstance(each, Neighbor))
    neighbour = next((each for each in neighbours if route and each.address == route.gateway), None)
    if neighbour is not None:
        yield _present("neigh", neighbour, found)
        entries = (each for each in resources(peer.objects) if isinstance(each, FdbEntry))
        yield _present("fdb", next((each for each in entries if each.mac == neighbour.mac), None), found)
    yield from _device(route.device if route else way.device, told, found)
    yield from _session(target, peer, told)
    yield from _underlay(target, peer, told, look_up_route)


def _route_hop(route: Route | None, way: RouteTaken, found: ActualState) -> Hop:
    if route is None:
        note = "no route is desired for this peer"
    elif not found.has(route):
        note = f"missing: {route}"
    else:
        note = "" if follows(way, route) else f"{way} overrides flannel's {route}"
    return Hop("route", str(way), _verdict(not note), note)


def _present(hop: str, desired: Resource | None, found: ActualState) -> Hop:
    if desired is not None and found.has(desired):
        return Hop(hop, str(desired), State.OK)
    return Hop(hop, "", State.PROBLEM, f"missing: {desired or 'the entry'}")


def _device(name: str, told: Status, found: ActualState) -> Iterator[Hop]:
    link = found.link(name)
    if link is None:
        yield Hop("device", "", State.PROBLEM, f"there is no {name}" if name else "no device")
        return
    shown = f"{name}, MTU {link.mtu}, {'up' if link.up else 'down'}"
    desired = [each for each in resources(told.local) if each.key == link.make.key]
    drift = [str(each) for item in desired for each in differences(item, link.make, found)]
    if not link.up and not drift:
        drift = ["is down"]
    yield Hop("device", shown, _verdict(not drift), "; ".join(drift))


def _session(target: IPAddress, peer: PeerStatus, told: Status) -> Iterator[Hop]:
    """Yield the encrypted session that carries the packet; one that is idle begins with it."""
    for session in known(peer.sessions) or ():
        if _subnet_with(target, networks([session.subnet])):
            state = {"established": State.OK, "silent": State.PROBLEM}.get(session.state, State.UNKNOWN)
            age = handshake(session, known(told.time))
            note = "packets are sent there and no handshake succeeds" if state == State.PROBLEM else ""
            yield Hop("session", f"{session.endpoint or 'no endpoint'}, handshake: {age}", state, note)


def _underlay(target: IPAddress, peer: PeerStatus, told: Status, look_up_route: WayTo) -> Iterator[Hop]:
    uplink = told.uplink_name
    for public in peer.addresses:
        if public.version != target.version:
            continue
        way = look_up_route(public)
        state = State.OK if way.device == uplink else State.UNKNOWN if way.device else State.PROBLEM
        note = "" if state == State.OK else f"the uplink is {uplink}"
        yield Hop("uplink", f"{public} {way}", state, note)


def _subnet_with(target: IPAddress, subnets: Iterable[IPNetwork]) -> str:
    return next((str(net) for net in subnets if target in net), "")


def _verdict(good: bool) -> State:
    return State.OK if good else State.PROBLEM
