"""Checks of what other programs and earlier runs have left here or do to the network's packets."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.compat.glog import counted
from flanneld.ctl.checks import check, few
from flanneld.ctl.checks.containers import RUNTIMES_BRIDGES, addressing
from flanneld.ctl.paths import DISCOVERY, TO_CONTAINERS
from flanneld.findings import Advice, Command, Finding, Fix, Severity, command, line
from flanneld.network.host_settings import Topic
from flanneld.network.iproute2_commands import entering
from flanneld.network.rtnetlink.links import is_flannels
from flanneld.network.rtnetlink.traffic_control import ORDINARY, WITH_FILTERS
from flanneld.state.resources import Route

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts
    from flanneld.ctl.losses import Claim, Lost
    from flanneld.model import IPAddress


class LeftRules(Struct, frozen=True, gc=False):
    """Rules for our network in a place that the daemon does not use, and the commands that remove them."""

    rules: tuple[str, ...]
    commands: tuple[Command, ...]


class CniFile(Struct, frozen=True, gc=False):
    """A CNI config file, and the types of its plug-ins."""

    path: str
    types: tuple[str, ...]


@check("E", "filters", "no rule drops or redirects packets between the nodes or between containers")
def filters(facts: Facts) -> Iterator[Finding]:
    is_lossy = any(path.carried != path.required for path in facts.paths)
    for each in facts.filtered:
        if ((each.doubt and not each.drops_the_rest) or each.flow == DISCOVERY) and not is_lossy:
            continue  # a rule that cannot be evaluated accepts the packets, or no peer is a neighbour
        evidence = each.rule or "no rule accepts them, and the chain's policy is to drop"
        doubt = f"; whether this rule is about them cannot be told: {each.doubt}" if each.doubt else ""
        yield Finding(
            f"this node {'may drop' if doubt else each.verb} {each.flow}: {each.chain}",
            f"{evidence}{doubt}",
            "no packet of a container gets to or from other nodes that way",
            Advice(line(each.commands)) if each.needs_decision else Fix(each.commands),
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


@check("K", "traffic control", "no queue or filter of tc drops the network's packets")
def traffic_control(facts: Facts) -> Iterator[Finding]:
    is_lossy = any(path.carried != path.required for path in facts.paths)
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
            f"{counted(number, 'packet')} while peers were probed",
            "a limit of its rate, or a filter, drops packets of the network, too",
            Advice(
                "raise the limit, or remove it if nobody needs it:"
                f" {few([*dict.fromkeys(shows), *removals], '; ')}"
            ),
            about=device,
            severity=Severity.PROBLEM if is_lossy else Severity.HINT,
        )


@check("B", "lookups", "packets of the network take their way through this host")
def misrouted(facts: Facts) -> Iterator[Finding]:
    is_known = any(facts.of_topic(Topic.REVERSE_PATH))
    for each in facts.lost:
        if each.cause == "rule":
            problem = f"the policy rule {each.about} diverts {each.packets}"
        elif each.cause == "no rule":
            problem = f"no policy rule leads {each.packets} to {each.about}"
        elif each.cause == "filter" and not is_known:
            problem = f"the reverse path filter of {each.about} drops {each.packets}"
        elif each.cause == "arp":
            problem = f"{each.about} answers no ARP request"
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
        removal = f"ip rule del priority {lost.about.partition(':')[0]}"
        return f"give the rule conditions that spare the nodes' addresses, or remove it: {removal}"
    if lost.removal or lost.packets != TO_CONTAINERS:
        text = f"ip route del {lost.removal}" if lost.removal else f"`ip route get {lost.about}` shows it"
        return f"remove the route that leads astray, if nobody needs it: {text}"
    return (
        f"give the containers' bridge the address in {facts.subnet_file}, as the container runtime does:"
        f" {_addressing(facts)}"
    )


def _addressing(facts: Facts) -> str:
    nets = [net for net in facts.status.own_subnets if net.version == 4] or facts.status.own_subnets
    bridge = next((name for name in RUNTIMES_BRIDGES if facts.link(name)), "BRIDGE")
    return line(addressing(nets, bridge))


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


@check("A", "pinned neighbours", "no MAC address of a node is fixed by hand, and no wrong one of a container")
def pinned_neighbours(facts: Facts) -> Iterator[Finding]:
    silent = {str(each.target) for each in facts.paths if each.name == "underlay" and each.carried is None}
    nodes = {ip for peer in (facts.peers if facts.pinned else ()) for ip in peer.public_ips}
    own = {link.mac for link in facts.links}
    right = {address: own for _, address in facts.addresses}
    right |= {each.address: {each.mac} for each in facts.containers}
    inside = [(each.path, pin) for each in facts.containers for pin in each.pinned]
    for path, pin in dict.fromkeys([*(("", each) for each in facts.pinned), *inside]):
        address, is_node = str(pin.address), pin.device == facts.status.uplink_name and not path
        if address not in nodes if is_node else pin.mac in right.get(pin.address, {pin.mac}):
            continue
        yield Finding(
            f"the MAC address of {address} is fixed by hand: {pin.mac}",
            f"ip neigh{f' in {path}' if path else ''}: {address} dev {pin.device} lladdr {pin.mac} PERMANENT",
            "the kernel does not ask who has that address, so packets go to a former or wrong MAC address",
            Fix((command(*entering(path), "ip", "neigh", "del", address, "dev", pin.device),)),
            about=address,
            severity=Severity.HINT if is_node and address not in silent else Severity.PROBLEM,
        )


@check("J", "duplicate addresses", "no other host has the address of this node, or of a silent one")
def duplicate_addresses(facts: Facts) -> Iterator[Finding]:
    ours = {address: name for name, address in facts.addresses}
    own = {link.mac for link in facts.links}
    by_address: dict[IPAddress, dict[str, Claim]] = {}
    for each in facts.claims:
        by_address.setdefault(each.address, {})[each.mac] = each
    for address, found in by_address.items():
        name, macs = ours.get(address), few(sorted(found.keys() - own))
        if len(found.keys() - own) < (1 if name else 2):  # a silent node answers itself
            continue
        again = f"{address}/{next(iter(found.values())).length} dev {name}"
        yield Finding(
            f"another host has our address {address}" if name else f"two hosts have the address {address}",
            f"an ARP probe was answered by {macs}" if macs else f"ip address show dev {name}: dadfailed",
            "packets for this address, and for the containers behind it, go to either host",
            Advice(
                f"find {macs} at the switch; on the wrong host: ip address del {address} dev ITS_DEVICE"
                if macs
                else f"take it from the other host; then ip address del {again}; ip address add {again}"
            ),
            about=str(address),
            severity=Severity.PROBLEM if name else Severity.HINT,
        )


#: Plug-ins that delegate to the one with the next config.
_GO_BETWEENS = frozenset({"multus", "multus-shim"})


@check("E", "left rules", "flannel's rules are in one place only")
def left_rules(facts: Facts) -> Iterator[Finding]:
    for each in facts.left_rules:
        yield Finding(
            "rules of flannel are in a place that the daemon does not use",
            few(each.rules, "; "),
            "packets still pass them; with another subnet they masquerade wrongly",
            Fix(each.commands),
        )


@check("B", "left devices", "no device of an earlier configuration is left")
def left_devices(facts: Facts) -> Iterator[Finding]:
    """Check for flannel devices of other configurations.

    Another daemon's have addresses in another network.
    """
    if facts.origin != "daemon":
        return
    networks = facts.networks
    for link in facts.links:
        held = [address for name, address in facts.addresses if name == link.name]
        inside = [str(address) for address in held if any(address in network for network in networks)]
        if is_flannels(link) and link.name not in facts.devices and inside:
            yield Finding(
                f"{link.name} is left from an earlier configuration",
                f"it has {', '.join(inside)} in our network, and is no device of this daemon",
                "it takes in packets that were sent to the former segment, and its routes may come first",
                Advice(
                    f"if no other flanneld of this host uses it: ip address flush dev {link.name};"
                    f" ip link set {link.name} down"
                ),
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
        yield Finding(
            "the CNI config of another network plug-in comes before flannel's",
            f"{first.path} names {', '.join(first.types)}, and comes before {ours[0].path}",
            "container runtimes take the first: new containers are not on flannel's network",
            Advice(f"if that plug-in is no longer used: rm {path}, and restart the container runtime"),
            about=first.path,
            severity=Severity.HINT,
        )
    elif facts.origin != "daemon" and (first != confs[-1] or not facts.has_subnet_file):
        yield Finding(
            "the CNI config of flannel is there, and flannel is not",
            f"{first.path} comes first, and no daemon answers",
            "new containers fail, or get unreachable addresses",
            Advice(f"start the daemon; if flannel is no longer used here: rm {path}"),
        )
