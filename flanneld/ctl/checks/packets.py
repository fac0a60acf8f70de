"""Checks of what this host does to the network's packets: its packet filters, routes and rules."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from flanneld.ctl.checks.host import let_in
from flanneld.ctl.evidence.lookups import TO_CONTAINERS, Lost
from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, Fix, Severity, check
from flanneld.diagnostics.host_checks import Topic
from flanneld.runtime.shell import command
from flanneld.state.resources import Route


@check("E", "filters", "no rule drops packets between the nodes or between containers")
def filters(facts: Facts) -> Iterator[Finding]:
    for each in facts.filtered:
        yield Finding(
            f"this node drops {each.flow}: {each.chain}",
            each.rule or "no rule accepts them, and the chain's policy is to drop",
            "no packet of a container gets to or from other nodes that way",
            Advice(let_in("firewalld", facts)) if each.is_firewalld else Fix(each.commands),
            about=each.chain,
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
    nets = [net for net in facts.own_subnets if net.version == 4] or facts.own_subnets
    bridge = next((name for name in ("cni0", "docker0") if facts.link(name)), "BRIDGE")
    return "; ".join(f"ip address add {net[1]}/{net.prefixlen} dev {bridge}" for net in nets)


@check("A", "uplink choice", "packets to other nodes leave by the external interface")
def uplink_choice(facts: Facts) -> Iterator[Finding]:
    used = facts.section("uplink").get("name", "")
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
