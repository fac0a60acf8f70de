"""Checks of what this host does to the network's packets: its packet filters, routes and rules.

Drops of other programs' rules are found by following the packets through them.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from flanneld.compat.glog import counted
from flanneld.ctl.checks.containers import RUNTIMES_BRIDGES
from flanneld.ctl.checks.host import let_in
from flanneld.ctl.findings import Advice, Finding, Fix, Severity, check
from flanneld.ctl.lookups import (
    FROM_CONTAINERS,
    THROUGH,
    TO_CONTAINERS,
    Flow,
    Lost,
    ParsedPeer,
    flows,
    parsed,
    reached_peers,
    some,
)
from flanneld.diagnostics.status import Status, known
from flanneld.errors import Retryable
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork
from flanneld.network.firewall import foreign
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import DROP, MASQUERADE, Fate, Rule
from flanneld.network.firewall.foreign import BaseChain, Opening
from flanneld.network.firewall.placing import PLACES, driver
from flanneld.network.firewall.rules import FLANNEL_POSTRTG, NATIVE_POSTRTG, NATIVE_TABLE, POSTROUTING
from flanneld.network.host import HostView
from flanneld.network.host_settings import Topic
from flanneld.network.rtnetlink.netlink import attributes, unpack
from flanneld.runtime.shell import Command, command, line
from flanneld.state.resources import Route

if TYPE_CHECKING:
    from flanneld.ctl.facts import Facts

#: Networks named by rules for which a peer is looked up, at most.
_MENTIONED = 64


class Drop(Struct, frozen=True, gc=False):
    """A rule, or without ``rule`` a policy, that drops a flow; and the commands that accept the flow.

    It may not if it depends on a rule that may match or not: ``doubt``. ``drops_the_rest`` is True for a
    FORWARD chain that drops all that it does not accept.
    """

    chain: str
    flow: str
    rule: str
    commands: tuple[Command, ...]
    is_firewalld: bool = False
    doubt: str = ""
    drops_the_rest: bool = False
    families: frozenset[Family] = frozenset({4})

    @property
    def state(self) -> str:
        return "unknown" if self.doubt else "PROBLEM"

    @property
    def note(self) -> str:
        unless = f"; unless this rule passes them: {self.doubt}" if self.doubt else ""
        return f"drops {self.flow}: {self.rule or 'its policy'}{unless}"


def drops_towards(told: Status, devices: Mapping[Family, str]) -> Callable[[IPAddress], list[Drop]]:
    """Return a function for what is dropped here of the packets from and to the peer with an address.

    ``devices`` are those of containers. The packet filters are read once, for the first peer: they may have
    thousands of rules.
    """
    bases = cache(lambda: _bases(told))

    def towards(target: IPAddress) -> list[Drop]:
        peers = [each for each in reached_peers(told) if any(target in net for net in each.networks)]
        return _drops(told, bases(), devices, list(map(parsed, peers))) if peers else []

    return towards


def masquerading_rules(told: Status) -> Callable[[Family], Sequence[Rule] | None]:
    """Return a function for the daemon's masquerading rules of a family; None if they cannot be read."""

    def read(family: Family) -> Sequence[Rule] | None:
        firewall = known(told.firewall)
        place = firewall and next((each for each in PLACES if each == firewall.place), None)
        if not place:
            return None
        chains = (FLANNEL_POSTRTG, (NATIVE_TABLE[family], NATIVE_POSTRTG), POSTROUTING)
        try:
            rules = driver(place, family, IptablesRunner(threading.Event())).read()
        except Retryable:
            return None
        return next((rules[chain] for chain in chains if rules.get(chain)), ())

    return read


def read_drops(told: Status, devices: Mapping[Family, str]) -> list[Drop]:
    """Return what this host's packet filters drop of a few peers' packets, and of those that rules name.

    ``devices`` are those of containers.
    """
    bases = _bases(told)
    around = [network for network, _ in told.ranges]
    return _drops(told, bases, devices, some(reached_peers(told), _mentioned(bases, around))) if bases else []


class Translation(Struct, frozen=True, gc=False):
    """Rule that gives packets between containers another sender, and the commands that spare them."""

    chain: str
    rule: str
    commands: tuple[Command, ...]


def read_translations(told: Status, devices: Mapping[Family, str]) -> list[Translation]:
    """Return the rules of this host that translate the sender of packets of containers to other nodes.

    A rule of a table inet is about both families, and a command spares the network of one.
    """
    found: dict[tuple[str, str], Translation] = {}
    packets = [
        flow.packet
        for flow in flows(told, some(reached_peers(told)), devices)
        if flow.name == FROM_CONTAINERS
    ]
    for network, _ in told.ranges if packets else ():
        bases = list(foreign.read(network.version, "postrouting", kind="nat"))
        for base, decided in (
            each for packet in packets for each in foreign.fates(bases, packet, ("postrouting",))
        ):
            if decided.act == MASQUERADE and decided.certain:
                key, spare = (str(base), decided.by), base.spare(network)
                alike = found.get(key, Translation(str(base), foreign.text_of(base, decided.by), ()))
                found[key] = replace(alike, commands=tuple(dict.fromkeys((*alike.commands, spare))))
    return list(found.values())


def _bases(told: Status) -> list[BaseChain]:
    """Return this host's base chains that packets of the network pass, as far as they can be read."""
    versions = {network.version for network, _ in told.ranges}
    return [base for family in FAMILIES if _concerns(family, versions, told) for base in foreign.read(family)]


def _drops(
    told: Status, bases: Sequence[BaseChain], devices: Mapping[Family, str], chosen: Iterable[ParsedPeer]
) -> list[Drop]:
    packets = list(flows(told, chosen, devices))
    forwarded = {flow.family for flow in packets if flow.hooks == THROUGH}
    packets += (
        Flow("packets of containers", packet, THROUGH, foreign.of_network(network))
        for network, _ in told.ranges
        for packet in foreign.between_containers(network)
        if network.version not in forwarded
    )
    return [_described(*each) for each in dropped(bases, packets)]


def _concerns(family: Family, versions: set[Family], told: Status) -> bool:
    """Return True if packets of a family are sent: an IPv6 network has IPv6 packets between its nodes."""
    uplink = known(told.uplink)
    public = uplink.public_ips if uplink else ()
    return family in versions or any((":" in text) == (family == 6) for text in public if versions)


def _mentioned(bases: Iterable[BaseChain], around: Container[IPNetwork]) -> list[IPNetwork]:
    """Return the networks that rules name, each once, except the cluster networks ``around`` all peers."""
    found: dict[IPNetwork, None] = {}
    rules = (rule for base in bases for rules in base.chains.values() for rule in rules)
    for value in (value for rule in rules for test in rule.tests for value in test.values):
        if not isinstance(value, str | tuple) and value.prefixlen and value not in around:
            found[value] = None
            if len(found) == _MENTIONED:
                break
    return list(found)


def dropped(
    bases: Sequence[BaseChain], packets: Sequence[Flow]
) -> Iterator[tuple[BaseChain, Flow, Fate, frozenset[Family]]]:
    """Yield each drop with the families that it concerns, once for a rule (pure)."""
    found: dict[tuple[str, Fate, tuple[Opening, ...]], tuple[BaseChain, list[Flow]]] = {}
    for flow in packets:
        for base, decided in foreign.fates(bases, flow.packet, flow.hooks):
            if decided.act == DROP:
                found.setdefault((str(base), decided, flow.openings), (base, []))[1].append(flow)
    for (_, decided, _), (base, lost) in found.items():
        kinds = {flow.kind for flow in lost}
        kind = lost[0].kind if len(kinds) == 1 else ""
        yield base, replace(lost[0], kind=kind), decided, frozenset(flow.family for flow in lost)


def _described(base: BaseChain, flow: Flow, decided: Fate, families: frozenset[Family]) -> Drop:
    return Drop(
        str(base),
        str(flow),
        foreign.text_of(base, decided.by),
        base.accept(*flow.openings),
        base.is_firewalld,
        foreign.text_of(base, decided.doubt),
        foreign.drops_the_rest(base, decided),
        families,
    )


@check("E", "filters", "no rule drops packets between the nodes or between containers")
def filters(facts: Facts) -> Iterator[Finding]:
    is_silent = any(path.carried is None for path in facts.paths)
    for each in (drop for drop in facts.filtered if not drop.drops_the_rest):
        if each.doubt and not is_silent:
            continue  # what accepts the packets is a rule that cannot be evaluated
        evidence = each.rule or "no rule accepts them, and the chain's policy is to drop"
        doubt = f"; whether this rule is about them cannot be told: {each.doubt}" if each.doubt else ""
        yield Finding(
            f"this node {'may drop' if doubt else 'drops'} {each.flow}: {each.chain}",
            f"{evidence}{doubt}",
            "no packet of a container gets to or from other nodes that way",
            Advice(let_in("firewalld", facts)) if each.is_firewalld else Fix(each.commands),
            about=each.chain,
            severity=Severity.HINT if doubt else Severity.PROBLEM,
        )


@check("E", "translation", "no other program masquerades packets between containers")
def translation(facts: Facts) -> Iterator[Finding]:
    for each in facts.translated:
        yield Finding(
            f"packets of containers to other nodes are masqueraded: {each.chain}",
            each.rule,
            "containers there see an address of this node as the sender, and so do policies and logs",
            Advice(f"have that program spare the network, as this does: {line(each.commands)}"),
            about=each.chain,
            severity=Severity.HINT,
        )


#: linux/rtnetlink.h and linux/pkt_sched.h: the dump of queueing disciplines, and their drops in its messages.
_GETQDISC, _TCMSG, _KIND, _STATS, _QUEUE = 38, struct.Struct("=BxxxiIII"), 1, 7, 3
_QUEUE_STATS = struct.Struct("=III")  # length, backlog, drops
#: Disciplines that the kernel chooses by itself, and those that pass packets through rules.
_ORDINARY = frozenset({"noqueue", "pfifo_fast", "fq_codel", "fq", "mq"})
_WITH_RULES = frozenset({"clsact", "ingress"})


def queue_drops(names: Mapping[int, str]) -> Counter[tuple[str, str]]:
    """Return the packets dropped so far, by interface and kind of queueing discipline; none if unreadable.

    Those that a policer, or a filter of tc, drops are counted by the discipline clsact or ingress.
    """
    found: Counter[tuple[str, str]] = Counter()
    with suppress(OSError):  # a kernel without traffic control
        for data, offset, end in HostView().dump(_GETQDISC, _TCMSG.pack(0, 0, 0, 0, 0)):
            name = names.get(unpack(_TCMSG, data, offset, end)[1])
            told = attributes(data, offset + _TCMSG.size, end)
            stats = told.get(_STATS, b"")
            queue = attributes(stats, 0, len(stats)).get(_QUEUE, b"")
            if name and len(queue) >= _QUEUE_STATS.size:
                kind = told.get(_KIND, b"").rstrip(b"\0").decode(errors="replace")
                found[name, kind] += _QUEUE_STATS.unpack_from(queue)[2]
    return found


@check("K", "traffic control", "no queue or filter of tc drops the network's packets")
def traffic_control(facts: Facts) -> Iterator[Finding]:
    is_silent = any(path.carried is None for path in facts.paths)
    for (device, kind), number in facts.queued.items():
        if kind in _ORDINARY and not is_silent:
            continue  # that is how a busy queue slows senders down
        what, where = ("filter", " ingress") if kind in _WITH_RULES else ("qdisc", "")
        yield Finding(
            f"the traffic control of {device} drops packets: {kind}",
            f"{counted(number, 'packet')} while peers were probed",
            "a limit of its rate, or a filter, drops packets of the network, too",
            Advice(
                f"raise the limit, or remove it if nobody needs it: tc -s {what} show dev {device}{where}"
            ),
            about=device,
            severity=Severity.PROBLEM if is_silent else Severity.HINT,
        )


@check("B", "lookups", "packets of the network take their way through this host")
def lookups(facts: Facts) -> Iterator[Finding]:
    for each in facts.lost:
        if each.cause == "rule":
            problem = f"the policy rule {each.about} diverts {each.packets}"
        elif each.cause == "forwarding":
            problem = f"{each.about} does not forward {each.packets}"
        elif each.cause == "route" and not _is_missing(facts, each):
            problem = f"this node loses {each.packets}"
        else:
            continue
        yield Finding(
            problem,
            each.evidence,
            "they are dropped here, or leave by another way than the daemon's",
            Fix(each.commands) if each.commands else Advice(_way_out(each, facts)),
            about=each.about,
        )


def _is_missing(facts: Facts, lost: Lost) -> bool:
    """Return True if the kernel lacks the daemon's route, which is a finding of its own."""
    target = ip_address(lost.about) if lost.about else None
    lacking = (each.value for each in facts.entries if each.state in ("missing", "different"))
    return any(
        isinstance(each, Route) and target is not None and target in each.destination for each in lacking
    )


def _way_out(lost: Lost, facts: Facts) -> str:
    if lost.cause == "rule":
        return f"give the rule conditions that spare the nodes' addresses, or {_removal(lost)}"
    if lost.packets != TO_CONTAINERS:
        text = f"ip route del {lost.removal}" if lost.removal else f"`ip route get {lost.about}` shows it"
        return f"remove the route that leads astray, if nobody needs it: {text}"
    if lost.removal:
        return f"remove the route that leads astray, if nobody needs it: ip route del {lost.removal}"
    return (
        f"give the containers' bridge the address in {facts.subnet_file}, as the container runtime does:"
        f" {_addressing(facts)}"
    )


def _addressing(facts: Facts) -> str:
    nets = [net for net in facts.status.own_subnets if net.version == 4] or facts.status.own_subnets
    bridge = next((name for name in RUNTIMES_BRIDGES if facts.link(name)), "BRIDGE")
    return "; ".join(f"ip address add {net[1]}/{net.prefixlen} dev {bridge}" for net in nets)


@check("A", "uplink choice", "packets to other nodes leave by the external interface")
def uplink_choice(facts: Facts) -> Iterator[Finding]:
    used = facts.status.uplink_name
    for each in facts.lost:
        if each.cause == "uplink":
            yield Finding(
                f"packets to other nodes leave by {each.about}, and the daemon uses {used}",
                f"{each.evidence}; so do {each.number} of {each.asked} looked at",
                f"peers are told the address of {used} and send to it; the tunnel's packets leave by {used}",
                Advice(
                    f"start the daemon with -iface={each.about}, or give {used} routes to the other nodes"
                ),
                about=used,
                severity=Severity.PROBLEM if each.number == each.asked else Severity.HINT,
            )


@check("A", "pinned neighbours", "no MAC address of another node is fixed by hand")
def pinned_neighbours(facts: Facts) -> Iterator[Finding]:
    silent = {str(each.target) for each in facts.paths if each.name == "underlay" and each.carried is None}
    for address, mac, device in facts.pinned:
        yield Finding(
            f"the MAC address of the node {address} is fixed by hand: {mac}",
            f"ip neigh: {address} dev {device} lladdr {mac} PERMANENT",
            "the kernel does not ask for the node's MAC address, so packets go to a former one",
            Fix((command("ip", "neigh", "del", address, "dev", device),)),
            about=address,
            severity=Severity.PROBLEM if address in silent else Severity.HINT,
        )


def _removal(lost: Lost) -> str:
    return f"remove it: ip rule del priority {lost.about.partition(':')[0]}"


@check("J", "strict filter", "the reverse path filter passes packets of the network")
def strict_filter(facts: Facts) -> Iterator[Finding]:
    known = any(each.topic is Topic.REVERSE_PATH for each in facts.host)
    for each in facts.lost:
        if each.cause == "filter" and not known:
            yield Finding(
                f"the reverse path filter of {each.about} drops {each.packets}",
                each.evidence,
                "a strict filter drops a packet if the answer would leave by another interface",
                Fix(each.commands),
                about=each.about,
            )
