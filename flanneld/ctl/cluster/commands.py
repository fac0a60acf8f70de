"""``flannelctl nodes`` and ``flannelctl doctor --cluster``."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from flanneld.compat.glog import counted
from flanneld.ctl.cluster.nodes import Cluster, Node, Probes, answer_remedy, gather, port_of
from flanneld.ctl.cluster.rules import Remark, remarks
from flanneld.ctl.data_source import Source
from flanneld.ctl.findings import Severity
from flanneld.ctl.text_tables import TextTable
from flanneld.model import IPAddress
from flanneld.network.query import port_refusal, survey
from flanneld.network.query.survey import Reply
from flanneld.runtime import clock

#: Seconds until a host counts as silent; each is asked twice.
_WITHIN = 0.6
_COLUMNS = ("node", "public ip", "state", "rtt", "backend", "vni", "port", "mtu", "version", "store", "note")
_MUTE = "does not answer queries"


def read(source: Source) -> Cluster:
    """Ask all nodes. Raises ``OSError`` if this process may not send ICMP."""
    query = partial(survey.queries, port=port_of(source.document, source.options), within=_WITHIN)
    return gather(source.document, Probes(query, _echo), clock.wall())


def _echo(targets: Iterable[IPAddress]) -> dict[IPAddress, Reply]:
    """Return the replies to ICMP echoes. Silent hosts are asked by TCP: filters may drop ICMP."""
    replies = survey.echoes(targets, _WITHIN)
    silent = [target for target, reply in replies.items() if reply == survey.SILENCE]
    return replies | dict.fromkeys(port_refusal.reached(silent, _WITHIN), Reply(error=errno.ECONNREFUSED))


def table(cluster: Cluster, found: list[Remark]) -> TextTable:
    """Return one line for each node."""
    by_node = _by_node(found)
    rows = []
    for node in cluster.nodes:
        told = node.told
        rows.append(
            (
                node.name or "-",
                ",".join(node.public_ips) or "-",
                state(by_node[node.name]),
                "this node" if node.is_own else "-" if node.rtt is None else f"{1000 * node.rtt:.1f} ms",
                *(
                    "-" if each is None else str(each)
                    for each in (
                        node.backend,
                        node.vni,
                        *((told.port, told.mtu, told.version, told.store) if told else (None,) * 4),
                    )
                ),
                "; ".join([*(each.text for each in by_node[node.name]), *_more(node)]),
            )
        )
    return TextTable(_COLUMNS, rows)


def state(found: list[Remark]) -> str:
    """Return the state of a node with these remarks."""
    if any(each.rule.severity is Severity.PROBLEM for each in found):
        return "PROBLEM"
    return "hint" if found else "ok"


def _more(node: Node) -> list[str]:
    """Return what is normal for a node of another kind, but explains missing columns."""
    return [_MUTE] if node.answers == "kernel" else []


def unanswered(cluster: Cluster, source: Source) -> list[str]:
    """Return one line about columns that stay empty for want of answers to queries, with the remedy."""
    mute = sum(node.answers == "kernel" for node in cluster.nodes)
    if not mute:
        return []
    missing = f"port, MTU, version and store of {counted(mute, 'node')}"
    return [f"{missing}; {answer_remedy(port_of(source.document, source.options))}"]


def plain(cluster: Cluster, found: list[Remark]) -> list[dict[str, Any]]:
    """Return the nodes as JSON."""
    by_node = _by_node(found)
    return [_node(node, by_node[node.name]) for node in cluster.nodes]


def _node(node: Node, found: list[Remark]) -> dict[str, Any]:
    told: Mapping[str, Any] = {}
    if node.told:
        from msgspec.structs import asdict

        told = asdict(node.told)
    return {
        "subnets": node.subnets,
        "public_ips": node.public_ips,
        "is_own": node.is_own,
        "state": state(found),
        "answers": node.answers,
        "rtt": node.rtt,
        "backend": node.backend,
        "vni": node.vni,
        "expires": node.expires,
        **{
            name: told.get(name)
            for name in ("port", "mtu", "uplink_mtu", "version", "store", "ready", "conditions")
        },
        "notes": [{"rule": each.rule.name, "text": each.text} for each in found],
    }


def _by_node(found: list[Remark]) -> dict[str, list[Remark]]:
    by_node: dict[str, list[Remark]] = defaultdict(list)
    for each in found:
        by_node[each.node.name].append(each)
    return by_node


def examine(source: Source) -> tuple[Cluster, list[Remark]]:
    """Ask all nodes and return them with the rules that they break."""
    cluster = read(source)
    return cluster, remarks(cluster)
