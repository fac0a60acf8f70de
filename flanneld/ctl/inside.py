"""Containers of this node, looked at from inside: routes, neighbours, ports, and who answers them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from flanneld.ctl.losses import dead_end
from flanneld.ctl.neighbors import neighbors
from flanneld.ctl.paths import (
    BEYOND_LIMIT,
    BRIEFLY,
    ELSEWHERE,
    PathToPeer,
    addresses_behind,
    chosen_of,
    container_of,
    taken,
)
from flanneld.diagnostics.status import Status, known
from flanneld.model import FAMILIES, Family, IPAddress
from flanneld.network import survey
from flanneld.network.bridges import learnt
from flanneld.network.host import HostView, entered, named_namespaces, number_of
from flanneld.network.routing import LookupResult, PolicyRule, RoutedPacket
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import RTN_UNICAST
from flanneld.runtime import files
from flanneld.state.resources import Neighbor

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts

#: Namespaces looked at, at most: a node has 110 pods, if Kubernetes is not told otherwise.
_MANY = 256
#: Containers that send echoes, and those that lack answers after which no more do: each takes up to 3 s.
_ASKED, _SILENT = 8, 2
#: Other nodes for which the containers' routes are looked up, and that they send echoes to.
_PEERS = 3
#: Hops to the kernel of a peer without an address in the network: this host takes one.
_HOPS = 2
#: Files of a bridge's port: option of bridge(8), and the values with which it does not pass all packets on.
#: States are disabled and blocking (linux/if_bridge.h).
_PORT = {
    "state": ("state", "04"),
    "unicast_flood": ("flood", "0"),
    "learning": ("learning", "0"),
    "broadcast_flood": ("bcast_flood", "0"),
}


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
    is_up: bool = True
    #: This host's end of the veth pair, and what its bridge does not do for it, as bridge(8) names that.
    port: str = ""
    port_mtu: int = 0
    off: tuple[str, ...] = ()
    #: True if the bridge knows the port of its MAC address, so that it need not flood.
    is_learnt: bool = True
    mac: str = ""
    #: Neighbours whose MAC addresses are fixed by hand inside.
    pinned: tuple[Neighbor, ...] = ()
    #: Length of the address's prefix, 0 if it is not known.
    length: int = 0
    #: Route of this host by which packets for it leave, if that does not lead to it.
    detour: str = ""
    #: Route inside, as ip-route(8) deletes it, that leads packets for other nodes away from this host.
    astray: str = ""
    #: First policy rule inside that is none of the kernel's, if there is a default route that it overrides.
    rule: PolicyRule | None = None
    #: Hops that its packets may take, 0 if that is not known.
    hops: int = 0
    #: True unless its gateway on this host answers neither ICMP nor TCP from inside.
    is_heard: bool = True
    #: True if its TCP for other nodes is refused before it gets to this host.
    is_refused: bool = False
    #: True unless a router outside answers this host, and not the container.
    is_led_out: bool = True
    #: What of its echoes to another node gets no answer, while this host gets all of its own.
    unanswered: str = ""
    #: Rules of this host that drop its packets, each with its chain.
    dropped_by: tuple[str, ...] = ()

    @property
    def hops_setting(self) -> str:
        return _hops_setting(self.address.version, self.device)


def _hops_setting(family: Family, device: str) -> str:
    return "net/ipv4/ip_default_ttl" if family == 4 else f"net/ipv6/conf/{device}/hop_limit"


def container_devices(
    told: Status, addresses: Iterable[tuple[str, IPAddress]], ours: Collection[str] = ()
) -> dict[Family, str]:
    """Return the device to this node's containers, by family: one with an address in our subnet (pure).

    ``ours`` are flannel's devices if the status does not tell them.
    """
    found: dict[Family, str] = {}
    ours, own = known(told.devices) or ours, told.own_subnets
    for name, address in addresses:
        if name not in ours and any(address in net for net in own):
            found.setdefault(address.version, name)
    return found


def read_containers(
    told: Status, host_links: Collection[SeenLink], host_addresses: Collection[IPAddress]
) -> list[Container]:
    """Return the containers in named namespaces; none without the permission to enter them.

    A host may have other namespaces with such addresses: only an end of a veth pair of this host counts.
    """
    networks = [network for network, _ in told.ranges]
    targets = _targets(told)
    names = {link.index: link.name for link in host_links}
    host = HostView()

    def inside(path: Path, view: HostView, ends: Mapping[int, SeenLink]) -> Iterator[Container]:
        for link in (each for each in view.links() if each.index in ends):
            end, pinned = ends[link.index], tuple(neighbors(view, [link]))
            off, bridge = off_options(end.name), names.get(end.master, end.name)
            found = (
                each for family in FAMILIES if targets[family] for each in view.addresses(family, link.index)
            )
            for seen in (each for each in found if any(each.address in net for net in networks)):
                address, back = seen.address, host.look_up_route(seen.address)
                reached_by = names.get(back.index, "") if back and back.kind == RTN_UNICAST else ""
                is_led, astray = _led(view, address, targets[address.version], ends, host_addresses)
                is_routed = link.up and is_led
                yield Container(
                    str(path),
                    link.name,
                    address,
                    is_routed=is_routed,
                    mtu=link.mtu,
                    reached_by=reached_by,
                    detour=astray_route(host, address) if reached_by not in ("", bridge) else "",
                    attached_to=bridge,
                    is_up=link.up,
                    port=end.name,
                    port_mtu=end.mtu,
                    off=off,
                    is_learnt=not off or link.mac in learnt(bridge),
                    mac=link.mac,
                    pinned=pinned,
                    length=seen.length,
                    astray=astray,
                    rule=None if is_routed else overriding_rule(view, address.version),
                    hops=files.number(Path("/proc/sys", _hops_setting(address.version, link.name))),
                )

    found: list[Container] = []
    ends: dict[int, dict[int, SeenLink]] = {}
    for link in host_links:
        if link.make.make == "veth" and link.namespace >= 0:
            ends.setdefault(link.namespace, {})[link.link] = link
    for path in islice(named_namespaces() if networks and any(targets.values()) and ends else (), _MANY):
        with suppress(OSError):
            mine = ends.get(number_of(host, path))
            if mine:
                with entered(path):
                    found += inside(path, HostView(), mine)
    return found


def answered(facts: Facts) -> Iterator[Container]:
    """Yield those of a few containers that lack answers of this host, or of another node that answers it.

    A host may refuse packets of its containers, and still passes them on: then it reports one without hops.
    """
    ways, targets = {(name, at.version): at for name, at in facts.gateways}, _targets(facts.status)
    tunnels = [each for each in facts.paths if each.name == "tunnel"]
    behind = list(addresses_behind(facts.status, facts.paths))
    left, looked_out = _SILENT, set()
    for each in facts.containers[:_ASKED]:
        family = each.address.version
        gateway = ways.get((each.attached_to, family))
        if left and gateway and targets[family]:
            if not _is_heard(each, gateway, targets[family][0]):
                left -= 1
                yield replace(each, is_heard=False)
            elif each.is_routed and (lost := _unanswered(each, tunnels, behind)):
                left -= 1
                yield replace(each, unanswered=lost)
            elif each.is_routed and _is_refused(each, targets[family][0]):
                yield replace(each, is_refused=True)
            elif each.is_routed and family not in looked_out:
                looked_out.add(family)
                if not _leads_out(each):
                    yield replace(each, is_led_out=False)


def _is_heard(at: Container, gateway: IPAddress, target: IPAddress) -> bool:
    with suppress(OSError), entered(Path(at.path)):
        return (
            survey.echoes([gateway], BRIEFLY, 1)[gateway].arrived
            or bool(survey.reached([gateway], BRIEFLY))
            or bool(survey.passing([target], 1, BRIEFLY, 1))
        )
    return True


def _is_refused(at: Container, target: IPAddress) -> bool:
    """Return True if TCP for another node is refused inside: with one hop it gets only to this host."""
    with suppress(OSError), entered(Path(at.path)):
        return bool(survey.reached([target], BRIEFLY, 1))
    return False


def _leads_out(at: Container) -> bool:
    """Return False if a router outside reports packets of this host without hops, and not the container's.

    It reports one a second to this host: the last try comes after that time.
    """
    outside = [ELSEWHERE[at.address.version]]
    with suppress(OSError):
        if survey.passing(outside, 1, BRIEFLY, 1):
            with entered(Path(at.path)):
                return bool(survey.passing(outside, 2, BEYOND_LIMIT, 3))
    return True


def _unanswered(at: Container, tunnels: Iterable[PathToPeer], behind: Iterable[IPAddress]) -> str:
    """Return what of a container's echoes to a node gets no answer, if this host gets all of its own.

    They go to the ends of the ``tunnels``, or without one as far as the nodes with addresses ``behind`` them.
    """
    family = at.address.version
    through = [each for each in tunnels if each.target.version == family][:_PEERS]
    with suppress(OSError):
        for each in through:
            size = min(each.required, at.mtu)
            with entered(Path(at.path)):
                lost = survey.unanswered(each.target, size)
            if lost and not survey.unanswered(each.target, size):
                with entered(Path(at.path)):  # a limit of the node's answers is over by now
                    lost = survey.unanswered(each.target, size)
                if lost:
                    return f"{lost_echoes(lost, size)} to {each.target}"
        asked = {*[target for target in behind if target.version == family and not through][:_PEERS]}
        with entered(Path(at.path)):
            asked -= taken(asked, _HOPS)
        for target in taken(asked, _HOPS - 1):
            return f"packets for {target} as far as its node"
    return ""


def lost_echoes(number: int, size: int) -> str:
    """Say what gets no answer of a sample whose largest packets have ``size`` bytes: one alone is that."""
    return f"{number} of {survey.SAMPLE} echoes" if number > 1 else f"echoes of {size} bytes"


def _led(
    view: HostView,
    source: IPAddress,
    targets: Iterable[IPAddress],
    ends: Collection[int],
    own: Collection[IPAddress],
) -> tuple[bool, str]:
    """Return True if a container's packets for all targets get to this host; and what leads some away."""
    outs = [(_way(view, target, source), target) for target in targets]
    ways = [(way, led_away(view, way, target, ends, own)) for way, target in outs]
    is_led = all(way and way.index in ends and is_ours(way, own) and not away for way, away in ways)
    return is_led, next((away for _, away in ways if away), "")


def _way(view: HostView, target: IPAddress, source: IPAddress) -> LookupResult | None:
    """Return the route of a packet with this source, None if there is none."""
    with suppress(OSError):
        return view.lookup(RoutedPacket(target, source))
    return None


def _targets(told: Status) -> dict[Family, list[IPAddress]]:
    """Return addresses of a few other nodes' containers for each family."""
    found: dict[Family, list[IPAddress]] = {family: [] for family in FAMILIES}
    for net in (net for peer in chosen_of(told)[:_PEERS] for net in peer.subnets):
        found[net.version].append(container_of(net))
    return found


def is_ours(way: LookupResult, host_addresses: Collection[IPAddress]) -> bool:
    """Return True for a route by no gateway, by one of this host, or by one that is not looked at."""
    gateway = way.gateway
    is_known = gateway is None or gateway.is_link_local or gateway in host_addresses
    return is_known and way.kind == RTN_UNICAST


def astray_route(view: HostView, target: IPAddress) -> str:
    """Return the route to an address by another interface than ours; empty for a default route or none."""
    found = view.matching_route(target)
    if found is None or found.destination is None:
        return ""
    return f"{found.destination} dev {view.name_of(found.hops[0][0])}"


def led_away(
    view: HostView,
    way: LookupResult | None,
    target: IPAddress,
    ends: Collection[int],
    own: Collection[IPAddress],
) -> str:
    """Return the route inside a container that leads its packets for other nodes away from this host, if any.

    ``ends`` are its ends of veth pairs, ``own`` this host's addresses. A router of IPv6 is known by its
    link-local address; for one of IPv4 with such an address this host may answer by proxy ARP.
    """
    if way is None:
        return dead_end(view, target)
    router = way.gateway
    if router and router.version == 6 and router.is_link_local and router not in own:
        return f"default via {router} dev {view.name_of(way.index)}"
    return "" if way.index in ends and is_ours(way, own) else astray_route(view, target)


def overriding_rule(view: HostView, family: Family) -> PolicyRule | None:
    rules = (rule for rule in view.rules(family) if not rule.is_default)
    return next(rules, None) if view.default_routes(family) else None


def off_options(port: str) -> tuple[str, ...]:
    """Return what a bridge does not do for its port."""
    where = Path(f"/sys/class/net/{port}/brport")
    values = ((option, files.text(where / name).strip(), bad) for name, (option, bad) in _PORT.items())
    return tuple(option for option, value, bad in values if value and value in bad)
