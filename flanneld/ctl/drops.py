"""Find rules of this host's packet filters that drop, redirect or translate the network's packets.

Rules are found by following the packets through them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from flanneld.ctl.output import State
from flanneld.ctl.paths import (
    ELSEWHERE,
    FROM_CONTAINERS,
    INWARDS,
    OUTWARDS,
    THROUGH,
    Flow,
    ParsedPeer,
    at_ports,
    container_of,
    flows,
    of_container,
    parsed,
    reached_peers,
    some,
)
from flanneld.diagnostics.status import Status, known
from flanneld.errors import Retryable
from flanneld.findings import Command, command
from flanneld.model import FAMILIES, Family, IPAddress, IPNetwork
from flanneld.network import interfaces
from flanneld.network.firewall import foreign
from flanneld.network.firewall.driver import IptablesRunner
from flanneld.network.firewall.fate import ACCEPT, DNAT, DROP, MASQUERADE, TCP_FLAGS, Fate, Packet, Rule
from flanneld.network.firewall.foreign import SENDERS, BaseChain, Opening, PolicyChain
from flanneld.network.firewall.placing import PLACES, driver
from flanneld.network.firewall.rules import FLANNEL_POSTRTG, NATIVE_POSTRTG, NATIVE_TABLE, POSTROUTING
from flanneld.network.host import HostView
from flanneld.runtime import files

#: Reads this host's base chains at the first call: they may have thousands of rules.
Bases = Callable[[], Sequence[BaseChain]]
#: Counters of what the kernel drops by policies of XFRM.
_XFRM_DROPS = Path("/proc/net/xfrm_stat")
#: By the end of a packet that goes on, what a rule does to it. A masqueraded one gets there.
MASQUERADES, REDIRECTS = "masquerades", "redirects"
_VERBS = {DNAT: REDIRECTS, MASQUERADE: MASQUERADES}
#: Beginnings of the names of kube-router's chains for NetworkPolicies; and Calico's and Weave's as well.
OF_KUBE_ROUTER = ("KUBE-POD-FW-", "KUBE-NWPLCY-")
_POLICIES = (*OF_KUBE_ROUTER, "cali-", "WEAVE-NPC")
#: Flows of a store that does not answer.
TO_STORE, FROM_STORE = "packets to the store", "answers of the store"
#: The flags of TCP that begin an answer.
_SYN_ACK = TCP_FLAGS["syn"] | TCP_FLAGS["ack"]
#: Server in the text of its problem.
_SERVER = re.compile(r"https?://([0-9.]+|\[[0-9a-f:]+\]):([0-9]{1,5})")
#: Networks named by rules for which a peer is looked up, at most.
_MENTIONED = 64


class Drop(Struct, frozen=True, gc=False):
    """A rule, or without ``rule`` a policy, that drops or changes a flow; and the commands that spare it.

    It may not if it depends on a rule that may match or not: ``doubt``, which may be ``rule`` itself.
    ``drops_the_rest`` is True for a FORWARD chain that drops all that it does not accept.
    """

    chain: str
    flow: str
    rule: str
    commands: tuple[Command, ...]
    needs_decision: bool = False
    doubt: str = ""
    drops_the_rest: bool = False
    families: frozenset[Family] = frozenset({4})
    verb: str = "drops"

    @property
    def state(self) -> State:
        if self.verb == MASQUERADES:
            return State.HINT
        return State.UNKNOWN if self.doubt else State.PROBLEM

    @property
    def note(self) -> str:
        unless = f"; unless this rule passes them: {self.doubt}" if self.doubt not in ("", self.rule) else ""
        return f"{self.verb} {self.flow}: {self.rule or 'its policy'}{unless}"


def drops_towards(target: IPAddress, told: Status, devices: Mapping[Family, str], bases: Bases) -> list[Drop]:
    """Return what is dropped here of the packets from and to the peer with an address.

    ``devices`` are those of containers.
    """
    peers = [each for each in reached_peers(told) if any(target in net for net in each.networks)]
    return _drops(told, bases(), devices, list(map(parsed, peers))) if peers else []


def masquerading_rules(told: Status, family: Family) -> Sequence[Rule] | None:
    """Return the daemon's masquerading rules of a family; None if they cannot be read."""
    firewall = known(told.firewall)
    place = firewall and next((each for each in PLACES if each == firewall.place), None)
    if not place:
        return None
    chains = (FLANNEL_POSTRTG, (NATIVE_TABLE[family], NATIVE_POSTRTG), POSTROUTING)
    try:
        rules = driver(place, family, IptablesRunner()).read()
    except Retryable:
        return None
    return next((rules[chain] for chain in chains if rules.get(chain)), ())


def read_drops(
    told: Status,
    devices: Mapping[Family, str],
    bases: Sequence[BaseChain],
    held: Mapping[tuple[str, Family], IPAddress],
) -> list[Drop]:
    """Return what this host's packet filters drop of a few peers' packets, and of those that rules name.

    ``devices`` are those of containers; ``held`` are containers' addresses by port of the bridge.
    """
    around = [network for network, _ in told.ranges]
    peers = some(reached_peers(told), _mentioned(bases, around)) if bases else ()
    return _drops(told, bases, devices, peers, held, _with_store(told)) if bases else []


def _with_store(told: Status) -> Iterator[Flow]:
    """Yield the packets to servers that a problem of the store names by their addresses, and the answers."""
    store = known(told.store)
    problem = known(store.problem) if store else None
    for text, port in _SERVER.findall(problem or ""):
        with suppress(ValueError):  # no address
            yield from _with_server(ip_address(text.strip("[]")), int(port))


def _with_server(server: IPAddress, port: int) -> Iterator[Flow]:
    way, alone = HostView().look_up_route(server), ip_network(server)
    if way and way.source:
        out = interfaces.name_of(way.index)
        there = Packet("", out, way.source, server, "tcp", dport=port, sport=SENDERS)
        back = Packet(out, "", server, way.source, "tcp", SENDERS, port, state="established", flags=_SYN_ACK)
        yield Flow(TO_STORE, there, OUTWARDS, (Opening(side="daddr", network=alone),))
        yield Flow(FROM_STORE, back, INWARDS, (Opening(side="saddr", network=alone),))


def rules_about(
    address: IPAddress, told: Status, devices: Mapping[Family, str], bases: Sequence[BaseChain]
) -> tuple[str, ...]:
    """Return the rules that drop packets from or to the container with an address, each with its chain."""
    packets = (each for each in flows(told, some(reached_peers(told)), devices) if each.hooks == THROUGH)
    own = [of_container(each, address) for each in packets if each.family == address.version]
    return tuple(
        f"{base}: {foreign.text_of(base, decided.by)}"
        for base, _, decided, _ in dropped(bases, own)
        if decided.act == DROP and decided.by and decided.certain
    )


def exempting_rules(
    told: Status, devices: Mapping[Family, str], bases: Iterable[BaseChain]
) -> Iterator[tuple[str, str, Command]]:
    """Yield rules that accept packets to other networks before ours masquerade them: chain, rule and removal.

    Only chains of iptables hold rules of others and ours.
    """
    firewall = known(told.firewall)
    if not firewall or not firewall.masquerade or firewall.place == "native":
        return
    shared = [base for base in bases if base.place == firewall.place and base.table.endswith(" nat")]
    for own in told.own_subnets:
        elsewhere, device = ELSEWHERE[own.version], devices.get(own.version)
        packet = Packet(device, told.uplink_name, container_of(own), elsewhere, "tcp")
        for base, decided in foreign.fates(shared, packet, ("postrouting",)):
            if decided.act == ACCEPT and decided.by and decided.certain:
                yield str(base), decided.by, base.without(decided.by)


def bases_of(told: Status) -> Bases:
    """Return the function that reads them, once."""
    return cache(lambda: read_bases(told))


def read_bases(told: Status) -> list[BaseChain]:
    """Return this host's base chains that packets of the network pass, as far as they can be read."""
    # A daemon that waits for the store knows no network yet.
    versions = {network.version for network, _ in told.ranges} | {flow.family for flow in _with_store(told)}
    families = [family for family in FAMILIES if _concerns(family, versions, told)]
    kinds = [(family, kind) for family in families for kind in ("filter", "nat")]
    found = [base for family, kind in kinds for base in foreign.read(family, kind=kind)]
    if re.search(r"(PolBlock|NoPols|OutNoStates|TmplMismatch)\s+[1-9]", files.text(_XFRM_DROPS)):
        from flanneld.network.xfrm_table import read_chains  # most hosts have no policies

        with suppress(OSError):  # only root can read them
            found += read_chains(is_ipsec="ipsec" in told.backends)
    return found


def has_policies(bases: Iterable[BaseChain]) -> bool:
    """Return True if some chains enforce NetworkPolicies."""
    return any(
        "network-polic" in str(base) or any(name.startswith(_POLICIES) for name in base.chains)
        for base in bases
    )


def _drops(
    told: Status,
    bases: Sequence[BaseChain],
    devices: Mapping[Family, str],
    chosen: Iterable[ParsedPeer],
    held: Mapping[tuple[str, Family], IPAddress] = MappingProxyType({}),
    more: Iterable[Flow] = (),
) -> list[Drop]:
    packets = [*flows(told, chosen, devices), *more]
    if any(base.device or base.hook.startswith("bridge ") for base in bases):
        packets += [each for flow in packets for each in at_ports(flow, held)]
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
            is_translated = decided.act == MASQUERADE and decided.certain and flow.name == FROM_CONTAINERS
            # The store's address may be one of a service, which leads to a server.
            is_led = decided.act == DNAT and flow.name not in (TO_STORE, FROM_STORE)
            if decided.act == DROP or is_led or decided.may_drop or is_translated:
                found.setdefault((str(base), decided, flow.openings), (base, []))[1].append(flow)
    for (_, decided, _), (base, lost) in found.items():
        kinds = {flow.kind for flow in lost}
        kind = lost[0].kind if len(kinds) == 1 else ""
        yield base, replace(lost[0], kind=kind), decided, frozenset(flow.family for flow in lost)


def _unblocking(hook: str, by: str) -> Sequence[str]:
    """Return how ip-xfrm(8) deletes a policy, or resets the default if there is no policy."""
    way = {"input": "in", "forward": "fwd", "postrouting": "out"}[hook]
    return ("delete", *by.split()[-4:]) if by else ("setdefault", way, "accept")


def _described(base: BaseChain, flow: Flow, decided: Fate, families: frozenset[Family]) -> Drop:
    verb = "may drop" if decided.may_drop else _VERBS.get(decided.act, "drops")
    by, network = decided.doubt if decided.may_drop else decided.by, flow.openings[0].network
    is_policy = isinstance(base, PolicyChain)
    return Drop(
        str(base),
        str(flow),
        foreign.text_of(base, by),
        (command("ip", "xfrm", "policy", *_unblocking(base.hook, by)),)
        if is_policy
        else (base.spare(network),)
        if verb in _VERBS.values() and network
        else base.accept(*flow.openings),
        base.is_firewalld or is_policy,
        foreign.text_of(base, decided.doubt),
        foreign.drops_the_rest(base, decided),
        frozenset() if verb == MASQUERADES else families,
        verb,
    )
