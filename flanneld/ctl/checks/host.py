"""Checks of this host: its firewall, settings, files and bridges, and what other programs do there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.backends.registry import described
from flanneld.compat.glog import counted
from flanneld.ctl.checks import check, few, see_first
from flanneld.ctl.checks.kernel import twins
from flanneld.ctl.drops import FROM_STORE, MASQUERADES, OF_KUBE_ROUTER, REDIRECTS, TO_STORE
from flanneld.ctl.output import State
from flanneld.ctl.paths import AFTER_NEW_MTU, DISCOVERY, between_nodes, listed, takes_mtu
from flanneld.diagnostics.status import known
from flanneld.findings import Command, Finding, Severity, command, hint, line
from flanneld.network.host_settings import Topic
from flanneld.network.iproute2_commands import set_link
from flanneld.network.rtnetlink.traffic_control import ORDINARY, WITH_FILTERS
from flanneld.network.survey import SAMPLE, SMALLEST

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts
    from flanneld.ctl.inside import Container

#: First kernel with correct checksums for VXLAN packets after NAT (fixed by ea64d8d6c675).
_GOOD_CHECKSUMS = (5, 7)
#: Bytes of the uplink's MTU that the network may leave unused: the difference to Ethernet's jumbo frames.
_LARGE = 4000
#: Bytes above the MTU of any Ethernet: an uplink with more, as loopback, says nothing of the path.
_JUMBO = 16000
#: Packets sent on a device without any received, from which on replies count as lost.
_TALKS = 20
#: Kinds of devices that container runtimes attach containers to (IFLA_INFO_KIND).
_LEADS_TO_CONTAINERS = frozenset({"bridge", "veth"})
#: Rules of a network policy of Kubernetes, as kube-router and k3s make them for each pod.
_NETWORK_POLICY = tuple(f"-A {name}" for name in OF_KUBE_ROUTER)
#: Source NAT to an address that the rule gives, as iptables and nft(8) list it.
_TO_ADDRESS = re.compile(r" -j SNAT |(^| )snat (ip6? )?to ")
#: Plug-ins that delegate to the one with the next config.
_GO_BETWEENS = frozenset({"multus", "multus-shim"})


class LeftRules(Struct, frozen=True, gc=False):
    """Rules for our network in a place that the daemon does not use, and the commands that remove them."""

    rules: tuple[str, ...]
    commands: tuple[Command, ...]


class CniFile(Struct, frozen=True, gc=False):
    """A CNI config file, and the types of its plug-ins."""

    path: str
    types: tuple[str, ...]


#: Directory and suffixes of CNI configs; runtimes use the first by name (libcni, ConfFiles).
CNI_DIRECTORY = Path("/etc/cni/net.d")
_CNI_SUFFIXES = (".conf", ".conflist", ".json")


def cni_confs(directory: Path) -> Iterator[CniFile]:
    """Yield the CNI configs in the order of container runtimes. Invalid files are skipped."""
    for path in sorted(directory.glob("*")):
        if path.suffix in _CNI_SUFFIXES and (types := _types(path)):
            yield CniFile(str(path), types)


def _types(path: Path) -> tuple[str, ...]:
    try:
        conf = json.loads(path.read_bytes())
        return tuple(str(each["type"]) for each in conf.get("plugins", [conf]))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return ()


# ---- E: the host's firewall and forwarding ------------------------------------------------------


@check("E", "forwarding", "the kernel passes packets on")
def forwarding(facts: Facts) -> Iterator[Finding]:
    yield from facts.of_topic(Topic.FORWARDING)


@check("E", "rules", "the daemon's own rules are in place")
def rules(facts: Facts) -> Iterator[Finding]:
    firewall = known(facts.status.firewall)
    if firewall:
        for family in firewall.not_in_place:
            yield Finding(
                f"the rules for {family} are not in place",
                f"they belong in {firewall.place}",
                "packets keep the wrong address, or are dropped",
                "see the daemon's log: it says why, and tries again",
            )


@check("E", "open tunnel", "strangers send no packets into the tunnel")
def open_tunnel(facts: Facts) -> Iterator[Finding]:
    uplink = facts.status.uplink_name
    outside = [str(address) for name, address in facts.addresses if name == uplink and address.is_global]
    packets = listed(between_nodes(facts.status))
    if outside and packets and not facts.is_guarded and not described(facts.status.backend or "").encrypts:
        yield hint(
            f"any host that reaches {', '.join(outside)} by {packets} can send packets to containers",
            "the address is a public one, and the backend does not authenticate its packets",
            "a stranger needs no lease for that",
            "start the daemon with -guard-tunnel, or let the host's firewall accept only nodes there",
            about=uplink,
        )


@check("E", "keepers", "no other program replaces all rules")
def keepers(facts: Facts) -> Iterator[Finding]:
    for program in facts.firewalls:
        yield hint(
            f"{program} is at work here",
            "found by its files or its rules",
            "when it is reloaded it may remove rules; the daemon puts its own back",
            let_in(program, facts),
        )


def let_in(program: str, facts: Facts) -> str:
    if program != "firewalld":
        packets = listed(between_nodes(facts.status)) or "the packets of its peers"
        return f"let it forward the network and let in {packets}, in {program}'s own configuration"
    settings = [
        *(("--zone=trusted", f"--add-source={network}") for network in facts.networks),
        *(
            (f"--add-port={each.port}/udp" if each.port else f"--add-protocol={each.protocol}",)
            for each in between_nodes(facts.status)
        ),
    ]
    permanent = (command("firewall-cmd", "--permanent", *each) for each in settings)
    return line((*permanent, command("firewall-cmd", "--reload")))


# ---- F: subnet.env and bridges ------------------------------------------------------------------


@check("F", "subnet file", "the subnet file is there and says what the lease says")
def subnet_file(facts: Facts) -> Iterator[Finding]:
    is_there, health = facts.has_subnet_file, known(facts.status.health)
    if not is_there and health and health.missing:
        return  # why the daemon waits is a finding of its own
    if not is_there or (facts.subnet_file and facts.previous.subnets == (None, None)):
        yield Finding(
            f"{facts.subnet_file} names no subnet" if is_there else f"there is no {facts.subnet_file}",
            "it has no valid FLANNEL_SUBNET" if is_there else "the file does not exist",
            "no container runtime can start a container on the network",
            f"{'restart' if is_there else 'start'} the daemon: it writes the file at its start",
        )
        return
    leased = set(map(str, facts.status.own_subnets))
    written = {str(net) for net in facts.previous.subnets if net is not None}
    if facts.origin != "host" and leased and written != leased:
        yield Finding(
            f"{facts.subnet_file} has another subnet than the lease",
            f"{', '.join(sorted(written)) or 'none'} there, {', '.join(sorted(leased))} in the lease",
            "new containers get addresses that lead to another node, or nowhere",
            "restart the daemon: it writes the file at its start",
        )
    wanted = known(facts.status.mtu)
    if wanted and facts.previous.mtu is not None and facts.previous.mtu != wanted:
        yield Finding(
            f"{facts.subnet_file} has the MTU {facts.previous.mtu}, wanted is {wanted}",
            f"FLANNEL_MTU={facts.previous.mtu}",
            "new containers send packets that do not fit, or that are smaller than need be",
            "restart the daemon, then the containers",
        )


@check("F", "bridges", "the firewall sees what stays on a bridge")
def bridges(facts: Facts) -> Iterator[Finding]:
    yield from facts.of_topic(Topic.BRIDGES)


# ---- K: MTU and offload -------------------------------------------------------------------------


@check("K", "containers", "containers and their bridges have no larger MTU than the network allows")
def container_mtu(facts: Facts) -> Iterator[Finding]:
    allowed = known(facts.status.mtu) or facts.previous.mtu
    for name in sorted({name for name, _ in facts.gateways}):
        link = facts.link(name)
        if not allowed or link is None or link.make.make not in _LEADS_TO_CONTAINERS:
            continue
        # The kernel gives a bridge without ports Ethernet's MTU.
        if link.mtu > allowed and facts.has_ports(name):
            yield Finding(
                f"{name} has the MTU {link.mtu}, the network allows {allowed}",
                f"an address of our subnet is on {name}",
                "large packets of its containers vanish: connections open and then hang; see that the"
                f" container runtime reads {facts.subnet_file}",
                (set_link(name, "mtu", allowed),),
                about=name,
            )
    narrow = [each for each in facts.containers if allowed and _is_narrow(facts, each, allowed)]
    large = [each for each in facts.containers if allowed and each.mtu > allowed]
    for some, problem, why in (
        (narrow, "whose veth pair has a smaller MTU at one end", "packets that one end refuses are lost"),
        (
            large,
            f"with a larger MTU than the network allows, {allowed}",
            "this host refuses its large packets; where a program does not make smaller ones, they are lost",
        ),
    ):
        if some:
            yield Finding(
                f"{counted(len(some), 'container')} {problem}",
                few([f"{at.address} in {at.path}: {at.mtu}; {at.port}: {at.port_mtu}" for at in some]),
                why,
                tuple(
                    set_link(name, "mtu", allowed, inside=where)
                    for each in some
                    for name, where in ((each.port, ""), (each.device, each.path))
                    if name
                ),
                severity=Severity.PROBLEM if some is narrow else Severity.HINT,
            )


def _is_narrow(facts: Facts, at: Container, allowed: int) -> bool:
    """Return True if one end of a container's veth pair refuses a size that is sent to it."""
    bridge, ends = facts.link(at.attached_to), (at.mtu, at.port_mtu or at.mtu)
    return min(ends) < min(allowed, max(*ends, bridge.mtu if bridge else 0))


@check("K", "device", "our devices leave room for the outer headers")
def device_mtu(facts: Facts) -> Iterator[Finding]:
    link = facts.link(facts.status.uplink_name)
    backend = described(facts.status.backend or "")
    room = backend.overhead
    least = room.get(6, 0) + SMALLEST[6] if any(net.version == 6 for net in facts.networks) else 0
    for name in facts.devices if link and room else ():
        device = facts.link(name)
        headers = room.get(6 if "-v6" in name else 4)
        if link and device and headers and device.mtu + headers > link.mtu:
            yield Finding(
                f"{name} has the MTU {device.mtu}, too large for {link.name} with {link.mtu}",
                f"the outer headers take {headers} bytes",
                "large packets are fragmented or lost between the nodes",
                (
                    f"ip link set dev {link.name} mtu {least} at least: IPv6 needs {SMALLEST[6]} bytes inside"
                    if link.mtu < least
                    else f"raise the MTU of {link.name}, or "
                    + (
                        "set Backend.MTU in the network config"
                        if takes_mtu(backend)
                        else f"restart flanneld: it takes the MTU of {name} from there"
                    )
                ),
            )


@check("K", "path", "the paths to peers carry the largest packets, and lose none")
def path(facts: Facts) -> Iterator[Finding]:
    # A queue that drops packets, or a switch that sends them to another node, is the cause then.
    is_known = any(kind not in ORDINARY | WITH_FILTERS for _, kind in facts.queued) or any(twins(facts))
    paths = () if is_known else facts.paths
    losing = [each for each in paths if each.is_losing]
    if losing:
        yield Finding(
            f"{counted(len(losing), 'path')} to peers with losses, whatever the size of packets",
            few([f"{each.name} to {each.target}: {each.lost} of {SAMPLE} echoes lost" for each in losing]),
            "connections stall, and queries time out now and then",
            f"{see_first(facts)}run flannelctl doctor there, too; then see the cable, the switch and"
            f" limits of the cloud; ip -s link show dev {facts.status.uplink_name} counts errors here",
            severity=_severity({each.name for each in losing}),
        )
    # What is as large inside the tunnel is larger between the nodes; only routers take it apart.
    tunnels = (each for each in paths if each.name == "tunnel" and each.headers)
    whole = {each.end for each in tunnels if each.carried == each.required}
    on_link = {each.address for each in facts.claims}
    for each in () if any(device_mtu.look(facts)) else paths:
        is_chance = each in losing or (each.target in on_link and each.end in whole)
        if each.state == State.PROBLEM and not is_chance:
            yield Finding(
                f"the {each.name} to {each.target} does not carry {each.required} bytes",
                f"an ICMP echo of {each.required} bytes in one piece is lost, one of {each.carried} is not",
                "small packets pass and large ones are lost or taken apart: connections hang",
                f"{see_first(facts)}flannelctl netcheck {each.target} finds the size: set"
                f" {each.setting} to it (with IPv6 {SMALLEST[6]} at least), then {AFTER_NEW_MTU}",
                about=str(each.target),
                severity=_severity({each.name}),
            )


def _severity(names: set[str]) -> Severity:
    """Return a problem if a path of packets of containers is among the names of paths."""
    return Severity.HINT if names == {"underlay"} else Severity.PROBLEM


@check("K", "speed", "nothing that could be switched makes vxlan slow")
def speed(facts: Facts) -> Iterator[Finding]:
    uplink, mtu, name = known(facts.status.uplink), known(facts.status.mtu), facts.status.uplink_name
    if "vxlan" not in facts.status.backends or not uplink:
        return
    used, possible = facts.queues
    unused = uplink.mtu - (mtu or uplink.mtu) - max(described("vxlan").overhead.values())
    is_lowered = known(facts.status.mtu_lowered_from)
    for is_slow, problem, evidence, remedy in (
        (
            facts.uplink_lacks_segmentation,
            f"{name} leaves the segmentation of VXLAN's packets to the CPU",
            "tx-udp_tnl-segmentation is off, and the device can do it",
            f"ethtool -K {name} tx-udp_tnl-segmentation on",
        ),
        (
            used == 1 < possible,
            f"{name} uses one of its {possible} queues",
            "one CPU takes in all packets of the tunnel",
            f"ethtool -L {name} combined {possible}",
        ),
        (
            unused >= _LARGE and uplink.mtu < _JUMBO and not is_lowered,
            f"the network's MTU is {mtu}, {name} has {uplink.mtu}",
            f"each packet could have {unused} bytes more",
            f"if all uplinks have that MTU: set Backend.MTU to {(mtu or 0) + unused}; then {AFTER_NEW_MTU}",
        ),
    ):
        if is_slow:
            why = "the CPU limits what containers on different nodes send"
            yield hint(
                problem,
                evidence,
                why,
                remedy,
                about=name,
            )


@check("K", "checksums", "the kernel computes the checksums of VXLAN packets right")
def checksums(facts: Facts) -> Iterator[Finding]:
    for name, offloaded in facts.offload.items():
        if offloaded and (0, 0) < facts.kernel < _GOOD_CHECKSUMS:
            yield Finding(
                f"{name} leaves checksums to a kernel that gets them wrong",
                f"Linux {facts.kernel[0]}.{facts.kernel[1]}, tx-checksum-ip-generic is on",
                "connections to services take a minute, because their first packets are dropped",
                f"ethtool -K {name} tx-checksum-ip-generic off",
            )


@check("K", "probes", "peers answer when they are asked")
def probes(facts: Facts) -> Iterator[Finding]:
    passing = {name for name, _ in facts.passing}
    silent = [
        peer.place
        for peer in facts.peers
        if (probe := known(peer.probe)) and probe.rtt is None and peer.subnets[0] not in passing
    ]
    if silent:
        yield Finding(
            f"{counted(len(silent), 'peer')} did not answer the last ICMP echo",
            few(silent),
            "packets to their containers are most likely lost as well",
            "flannelctl trace with that address; see whether the peer runs, and what filters between both",
        )


@check("K", "port", "packets of peers come in")
def port(facts: Facts) -> Iterator[Finding]:
    for name, (received, sent) in facts.traffic.items():
        if received == 0 and sent >= _TALKS and facts.status.peers != ():
            yield Finding(
                f"nothing ever came in through {name}",
                f"{sent} packets sent, none received",
                "most often a firewall between the nodes drops them",
                f"let in {_outer(facts, name)} on all nodes and in the cloud's security groups",
                about=name,
            )


def _outer(facts: Facts, name: str) -> str:
    """Return the protocol or port of a device's packets between the nodes."""
    family = 6 if "-v6" in name else 4
    packets = (each for each in between_nodes(facts.status) if each.family in (0, family))
    return listed(packets) or f"the packets of {name}"


# ---- E, F, K: what other programs and earlier runs do to the packets ---------------------------------


@check("E", "filters", "no rule drops or changes packets between the nodes or between containers")
def filters(facts: Facts) -> Iterator[Finding]:
    for each in facts.filtered:
        if ((each.doubt and not each.drops_the_rest) or each.flow == DISCOVERY) and not facts.is_lossy:
            continue  # a rule that cannot be evaluated accepts the packets, or no peer is a neighbour
        is_policy = each.rule.startswith(_NETWORK_POLICY)
        # Answers come to the address that masquerading takes from this host, and to no other that is not.
        arrives = each.verb == MASQUERADES and not (facts.is_lossy and _TO_ADDRESS.search(each.rule))
        evidence = each.rule or "no rule accepts them, and the chain's policy is to drop"
        which = f": {each.doubt}" if each.doubt != each.rule else ""
        doubt = f"; whether this rule is about them cannot be told{which}" if each.doubt else ""
        yield Finding(
            f"this node {'may drop' if doubt else each.verb} {each.flow}: {each.chain}",
            f"{evidence}{doubt}",
            "containers there see an address of this node as the sender, and so do policies and logs"
            if each.verb == MASQUERADES
            else "they get to another receiver, those of a connection until it is idle; conntrack -D ends it"
            if each.verb == REDIRECTS
            else "the daemon hears of no change of a peer, and cannot renew its lease"
            if each.flow in (TO_STORE, FROM_STORE)
            else "no packet of a container gets to or from other nodes that way",
            f"have that program spare the network, as this does: {line(each.commands)}"
            if each.verb == MASQUERADES
            else "if that is not meant: kubectl get networkpolicy --all-namespaces shows who means it"
            if is_policy
            else line(each.commands)
            if each.needs_decision
            else each.commands,
            about=each.chain,
            severity=Severity.HINT if doubt or is_policy or arrives else Severity.PROBLEM,
        )


@check("E", "masquerade", "no rule keeps the daemon's from masquerading")
def masquerade(facts: Facts) -> Iterator[Finding]:
    for chain, rule, removal in facts.exempting:
        yield Finding(
            f"packets of containers to other networks are not masqueraded: {chain}",
            f"{rule}: it is before the daemon's rules",
            "outside, their senders' addresses are not known, and no answer comes back",
            f"if it is for some receivers only, have it name these (-d); to remove it: {line((removal,))}",
            about=chain,
        )


@check("K", "traffic control", "no queue or filter of tc drops the network's packets")
def traffic_control(facts: Facts) -> Iterator[Finding]:
    is_silent = any(path.carried is None for path in facts.paths)
    for (device, kind), number in facts.queued.items():
        if kind in ORDINARY and not is_silent:
            continue  # that is how a busy queue slows senders down
        filters = [each for name, each in facts.tc_filters if name == device and kind in WITH_FILTERS]
        if filters:
            removals = [f"tc filter del dev {device} {each}" for each in filters]
            shows = [f"tc -s filter show dev {device} {each.split()[0]}" for each in filters]
        else:
            removals, shows = [f"tc qdisc del dev {device} root"], [f"tc -s qdisc show dev {device}"]
        yield Finding(
            f"the traffic control of {device} drops packets: {few(filters) or kind}",
            f"{counted(number, 'packet')} while peers and containers were probed",
            "a limit of its rate, or a filter, drops packets of the network, too",
            "raise the limit, or remove it if it is not needed:"
            f" {few([*dict.fromkeys(shows), *removals], '; ')}",
            about=device,
            severity=Severity.PROBLEM if facts.is_lossy and kind not in ORDINARY else Severity.HINT,
        )


@check("E", "left rules", "flannel's rules are in one place only")
def left_rules(facts: Facts) -> Iterator[Finding]:
    for each in facts.left_rules:
        yield Finding(
            "rules of flannel are in a place that the daemon does not use",
            few(each.rules, "; "),
            "packets still pass them; with another subnet they masquerade wrongly",
            each.commands,
        )


@check("F", "cni", "the container runtime uses flannel, and flannel runs")
def cni(facts: Facts) -> Iterator[Finding]:
    confs = [conf for conf in facts.cni if not _GO_BETWEENS & set(conf.types)]
    ours = [conf for conf in confs if "flannel" in conf.types]
    if not ours:
        return
    first = confs[0]
    path = shlex.quote(first.path)
    if first != ours[0]:
        yield hint(
            "the CNI config of another network plug-in comes before flannel's",
            f"{first.path} names {', '.join(first.types)}, and comes before {ours[0].path}",
            "container runtimes take the first: new containers are not on flannel's network",
            f"if that plug-in is no longer used: rm {path}, and restart the container runtime",
            about=first.path,
        )
    elif facts.origin != "daemon" and (first != confs[-1] or not facts.has_subnet_file):
        yield Finding(
            "the CNI config of flannel is there, and flannel is not",
            f"{first.path} comes first, and no daemon answers",
            "new containers fail, or get unreachable addresses",
            f"start the daemon; if flannel is no longer used here: rm {path}",
        )
