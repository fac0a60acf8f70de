"""Find this host's policy rules, routes and neighbours that lose the network's packets.

Routes are looked up as the kernel does for such packets.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from ipaddress import ip_network
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from flanneld.ctl.compare import NOWHERE, RouteTaken, follows, wanted_route
from flanneld.ctl.drops import Bases
from flanneld.ctl.neighbors import is_mute
from flanneld.ctl.paths import (
    FROM_CONTAINERS,
    FROM_NODES,
    TO_CONTAINERS,
    TO_NODES,
    Flow,
    ParsedPeer,
    between_nodes,
    chosen_of,
    container_of,
    flows,
)
from flanneld.diagnostics.status import Status, addresses, known, resources
from flanneld.findings import Command, command, line
from flanneld.model import FAMILIES, Family, IPAddress
from flanneld.network.firewall import foreign
from flanneld.network.firewall.foreign import BaseChain
from flanneld.network.host import HostView
from flanneld.network.host_settings import FORWARDING, sysctl
from flanneld.network.iproute2_commands import set_link
from flanneld.network.routing import (
    ICMP,
    ICMPV6,
    IP_PROTOCOLS,
    MAIN_RULE,
    RTN_LOCAL,
    UDP,
    PolicyRule,
    RoutedPacket,
)
from flanneld.runtime import files
from flanneld.state.resources import Blackhole

#: End of a policy rule's text that leads to the main table.
_TO_MAIN = " lookup main"


def host_addresses() -> Iterator[tuple[str, IPAddress]]:
    """Yield the addresses of all interfaces, with the interface's name. Raises ``OSError``."""
    view = HostView()
    names = view.names()
    for family in FAMILIES:
        for seen in view.addresses(family):
            yield names.get(seen.index, ""), seen.address


#: Values of rp_filter.
_STRICT, _LOOSE = 1, 2
#: Flags of linux/if.h: interfaces with two ends, and lo, have no neighbours to ask.
_IFF_NOARP, _NO_NEIGHBOURS = 0x80, 0x98
#: Type of linux/if_arp.h, and kinds of such interfaces that have NOARP by design; of ipvlan in its mode L3.
_ETHERNET, _WITHOUT_ARP = 1, frozenset({"dummy", "ipvlan", "vrf"})
#: Value of arp_ignore to answer for no address, and its path.
_NEVER, _ARP_IGNORE = 8, "net/ipv4/conf/{}/arp_ignore"
#: Hooks whose marks a route lookup sees.
_BEFORE_ROUTING = frozenset({"prerouting", "output"})
_FORWARDING, _RP_FILTER = "net/ipv4/conf/{}/forwarding", "net/ipv4/conf/{}/rp_filter"


class Lost(Struct, frozen=True, gc=False):
    """Packets that the kernel drops or misroutes. ``commands`` correct that; none if it takes a decision.

    ``cause`` is ``filter`` (reverse path), ``forwarding`` of an interface, its ``arp``, ``uplink`` (another
    interface than the daemon's), ``rule``, ``no rule`` (none leads to the main table), ``route`` or
    ``no route``; ``about`` is its interface or text. ``number`` of ``asked`` are lost so, in ``families``.
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

    @property
    def note(self) -> str:
        about = f"; {self.cause} {self.about}" if self.about else ""
        fix = f"; {line(self.commands)}" if self.commands else ""
        return f"{self.evidence}{about}{fix}"


class Question(Struct, frozen=True, gc=False):
    """One packet, and how its route should look: ``is_right`` decides."""

    packets: str
    target: IPAddress
    source: IPAddress | None
    iif: str
    is_right: Callable[[RouteTaken], bool]
    #: Mark that this host's packet filters give it.
    mark: int = 0
    #: IP protocol and destination port, by number.
    protocol: int = 0
    port: int = 0

    def __str__(self) -> str:
        conditions = {
            "iif": self.iif,
            "mark": f"{self.mark:#x}" if self.mark else "",
            "ipproto": IP_PROTOCOLS.get(self.protocol),
            "dport": self.port,
        }
        return " ".join(
            (
                f"{self.target} from {self.source}",
                *(f"{name} {value}" for name, value in conditions.items() if value),
            )
        )


def lost_packets(
    told: Status,
    names: Mapping[int, str],
    container_devices: Mapping[Family, str],
    bases: Bases,
    chosen: Sequence[ParsedPeer] | None = None,
) -> list[Lost]:
    """Return each cause of a loss once, on the way to the ``chosen`` peers or to some. Raises ``OSError``."""
    host = _Host(HostView(), names)
    chosen = chosen_of(told) if chosen is None else chosen
    asked = list(questions(told, chosen, container_devices))
    rules = [rule for family in {each.target.version for each in asked} for rule in host.rules(family)]
    if any(any(rule.mark) for rule in rules):
        marks = _marks(flows(told, chosen, container_devices), bases())
        asked = [replace(each, mark=marks.get((each.source, each.target, each.iif), 0)) for each in asked]
        asked += _tunnelled(asked, told)
    kinds = {rule.protocol or UDP for rule in rules if rule.protocol or any(rule.ports)}
    asked = _of_kinds(asked, kinds & IP_PROTOCOLS.keys(), told)
    wrong = ((each, way) for each in asked if (way := host.ask(each)) is not None)
    lost = by_cause(asked, ((each, host.explain(each, way, told)) for each, way in wrong))
    return [*lost, *_mute(HostView(), {told.uplink_name, container_devices.get(4, "")})]


def _marks(
    found: Iterable[Flow], bases: Sequence[BaseChain]
) -> dict[tuple[IPAddress | None, IPAddress, str | None], int]:
    """Return the marks that packets have when they are routed, by sender, receiver and interface."""
    packets = ((each.packet, each.hooks & _BEFORE_ROUTING) for each in found)
    marked = ((packet, foreign.marked(bases, packet, hooks)) for packet, hooks in packets)
    return {(packet.source, packet.destination, packet.iif): mark for packet, mark in marked if mark}


def _tunnelled(asked: Sequence[Question], told: Status) -> list[Question]:
    """Return VXLAN's packets for the nodes with the marks of the containers' packets inside (pure).

    The kernel looks them up with these (drivers/net/vxlan/vxlan_core.c).
    """
    marks = {each.mark for each in asked if each.packets == FROM_CONTAINERS and each.mark}
    outer = [each for each in asked if each.packets == TO_NODES and "vxlan" in told.backends]
    return [replace(each, mark=mark) for mark in sorted(marks) for each in outer]


#: By family, the ICMP that it does not have.
_OTHER_ICMP: Mapping[Family, int] = {4: ICMPV6, 6: ICMP}


def _of_kinds(asked: Iterable[Question], protocols: AbstractSet[int], told: Status) -> list[Question]:
    """Return the questions for each of these IP protocols, as far as such packets are sent (pure).

    Between nodes they are those of the tunnel, to its port.
    """
    tunnel = next(iter(between_nodes(told)), None)
    port = tunnel.port if tunnel and tunnel.protocol == "udp" else 0
    found = []
    for each in asked:
        is_inside = each.packets in (FROM_CONTAINERS, TO_CONTAINERS)
        found.append(replace(each, protocol=UDP, port=port) if protocols and port and not is_inside else each)
        sent = protocols - {_OTHER_ICMP[each.target.version]} if is_inside else ()
        found += [replace(each, protocol=protocol) for protocol in sorted(sent)]
    return found


def _mute(view: HostView, names: Iterable[str]) -> Iterator[Lost]:
    """Yield the interfaces that answer no ARP request."""
    for name in sorted(filter(None, names)):
        mute = [_ARP_IGNORE.format(each) for each in ("all", name)]
        fixes = tuple(sysctl((path, 0)) for path in mute if _setting(path) == _NEVER)
        if fixes:
            yield Lost(TO_CONTAINERS, "arp", name, f"arp_ignore is {_NEVER}", fixes)
        if _has_arp_off(view, name):
            fix = set_link(name, "arp", "on")
            yield Lost(TO_CONTAINERS, "arp", name, "ip link: NOARP", (fix,), families=frozenset(FAMILIES))


def _has_arp_off(view: HostView, name: str) -> bool:
    """Return True if an interface asks for no neighbour, and would by its kind."""
    flags, hardware = (files.text(Path("/sys/class/net", name, each)) or "0" for each in ("flags", "type"))
    if int(flags, 16) & _NO_NEIGHBOURS != _IFF_NOARP or int(hardware) != _ETHERNET:
        return False
    link = view.link(name)
    return link is not None and link.make.make not in _WITHOUT_ARP


def by_cause(asked: Iterable[Question], lost: Iterable[tuple[Question, Lost]]) -> list[Lost]:
    """Return each cause once, with the number and the families of the packets that it loses (pure)."""
    found: dict[tuple[str, str], Lost] = {}
    for question, each in lost:
        key, family = (each.cause, each.about), frozenset({question.target.version})
        alike = found.get(key, replace(each, number=0, families=family))
        commands = alike.commands if each.commands else ()  # those of one kind of packet do not spare another
        found[key] = replace(
            alike, number=alike.number + 1, families=alike.families | family, commands=commands
        )
    total = Counter(each.packets for each in asked)
    return [replace(each, asked=total[each.packets]) for each in found.values()]


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
        #: By family.
        self.rules: Callable[[Family], Sequence[PolicyRule]] = cache(lambda family: [*view.rules(family)])

    def ask(self, question: Question) -> RouteTaken | OSError | None:
        """Return the wrong route, or the kernel's refusal; None if the route is right."""
        if question.iif and question.iif not in self._indexes:
            return None  # a missing device is a finding of its own
        try:
            way = self._way(question)
        except OSError as failure:
            if failure.errno == errno.EHOSTUNREACH and question.iif and does_not_forward(question.target):
                return None  # so is forwarding that is off
            return failure
        return None if question.is_right(way) and not self._leads_to_nobody(question, way) else way

    def _leads_to_nobody(self, question: Question, way: RouteTaken) -> bool:
        """Return True if a policy rule leads packets for a node to a router that does not answer."""
        gateway, index = way.gateway, self._indexes.get(way.device, 0)
        if question.packets != TO_NODES or gateway is None or self._rule(question) is None:
            return False
        return is_mute(self._view, gateway, index)

    def explain(self, question: Question, wrong: RouteTaken | OSError, told: Status) -> Lost:
        """Return the cause, as far as it is found."""
        reason = (
            f"the route is {wrong}"
            if isinstance(wrong, RouteTaken)
            else f"the kernel drops it: {wrong.strerror}"
        )
        evidence = f"{question}: {reason}"
        if _does_not_pass_on(question):
            fix = sysctl((_FORWARDING.format(question.iif), 1))
            return Lost(question.packets, "forwarding", question.iif, evidence, (fix,))
        strict = self._strict(question)
        if strict:
            fix = sysctl((_RP_FILTER.format(question.iif), _LOOSE))
            return Lost(question.packets, "filter", question.iif, f"{evidence}; {strict}", (fix,))
        if isinstance(wrong, OSError) and not self._has_main_rule(question.target.version):
            family = ("-6",) if question.target.version == 6 else ()
            add = command("ip", *family, "rule", "add", "lookup", "main", "priority", MAIN_RULE)
            return Lost(question.packets, "no rule", "the main table", evidence, (add,))
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
        removal = dead_end(self._view, question.target) if isinstance(wrong, OSError) else ""
        if removal in (str(each) for each in resources(told.local) if isinstance(each, Blackhole)):
            removal = ""  # the daemon's own
        is_lacking = isinstance(wrong, OSError) and wrong.errno == errno.ENETUNREACH and not removal
        cause = "no route" if is_lacking and question.packets == TO_NODES else "route"
        return Lost(question.packets, cause, about, evidence, removal=removal)

    def _way(self, asked: Question) -> RouteTaken:
        iif = self._indexes.get(asked.iif, 0)
        found = self._view.lookup(
            RoutedPacket(asked.target, asked.source, iif, asked.mark, asked.protocol, asked.port)
        )
        is_here = found.kind == RTN_LOCAL
        return RouteTaken(self._names.get(found.index, ""), found.gateway, is_here=is_here)

    def _strict(self, question: Question) -> str:
        """Return why the reverse path filter drops a packet; empty if it does not."""
        if not question.iif or question.source is None or question.source.version != 4:
            return ""
        values = [_setting(_RP_FILTER.format(name)) for name in ("all", question.iif)]
        if max(values) != _STRICT:
            return ""
        try:
            back = self._way(replace(question, target=question.source, source=None, iif=""))
        except OSError:
            return "rp_filter is strict, and there is no route back to the sender"
        return "" if back.device == question.iif else f"rp_filter is strict, and the route back is {back}"

    def _has_main_rule(self, family: Family) -> bool:
        """Return True if a rule of any priority leads all packets to the main table."""
        return any(each.text == f"from all{_TO_MAIN}" for each in self.rules(family))

    def _rule(self, question: Question) -> PolicyRule | None:
        matching = (
            rule
            for rule in self.rules(question.target.version)
            if not rule.is_default
            and not rule.text.endswith(_TO_MAIN)  # that is where flannel's routes are
            and (
                rule.may_match(
                    question.target,
                    question.source,
                    question.iif or "lo",
                    question.mark,
                    question.protocol,
                    question.port,
                )
                # The reverse path filter asks for the way back.
                or (question.source and rule.may_match(question.source, question.target, "lo"))
            )
        )
        return next(matching, None)


def dead_end(view: HostView, target: IPAddress) -> str:
    """Return the most specific route to an address if it leads nowhere, as ip-route(8) deletes it."""
    around = [
        (network, kind)
        for destination, _, kind in view.destinations(target.version)
        if target in (network := ip_network(destination))
    ]
    destination, kind = max(around, key=lambda each: each[0].prefixlen, default=(None, 0))
    return f"{NOWHERE[kind]} {destination}" if kind in NOWHERE else ""


def _before(rule: PolicyRule, question: Question, told: Status) -> Iterator[Command]:
    """Yield the rule that has packets for the cluster network use the main table before a foreign rule."""
    for network, _ in told.ranges:
        if network.version == rule.family and question.target in network and rule.priority > 0:
            family = ("-6",) if rule.family == 6 else ()
            add = ("rule", "add", "to", str(network), "lookup", "main")
            yield command("ip", *family, *add, "priority", rule.priority - 1)


def _does_not_pass_on(question: Question) -> bool:
    """Return True if the interface by which a packet arrives does not forward."""
    is_passed_on = question.iif and question.packets != FROM_NODES and question.target.version == 4
    return bool(is_passed_on) and not _setting(_FORWARDING.format(question.iif))


def does_not_forward(target: IPAddress) -> bool:
    return _setting(FORWARDING[target.version]) == 0


def _setting(path: str) -> int:
    return files.number(Path("/proc/sys", path))
