"""Checks of what nodes must have in common, and of the way between them; rules for all nodes (pure)."""

from __future__ import annotations

import errno
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from flanneld.backends.registry import described
from flanneld.compat.glog import counted
from flanneld.ctl.checks import FEW, Check, check, few, see_first
from flanneld.ctl.checks.kernel import NEW_MAC
from flanneld.ctl.checks.store import shown, taken_lease, unlike_stored
from flanneld.ctl.drops import MASQUERADES
from flanneld.ctl.nodes import Told
from flanneld.ctl.paths import PathToPeer, carriers, listed
from flanneld.diagnostics.status import PeerStatus, known, networks, resources
from flanneld.errors import LEASES_END
from flanneld.findings import Finding, Severity
from flanneld.model import FAMILIES, overlap
from flanneld.state.resources import Route

if TYPE_CHECKING:
    from flanneld.ctl.checks import Facts
    from flanneld.ctl.nodes import Cluster, ClusterNode

    #: Nodes that break a rule, each with a text for its line, and what finds them.
    Broken = Iterator[tuple[ClusterNode, str]]
    Look = Callable[[Cluster], Broken]
Value = TypeVar("Value", bound=Hashable)
#: Seconds. Every flannel renews a lease of a day an hour before its end, or earlier.
_SOON = 3000.0
_DROPPERS = "a firewall or the switch (a VLAN, isolated ports, a MAC address used twice)"
_LOST_OVER = "a firewall, or a wrong address, route or neighbour at one end, loses all"
_GOOD_STATES = ("in the kernel", "pending", "")


class ClusterRule(Struct, frozen=True):
    """A rule. ``problem`` follows ``1 node`` and ``2 nodes`` alike."""

    name: str
    meaning: str
    problem: str
    why: str
    advice: str
    look: Look
    severity: Severity = Severity.PROBLEM
    #: True if the text names all nodes that it is about, and is the same for each of them.
    names_nodes: bool = False


class Remark(Struct, frozen=True):
    """A node that breaks a rule."""

    rule: ClusterRule
    node: ClusterNode
    text: str


def remarks(cluster: Cluster) -> list[Remark]:
    """Return all nodes that break a rule, by rule."""
    return [Remark(rule, node, text) for rule in RULES for node, text in rule.look(cluster)]


def cluster_findings(found: list[Remark]) -> list[tuple[Check, Finding]]:
    """Return one finding of the doctor for each broken rule."""
    by_rule: dict[str, list[Remark]] = defaultdict(list)
    for each in found:
        by_rule[each.rule.name].append(each)
    return [(_check(some[0].rule), _finding(some[0].rule, some)) for some in by_rule.values()]


def _check(rule: ClusterRule) -> Check:
    """Return a rule as a check of the doctor; it looks at the cluster instead of this host's facts."""
    return Check("N", rule.name, rule.meaning, lambda _: iter(()))


def _finding(rule: ClusterRule, found: list[Remark]) -> Finding:
    number = len({each.node.name for each in found})
    return Finding(
        f"{counted(number, 'node')} {rule.problem}",
        few(
            list(
                dict.fromkeys(
                    each.text if rule.names_nodes else f"{each.node.place}: {each.text}" for each in found
                )
            ),
            "; ",
        ),
        rule.why,
        rule.advice,
        severity=rule.severity,
    )


# ---- what they look at --------------------------------------------------------------------------


def _if_it_has_left(subnet: str = "SUBNET") -> str:
    """Return what to do about the lease of a silent node: that command asks, twice if the node answers."""
    return f"if its host has left: flannelctl lease delete {subnet}; {LEASES_END}"


def _silent_nodes(cluster: Cluster) -> Broken:
    for node in cluster.nodes:
        if not node.is_running:
            yield node, "no daemon answers here"
        elif node.target is not None and node.answers == "nothing":
            yield node, "no answer"
        elif node.answers == "host":
            yield node, f"its host answers at {node.public_ips[0]}, its end of the tunnel does not"


def _unusable(cluster: Cluster) -> Broken:
    for node in cluster.nodes:
        if node.state not in _GOOD_STATES:
            yield node, f"{node.state}: {node.reason}"


def _sick(cluster: Cluster) -> Broken:
    for node in cluster.nodes:
        if node.told and (node.told.conditions or not node.told.ready):
            readiness = [] if node.told.ready else ["not ready"]
            trouble = [f"trouble: {', '.join(node.told.conditions)}"] if node.told.conditions else []
            yield node, "; ".join(readiness + trouble)


def _unlike(cluster: Cluster, name: str, value: Callable[[ClusterNode], Value | None]) -> Broken:
    """Yield the nodes whose value differs from that of most nodes. Unknown values do not count."""
    known = [(node, found) for node in cluster.nodes if (found := value(node)) is not None]
    usual = Counter(found for _, found in known).most_common(1)
    for node, found in known:
        if found != usual[0][0]:
            yield node, f"{name} {shown(found)}, most have {shown(usual[0][0])}"


def _by_told(name: str, value: Callable[[Told], Value | None]) -> Look:
    """Return what finds the nodes that tell another value than most."""
    return lambda cluster: _unlike(cluster, name, lambda node: value(node.told) if node.told else None)


def _config(cluster: Cluster) -> Broken:
    if cluster.stored is not None:  # however many still run the former one
        for node in cluster.nodes:
            runs = node.told or Told(backend=node.backend, vni=node.vni)
            if found := list(unlike_stored(cluster.stored, runs)):
                yield node, "; ".join(found)
        return
    yield from _unlike(cluster, "backend", lambda node: node.backend or None)
    yield from _unlike(cluster, "VNI", lambda node: node.vni)
    yield from _by_told("port", lambda told: told.port)(cluster)
    yield from _by_told("network", lambda told: told.network or None)(cluster)


def _mtu(cluster: Cluster) -> Broken:
    if cluster.stored is None or not any(_config(cluster)):  # the nodes that run another config are named
        yield from _by_told("MTU", lambda told: told.mtu)(cluster)


def _shared(name: str, values: Callable[[ClusterNode], tuple[str, ...]]) -> Look:
    """Return what finds the nodes that share a value that should be one node's own."""

    def look(cluster: Cluster) -> Broken:
        owners: dict[str, list[ClusterNode]] = defaultdict(list)
        for node in cluster.nodes:
            for value in dict.fromkeys(values(node)):
                owners[value].append(node)
        for value, nodes in owners.items():
            for node in nodes if len(nodes) > 1 else ():
                yield node, f"{few([each.place for each in nodes])} share the {name} {value}"

    return look


def _overlap(cluster: Cluster) -> Broken:
    """Compare each subnet with the widest one before it: sorted by first address, only that can reach it."""
    nets = sorted(
        ((net, node) for node in cluster.nodes for net in networks(node.subnets)),
        key=lambda pair: (pair[0].version, int(pair[0].network_address), pair[0].prefixlen),
    )
    widest = None
    for net, node in nets:
        if widest is not None and overlap(widest[0], net):
            yield node, f"its subnet overlaps {widest[0]} of {widest[1].name}"
        else:
            widest = (net, node)


def _lease(cluster: Cluster) -> Broken:
    for node in cluster.nodes:
        left = _SOON if node.expires is None else node.expires - cluster.now
        if left < _SOON:
            yield node, f"its lease ends in {left / 60:.0f} min" if left > 0 else "its lease has expired"


def _translated(cluster: Cluster) -> Broken:
    for node in cluster.nodes:
        seen = node.told.seen if node.told and node.in_overlay else None
        if seen and seen not in cluster.own:
            yield node, f"sees this node as {seen}"


RULES = (
    ClusterRule(
        "silent nodes",
        "each node answers",
        "without an answer",
        "containers there are not reached, unless a filter drops ICMP and TCP for the node itself",
        f"flannelctl netcheck SUBNET shows where packets stop; {_if_it_has_left()}",
        _silent_nodes,
    ),
    ClusterRule(
        "unusable leases",
        "each lease can be used",
        "cannot be used from here",
        "this node has no routes to them, or not all",
        "flannelctl peers says why",
        _unusable,
    ),
    ClusterRule(
        "conditions",
        "no node reports a health condition",
        "with health conditions",
        "part of their daemon does not work",
        "run flannelctl status there",
        _sick,
        Severity.HINT,
    ),
    ClusterRule(
        "configs",
        "all nodes run one network config",
        "with another network config",
        "nodes with different ones do not reach each other",
        "restart flanneld there: it reads the network config when it starts",
        _config,
    ),
    ClusterRule(
        "MTUs",
        "all nodes have one MTU for containers",
        "with another MTU for containers",
        "large packets to nodes with a smaller one are lost where ICMP is filtered",
        "give all uplinks one MTU, or with vxlan or wireguard set Backend.MTU;"
        " then restart flanneld and containers",
        _mtu,
    ),
    ClusterRule(
        "stores",
        "all nodes use one store of leases",
        "with leases in another store",
        "nodes of one store do not see those of the other, unless -etcd-api=both joins them",
        "give all nodes the same -etcd-api, -remote or -kube-subnet-mgr",
        # A client of a lease server uses the server's store, which may be of any kind.
        _by_told("store", lambda told: None if told.store == "remote" else told.store),
        Severity.HINT,
    ),
    ClusterRule(
        "versions",
        "all nodes run one version",
        "with another version",
        "they work together; an upgrade may have stopped halfway",
        "complete the upgrade",
        _by_told("version", lambda told: told.version),
        Severity.HINT,
    ),
    ClusterRule(
        "shared public IPs",
        "each lease has a public IP of its own",
        "with a public IP that is used twice",
        "packets for one of them reach the other",
        f"give each node its own with -public-ip or -iface; {LEASES_END}",
        # Nodes behind one NAT have one public IP, and WireGuard tells them apart by their keys.
        _shared("public IP", lambda node: () if node.backend == "wireguard" else node.public_ips),
        names_nodes=True,
    ),
    ClusterRule(
        "shared MACs",
        "each node's VXLAN device has a MAC of its own",
        "with a MAC that is used twice",
        "only one of them is reached: cloned machines have one MAC",
        f"on the clone: stop flanneld, {NEW_MAC}, start flanneld",
        _shared("MAC", lambda node: node.macs),
        names_nodes=True,
    ),
    ClusterRule(
        "overlaps",
        "no two subnets overlap",
        "with overlapping subnets",
        "packets reach the node with the longer prefix",
        f"give all nodes one SubnetLen and restart those that had another; {LEASES_END}",
        _overlap,
    ),
    ClusterRule(
        "ends of leases",
        "each lease is renewed in time",
        "with a lease that was not renewed",
        "when it ends, all nodes drop their routes to the node",
        "see whether flanneld runs there and reaches the store",
        _lease,
    ),
    ClusterRule(
        "address translation",
        "nodes see this one's own address",
        "behind address translation",
        "a rule masquerades packets inside the network: policies and logs see wrong addresses",
        "find it in the nat table here, with iptables-save or nft list ruleset; let it spare the network",
        _translated,
        Severity.HINT,
    ),
)

#: The same as checks of the doctor, for its lists.
CLUSTER_CHECKS = tuple(map(_check, RULES))


# ---- the way between this node and its peers ----------------------------------------------------


@check("J", "off link", "with host-gw all nodes are on one network")
def off_link(facts: Facts) -> Iterator[Finding]:
    name = facts.status.uplink_name
    missing = [each.value for each in facts.entries if each.state == "missing"]
    lacking = set(map(str, missing))
    # The kernel's answer to a gateway that is not on the link.
    refused = {each.object for each in known(facts.status.refused) or () if each.errno == errno.ENETUNREACH}
    routes = [each for each in missing if str(each) in refused]
    away = dict.fromkeys(
        str(each.gateway)
        for each in routes
        if isinstance(each, Route) and each.device == name and each.gateway
    )
    if away:
        yield Finding(
            f"{few(list(away))} is not on the network of {name}",
            f"the kernel takes no route by a gateway behind another one: {min(lacking & refused)}",
            "host-gw needs all nodes on one network: packets for this peer go nowhere",
            "put the nodes on one network, or set Backend.Type to vxlan, with DirectRouting if you like",
            about=name,
        )


@check("K", "tunnel", "peers answer through the tunnel")
def tunnel(facts: Facts) -> Iterator[Finding]:
    # The silence of these families is the effect of a cause on this host that is known.
    explained = {family for drop in facts.filtered if not drop.doubt for family in drop.families}
    explained |= {family for lost in facts.lost for family in lost.families}
    if taken_lease(facts) or (explained and facts.status.backend == "wireguard"):
        return  # answers get to another node; or one tunnel may carry both families
    answered = {each.end for each in facts.paths if each.name == "underlay" and each.carried is not None}
    if facts.status.backend == "wireguard":
        answered |= {(peer, family) for peer, _ in answered for family in FAMILIES}
    silent = [each for each in _silent(facts) if each.target.version not in explained]
    peers = {peer.subnets[0]: peer for peer in (facts.peers if silent else ())}
    # No handshake is a finding of its own.
    keyless = {
        name
        for name, peer in peers.items()
        if any(session.state == "silent" for session in known(peer.sessions) or ())
    }
    there = [
        each for each in silent if each.name == "tunnel" and each.end in answered and each.peer not in keyless
    ]
    for each in there[:FEW]:
        peer = peers.get(each.peer, PeerStatus((each.peer,)))
        used = dict.fromkeys(each.name for each in carriers(facts.status, peer))
        ends = [
            p for p in facts.paths if p.name == "underlay" and p.peer == each.peer and p.carried is not None
        ]
        devices = [name for name in facts.devices if ("-v6" in name) == (each.target.version == 6)]
        ends.sort(key=lambda end: end.target.version != each.target.version)
        public = next((end.target for end in ends), None)
        refused = public is not None and str(public) in facts.refusing
        yield Finding(
            f"no packet comes back through the tunnel to {public}",
            f"{public} answers ICMP echoes, {each.target} behind the tunnel does not"
            + ("; the node refuses our UDP port" if refused else ""),
            "packets of containers to that node are lost, or the answers",
            (
                _where_refused(peer)
                if refused
                else f"{see_first(facts)}run flannelctl doctor there, too; let the network between pass"
                f" {', '.join(used) or 'the packets of the tunnel'}"
                + f"; if nstat -az UdpInCsumErrors grows, at its peer: ethtool -K {few(devices[:1])}"
                " tx-checksum-ip-generic off" * (peer.backend == "vxlan")
            ),
            about=each.peer,
        )
    gone = [each for each in silent if each.name == "underlay" or each.end not in answered]
    half = {peer for peer, _ in answered}  # over the other family
    for is_half in (False, True):
        if some := [each for each in gone if (each.peer in half) == is_half]:
            yield _of_gone(some, peers, facts, f" over IPv{some[0].target.version}" * is_half)
    yield from _of_turned_away(facts)


def _of_turned_away(facts: Facts) -> Iterator[Finding]:
    """Yield the finding about packets of containers without a tunnel that get no answer."""
    is_known = facts.lost or any(not drop.doubt and drop.verb != MASQUERADES for drop in facts.filtered)
    found = () if is_known else facts.turned_away
    sure = {peer: source for peer, source, is_heard in found if not is_heard}
    away = sure or {peer: source for peer, source, _ in found}
    if away:
        places = ((peer.place, peer.subnets[0]) for peer in facts.peers)
        yield Finding(
            f"packets of containers to {counted(len(away), 'peer')} {'' if sure else 'may '}get lost,"
            " and those of nodes do not",
            few([f"{place}, from {away[peer]}" for place, peer in places if peer in away]),
            "the network passes only addresses of nodes, as clouds do, or that node does not pass them on"
            if sure
            else "the node there does not forward, or it forwards and does not report what it cannot deliver",
            "run flannelctl doctor there"
            + "; in a cloud switch its check off for each node, with AWS by aws ec2 modify-instance-attribute"
            " --no-source-dest-check --instance-id ID; or set Backend.Type to vxlan" * bool(sure),
            severity=Severity.PROBLEM if sure else Severity.HINT,
        )


def _of_gone(gone: Sequence[PathToPeer], peers: Mapping[str, PeerStatus], facts: Facts, over: str) -> Finding:
    """Return the finding about peers that do not answer, or only not ``over`` one family."""
    names = list(dict.fromkeys(each.peer for each in gone))
    left = names if len(names) == 1 else ()
    ways = ", neither from the node nor through the tunnel" if gone[0].name == "tunnel" else ""
    nodes = [ip for name in names if name in peers for ip in peers[name].public_ips]
    hops = {ip: hop for ip in nodes if (hop := facts.unresolved.get(ip))}
    routed = {ip: hop for ip, hop in hops.items() if ip != hop}
    unanswered = f"; no answer to ARP or NDP from {few(list(dict.fromkeys(hops.values())))}" if hops else ""
    steps = []
    if routed:  # most likely by the same router
        steps.append(f"ip route get {min(routed)} shows the route: correct it, or bring the router up")
    if any(name not in peers or routed.keys().isdisjoint(peers[name].public_ips) for name in names):
        where = "on the others" if routed else "there"
        steps.append(f"run flannelctl doctor {where}" + ("" if over else f"; {_if_it_has_left(*left)}"))
    if not routed and any(":" not in hop for hop in hops.values()):
        steps.append("see whether a rule here drops ARP: nft list ruleset arp")
    return Finding(
        f"no answer from {counted(len(names), 'peer')}{over}{ways}",
        few([peers[name].place if name in peers else name for name in names]) + unanswered,
        "neither ICMP nor TCP comes back: "
        + (f"{_LOST_OVER}{over}" if over else f"the nodes are off, or {_DROPPERS} drops all packets"),
        see_first(facts) + "; ".join(steps),
    )


def _where_refused(peer: PeerStatus) -> str:
    if peer.backend == "ipsec":
        ports = listed(each for each in described(peer.backend).flows if each.port)
        return f"see that flanneld and charon run there, and no firewall rejects {ports}"
    return "see that flannel runs there with the same Backend.Port, and no firewall rejects it"


def _silent(facts: Facts) -> Iterator[PathToPeer]:
    """Yield the paths on which a peer's silence is a loss: through a tunnel, and to gateways of our routes.

    A cloud's table leads to peers that need not answer. One that passes packets on or refuses TCP loses none.
    """
    silent = [each for each in facts.paths if each.carried is None]
    tunnels = {each.end for each in facts.paths if each.name == "tunnel"}
    names = {each.peer for each in silent}
    peers = (peer for peer in (facts.peers if silent else ()) if peer.subnets[0] in names)
    routes = (each for peer in peers for each in resources(peer.objects) if isinstance(each, Route))
    gateways = {route.gateway for route in routes}
    for each in silent:
        end = each.end
        if end not in facts.passing and (
            each.name == "tunnel" or (end not in tunnels and each.target in gateways)
        ):
            yield each


@check("D", "segment", "all nodes have the same VNI")
def segment(facts: Facts) -> Iterator[Finding]:
    ours = facts.vnis
    for peer in facts.peers:
        theirs = peer.segments
        if ours and theirs and not ours & theirs:
            yield Finding(
                f"the node of {peer.name} has VNI {_listed(theirs)}, this one {_listed(ours)}",
                f"its lease says so, public IP {', '.join(peer.public_ips)}",
                "either node drops what the other one sends",
                "restart flanneld on the node whose VNI is not Backend.VNI of the network config",
                about=peer.name,
            )


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
