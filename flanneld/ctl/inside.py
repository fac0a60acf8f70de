"""Containers of this node, looked at from inside: routes, neighbours, ports, and who answers them."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from flanneld.ctl.losses import number, permanent
from flanneld.ctl.paths import BRIEFLY, chosen_of, container_of
from flanneld.diagnostics.status import Status, known
from flanneld.model import Family, IPAddress
from flanneld.network import survey
from flanneld.network.host import HostView, entered, named_namespaces, number_of
from flanneld.network.routing import LookupResult, PolicyRule
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import RTN_UNICAST, mac_text
from flanneld.runtime import files
from flanneld.state.resources import Neighbor

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts

#: Namespaces looked at, at most: a node has 110 pods, if Kubernetes is not told otherwise.
_MANY = 256
#: Containers that send an echo, and silent ones after which no more do: each takes 0.9 s.
_ASKED, _SILENT = 8, 2
#: Setting of IPv4's hops, as this thread's namespace has it; more lead out of any cluster.
_TTL, _HOPS = Path("/proc/sys/net/ipv4/ip_default_ttl"), 8
#: Files of a bridge's port: option of bridge(8), and the values with which it does not pass all packets on.
#: States are disabled and blocking (linux/if_bridge.h).
_PORT = {
    "state": ("state", "04"),
    "unicast_flood": ("flood", "0"),
    "learning": ("learning", "0"),
    "broadcast_flood": ("bcast_flood", "0"),
}
#: struct __fdb_entry (linux/if_bridge.h): MAC address, port, 1 for an address of the bridge itself.
_FDB_ENTRY = struct.Struct("=6sxB8x")


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
    #: Hops of its packets of IPv4, 0 if that is not known.
    hops: int = 0
    #: True unless its gateway on this host answers neither ICMP nor TCP from inside.
    is_heard: bool = True


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
            end, pinned = ends[link.index], tuple(permanent(view, [link]))
            off, bridge = off_options(end.name), names.get(end.master, end.name)
            found = (each for family in targets for each in view.addresses(family, link.index))
            for seen in (each for each in found if any(each.address in net for net in networks)):
                address, target = seen.address, targets[seen.address.version]
                out, back = view.look_up_route(target), host.look_up_route(address)
                reached_by = names.get(back.index, "") if back and back.kind == RTN_UNICAST else ""
                astray = led_away(view, out, target, ends, host_addresses) if out else ""
                is_routed = link.up and out is not None and not astray and is_ours(out, host_addresses)
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
                    hops=number(_TTL) if address.version == 4 else 0,
                )

    found: list[Container] = []
    ends: dict[int, dict[int, SeenLink]] = {}
    for link in host_links:
        if link.make.make == "veth" and link.namespace >= 0:
            ends.setdefault(link.namespace, {})[link.link] = link
    for path in islice(named_namespaces() if networks and targets and ends else (), _MANY):
        with suppress(OSError):
            mine = ends.get(number_of(host, path))
            if mine:
                with entered(path):
                    found += inside(path, HostView(), mine)
    return found


def unheard(facts: Facts) -> Iterator[Container]:
    """Yield those of a few containers that get no answer from this host, with ``is_heard`` set.

    A host may refuse packets of its containers, and still passes them on: then it reports one without hops.
    """
    ways, targets = {(name, at.version): at for name, at in facts.gateways}, _targets(facts.status)
    left = _SILENT
    for each in facts.containers[:_ASKED]:
        family = each.address.version
        gateway, target = ways.get((each.attached_to, family)), targets.get(family)
        if left and gateway and target:
            with suppress(OSError), entered(Path(each.path)):
                if not (
                    survey.echoes([gateway], BRIEFLY, 1)[gateway].arrived
                    or survey.reached([gateway], BRIEFLY)
                    or survey.passing([target], 1, BRIEFLY, 1)
                ):
                    left -= 1
                    yield replace(each, is_heard=False)


def _targets(told: Status) -> dict[Family, IPAddress]:
    """Return an address of another node's container for each family."""
    return {net.version: container_of(net) for peer in chosen_of(told) for net in peer.subnets}


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
    way: LookupResult,
    target: IPAddress,
    ends: Collection[int],
    own: Collection[IPAddress],
) -> str:
    """Return the route inside a container that leads its packets for other nodes away from this host, if any.

    ``ends`` are its ends of veth pairs, ``own`` this host's addresses. A router of IPv6 is known by its
    link-local address; for one of IPv4 with such an address this host may answer by proxy ARP.
    """
    router = way.gateway
    if router and router.version == 6 and router.is_link_local and router not in own:
        return f"default via {router} dev {view.name_of(way.index)}"
    return "" if way.index in ends else astray_route(view, target)


def overriding_rule(view: HostView, family: Family) -> PolicyRule | None:
    rules = (rule for rule in view.rules(family) if not rule.is_default)
    return next(rules, None) if view.default_routes(family) else None


def off_options(port: str) -> tuple[str, ...]:
    """Return what a bridge does not do for its port."""
    where = Path(f"/sys/class/net/{port}/brport")
    values = ((option, files.text(where / name).strip(), bad) for name, (option, bad) in _PORT.items())
    return tuple(option for option, value, bad in values if value and value in bad)


def learnt(bridge: str) -> set[str]:
    """Return the MAC addresses whose port a bridge knows."""
    try:
        table = Path(f"/sys/class/net/{bridge}/brforward").read_bytes()
    except OSError:
        return set()
    return {mac_text(mac) for mac, is_own in _FDB_ENTRY.iter_unpack(table) if not is_own}
