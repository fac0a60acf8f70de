"""Rules for the nodes of a cluster, and the nodes that break them (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from ipaddress import ip_network
from typing import TypeVar

from msgspec import Struct

from flanneld.compat.glog import counted
from flanneld.ctl.checks.kernel import NEW_MAC
from flanneld.ctl.cluster.nodes import Cluster, Node, Told
from flanneld.ctl.findings import Advice, Check, Finding, Severity
from flanneld.ctl.path_mtu import WITH_OPTION
from flanneld.errors import LEASES_END
from flanneld.model import overlap

Value = TypeVar("Value", bound=Hashable)
#: Nodes named in a finding, at most.
_FEW = 3
#: Seconds. Every flannel renews a lease of a day an hour before its end, or earlier.
_SOON = 3000.0
_GOOD_STATES = ("in the kernel", "pending", "")


class Rule(Struct, frozen=True):
    """A rule. ``look`` yields the nodes that break it, each with a text for its line.

    ``problem`` follows ``1 node`` and ``2 nodes`` alike.
    """

    name: str
    meaning: str
    problem: str
    why: str
    advice: str
    look: Callable[[Cluster], Iterator[tuple[Node, str]]]
    severity: Severity = Severity.PROBLEM


class Remark(Struct, frozen=True):
    """A node that breaks a rule."""

    rule: Rule
    node: Node
    text: str


def remarks(cluster: Cluster) -> list[Remark]:
    """Return all nodes that break a rule, by rule."""
    return [Remark(rule, node, text) for rule in RULES for node, text in rule.look(cluster)]


def findings(found: list[Remark]) -> list[tuple[Check, Finding]]:
    """Return one finding of the doctor for each broken rule."""
    by_rule: dict[str, list[Remark]] = defaultdict(list)
    for each in found:
        by_rule[each.rule.name].append(each)
    return [(_check(some[0].rule), _finding(some[0].rule, some)) for some in by_rule.values()]


def _check(rule: Rule) -> Check:
    """Return a rule as a check of the doctor; it looks at the cluster instead of this host's facts."""
    return Check("N", rule.name, rule.meaning, lambda _: iter(()))


def _finding(rule: Rule, found: list[Remark]) -> Finding:
    some = "; ".join(f"{each.node.name}: {each.text}" for each in found[:_FEW])
    more = f"; and {len(found) - _FEW} more" if len(found) > _FEW else ""
    number = len({each.node.name for each in found})
    return Finding(
        f"{counted(number, 'node')} {rule.problem}",
        some + more,
        rule.why,
        Advice(rule.advice),
        severity=rule.severity,
    )


# ---- what they look at --------------------------------------------------------------------------


def _silent(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    for node in cluster.nodes:
        if not node.is_running:
            yield node, "no daemon answers here"
        elif node.target is not None and node.answers == "nothing":
            yield node, "no answer"
        elif node.answers == "host":
            yield node, f"its host answers at {node.public_ips[0]}, its end of the tunnel does not"


def _unusable(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    for node in cluster.nodes:
        if node.state not in _GOOD_STATES:
            yield node, f"{node.state}: {node.reason}"


def _sick(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    for node in cluster.nodes:
        if node.told and (node.told.conditions or not node.told.ready):
            parts = ", ".join(node.told.conditions)
            yield (
                node,
                "; ".join(
                    filter(
                        None, ("" if node.told.ready else "not ready", f"trouble: {parts}" if parts else "")
                    )
                ),
            )


def _unlike(cluster: Cluster, name: str, value: Callable[[Node], Value | None]) -> Iterator[tuple[Node, str]]:
    """Yield the nodes whose value differs from that of most nodes. Unknown values do not count."""
    known = [(node, found) for node in cluster.nodes if (found := value(node)) is not None]
    usual = Counter(found for _, found in known).most_common(1)
    for node, found in known:
        if found != usual[0][0]:
            yield node, f"{name} {_shown(found)}, most have {_shown(usual[0][0])}"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _by_told(
    cluster: Cluster, name: str, value: Callable[[Told], Value | None]
) -> Iterator[tuple[Node, str]]:
    yield from _unlike(cluster, name, lambda node: value(node.told) if node.told else None)


def _config(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    yield from _unlike(cluster, "backend", lambda node: node.backend or None)
    yield from _unlike(cluster, "VNI", lambda node: node.vni)
    yield from _by_told(cluster, "port", lambda told: told.port)
    yield from _by_told(cluster, "network", lambda told: told.network or None)


def _mtu(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    yield from _by_told(cluster, "MTU", lambda told: told.mtu)


def _store(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    # A client of a lease server uses the server's store, which may be of any kind.
    yield from _by_told(cluster, "store", lambda told: None if told.store == "remote" else told.store)


def _version(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    yield from _by_told(cluster, "version", lambda told: told.version)


def _shared(
    cluster: Cluster, name: str, values: Callable[[Node], tuple[str, ...]]
) -> Iterator[tuple[Node, str]]:
    """Yield the nodes that share a value that should be one node's own."""
    owners: dict[str, list[Node]] = defaultdict(list)
    for node in cluster.nodes:
        for value in dict.fromkeys(values(node)):
            owners[value].append(node)
    for value, nodes in owners.items():
        for node in nodes if len(nodes) > 1 else ():
            others = [each.name for each in nodes if each is not node]
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            yield node, f"{name} {value} is also that of {others[0]}{more}"


def _public_ip(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    # Nodes behind one NAT have one public IP, and WireGuard tells them apart by their keys.
    yield from _shared(
        cluster, "public IP", lambda node: () if node.backend == "wireguard" else node.public_ips
    )


def _mac(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    yield from _shared(cluster, "MAC", lambda node: node.macs)


def _overlap(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    """Compare each subnet with the widest one before it: sorted by first address, only that can reach it."""
    nets = sorted(
        ((ip_network(text), node) for node in cluster.nodes for text in node.subnets),
        key=lambda pair: (pair[0].version, int(pair[0].network_address), pair[0].prefixlen),
    )
    widest = None
    for net, node in nets:
        if widest is not None and overlap(widest[0], net):
            yield node, f"its subnet overlaps {widest[0]} of {widest[1].name}"
        else:
            widest = (net, node)


def _lease(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    for node in cluster.nodes:
        left = _SOON if node.expires is None else node.expires - cluster.now
        if left < _SOON:
            yield node, f"its lease ends in {left / 60:.0f} min" if left > 0 else "its lease has expired"


def _translated(cluster: Cluster) -> Iterator[tuple[Node, str]]:
    for node in cluster.nodes:
        seen = node.told.seen if node.told and node.in_overlay else None
        if seen and seen not in cluster.own:
            yield node, f"sees this node as {seen}"


RULES = (
    Rule(
        "silent nodes",
        "each node answers",
        "without an answer",
        "containers there are not reached, unless a filter drops ICMP and TCP for the node itself",
        f"flannelctl ping SUBNET shows where packets stop; {LEASES_END}",
        _silent,
    ),
    Rule(
        "unusable leases",
        "each lease can be used",
        "cannot be used from here",
        "this node has no routes to them, or not all",
        "flannelctl peers says why",
        _unusable,
    ),
    Rule(
        "conditions",
        "no node reports a health condition",
        "with health conditions",
        "part of their daemon does not work",
        "run flannelctl status there",
        _sick,
        Severity.HINT,
    ),
    Rule(
        "configs",
        "all nodes run one network config",
        "with another network config",
        "nodes with different ones do not reach each other",
        "restart flanneld there: it reads the network config when it starts",
        _config,
    ),
    Rule(
        "MTUs",
        "all nodes have one MTU for containers",
        "with another MTU for containers",
        "large packets to nodes with a smaller one are lost where ICMP is filtered",
        f"give all uplinks one MTU, or with {' or '.join(WITH_OPTION)} set Backend.MTU;"
        " then restart flanneld and containers",
        _mtu,
    ),
    Rule(
        "stores",
        "all nodes use one store of leases",
        "with leases in another store",
        "nodes of one store do not see those of the other, unless -etcd-api=both joins them",
        "give all nodes the same -etcd-api, -remote or -kube-subnet-mgr",
        _store,
        Severity.HINT,
    ),
    Rule(
        "versions",
        "all nodes run one version",
        "with another version",
        "they work together; an upgrade may have stopped halfway",
        "complete the upgrade",
        _version,
        Severity.HINT,
    ),
    Rule(
        "shared public IPs",
        "each lease has a public IP of its own",
        "with a public IP that is used twice",
        "packets for one of them reach the other",
        f"give each node its own with -public-ip or -iface; {LEASES_END}",
        _public_ip,
    ),
    Rule(
        "shared MACs",
        "each node's VXLAN device has a MAC of its own",
        "with a MAC that is used twice",
        "only one of them is reached: cloned machines have one MAC",
        f"on the clone: stop flanneld, {NEW_MAC}, start flanneld",
        _mac,
    ),
    Rule(
        "overlaps",
        "no two subnets overlap",
        "with overlapping subnets",
        "packets reach the node with the longer prefix",
        f"give all nodes one SubnetLen and restart those that had another; {LEASES_END}",
        _overlap,
    ),
    Rule(
        "ends of leases",
        "each lease is renewed in time",
        "with a lease that was not renewed",
        "when it ends, all nodes drop their routes to the node",
        "see whether flanneld runs there and reaches the store",
        _lease,
    ),
    Rule(
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
CHECKS = tuple(map(_check, RULES))
