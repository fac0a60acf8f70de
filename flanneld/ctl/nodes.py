"""``flannelctl nodes``: all nodes with their leases, and what they answer; no access to the other hosts."""

from __future__ import annotations

import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from flanneld.compat.glog import counted
from flanneld.ctl.findings import Severity
from flanneld.ctl.output import TextTable
from flanneld.ctl.source import DataSource
from flanneld.diagnostics.status import PeerStatus, Status, addresses, known, resources, store_kind
from flanneld.errors import FlannelError
from flanneld.model import IPAddress
from flanneld.network import survey
from flanneld.network.query import DEFAULT_PORT
from flanneld.network.survey import SILENCE, Reply
from flanneld.runtime import clock
from flanneld.state.resources import Address, Vxlan

if TYPE_CHECKING:
    from flanneld.config import Config
    from flanneld.ctl.checks.cluster import Remark


class Told(Struct, frozen=True, gc=False):
    """Facts that a node tells about itself; unknown ones are None. They are another host's word."""

    version: str | None = None
    network: tuple[str, ...] = ()
    backend: str | None = None
    vni: int | None = None
    port: int | None = None
    mtu: int | None = None
    uplink_mtu: int | None = None
    store: str | None = None
    ready: bool = True
    conditions: tuple[str, ...] = ()
    #: Our address as that node sees it.
    seen: str | None = None


class ClusterNode(Struct, frozen=True, gc=False):
    """One node. ``target`` is the address that was asked; None if no address of this family is known.

    ``query`` is its daemon's reply there, ``echo`` that of its kernel, and ``underlay`` that of its kernel at
    its public IP. The latter two are only asked without an answer of the daemon.
    """

    subnets: tuple[str, ...]
    public_ips: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()
    backend: str | None = None
    vni: int | None = None
    expires: float | None = None
    state: str = ""
    reason: str = ""
    is_own: bool = False
    #: False if this is our node and no daemon answers there.
    is_running: bool = True
    target: IPAddress | None = None
    in_overlay: bool = False
    query: Reply = SILENCE
    echo: Reply = SILENCE
    underlay: Reply = SILENCE
    told: Told | None = None

    @property
    def name(self) -> str:
        return ",".join(self.subnets)

    @property
    def answers(self) -> str:
        """Return the farthest part that answers: ``daemon``, ``kernel``, ``host`` or ``nothing``."""
        if self.is_own:
            return "daemon" if self.is_running else "nothing"
        if self.told is not None:
            return "daemon"
        if self.echo.arrived or self.query.is_refusal:
            return "kernel"
        return "host" if self.underlay.arrived else "nothing"

    @property
    def rtt(self) -> float | None:
        """Return the seconds of the answer through the overlay."""
        return self.query.rtt if self.query.rtt is not None else self.echo.rtt


class Cluster(Struct, frozen=True, gc=False):
    """All nodes, this one first. ``now`` is in seconds since the epoch; ``own`` are our overlay addresses."""

    nodes: tuple[ClusterNode, ...] = ()
    own: frozenset[str] = frozenset()
    now: float = 0.0
    #: The store's network config; None if it is not known.
    stored: Config | None = None


#: Asks many addresses at once.
Ask = Callable[[Iterable[IPAddress]], Mapping[IPAddress, Reply]]


class Probes(Struct, frozen=True):
    """Ways to ask other nodes. Each may raise ``OSError``."""

    query: Ask
    echo: Ask


def gather(told: Status, probes: Probes, now: float) -> Cluster:
    """Ask all nodes of a status. Raises ``OSError`` if this process may not send ICMP."""
    own = our_addresses(told)
    peers = [_of_peer(each, own) for each in told.each_peer]
    queried = probes.query(_targets(peers))
    silent = [each for each in peers if each.target and _told(queried[each.target]) is None]
    # In one survey, because a second one would wait for all silent hosts again.
    hosts = [ip for each in silent if each.in_overlay for ip in addresses(each.public_ips[:1])]
    echoed = probes.echo([*_targets(silent), *hosts])
    asked = [_with_replies(each, queried, echoed) for each in peers]
    ours = [own_node(told)] if told.lease is not UNSET else []
    return Cluster((*ours, *asked), frozenset(map(str, own)), now)


def stored_config(source: DataSource) -> Config | None:
    """Return the network config that the store has now; None if no option names it, or it does not tell."""
    from flanneld.ctl.store_commands import read_options
    from flanneld.subnet.opening import open_store

    wanted = source.options
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        if not wanted.names_a_store:
            wanted = read_options((), {})
        if not wanted.names_a_store or wanted.has_networks:
            return None
        with closing(open_store(wanted, {})) as store:
            return store.network_config()
    except (FlannelError, OSError):
        return None
    finally:
        logging.getLogger().setLevel(level)


def port_of(source: DataSource) -> int:
    """Return the port to ask: that of our own daemon, else that of the flags, else the usual one."""
    return known(source.status.answer_port) or source.options.answer_port or DEFAULT_PORT


def answer_remedy(port: int, where: str = "there") -> str:
    """Return what lets a daemon answer queries."""
    remedy = f"start flanneld {where} with -answer-port={port}, and let UDP {port} in"
    return f"{remedy} (Go's daemon answers no queries)"


def vxlan_of(told: Status) -> Vxlan | None:
    """Return this node's VXLAN device, None without one."""
    return next((each for each in resources(told.local) if isinstance(each, Vxlan)), None)


def our_addresses(told: Status) -> set[IPAddress]:
    """Return the addresses of this node in the overlay; empty for a backend without one."""
    return {each.address for each in resources(told.local) if isinstance(each, Address)}


def target_of(peer: PeerStatus, own: set[IPAddress]) -> tuple[IPAddress, bool] | None:
    """Return the address at which a node answers, and True if that is in the overlay.

    Nodes of one network are alike: where we have our subnet's first address, they have theirs.
    """
    families = {each.version for each in own}
    for net in peer.networks:
        if net.version in families:
            return net.network_address, True
    return None if own or not peer.public_ips else (peer.addresses[0], False)


def told(facts: Mapping[str, Any]) -> Told:
    """Return the facts of an answer. Values of another type than expected are left out."""

    def text(name: str) -> str | None:
        value = facts.get(name)
        return value[:100] if isinstance(value, str) else None

    def number(name: str) -> int | None:
        value = facts.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def texts(name: str) -> tuple[str, ...]:
        value = facts.get(name)
        return tuple(each[:100] for each in value if isinstance(each, str)) if isinstance(value, list) else ()

    return Told(
        version=text("version"),
        network=texts("network"),
        backend=text("backend"),
        vni=number("vni"),
        port=number("port"),
        mtu=number("mtu"),
        uplink_mtu=number("uplink_mtu"),
        store=text("store"),
        ready=facts.get("ready") is not False,
        conditions=texts("conditions"),
        seen=next(iter(texts("seen")), None),
    )


def own_node(status: Status) -> ClusterNode:
    """Return this node, by its own status."""
    lease, uplink = known(status.lease), known(status.uplink)
    network, health, store = known(status.network), known(status.health), known(status.store)
    made = vxlan_of(status)
    vni = made.vni if made else None
    return ClusterNode(
        subnets=lease.subnets if lease else (),
        public_ips=uplink.public_ips if uplink else (),
        macs=(known(lease.macs) or ()) if lease else (),
        backend=status.backend,
        vni=vni,
        expires=known(lease.expires) if lease else None,
        state="in the kernel",
        is_own=True,
        is_running=status.pid is not UNSET,  # only the daemon tells it
        told=Told(
            version=known(status.version),
            network=tuple(
                f"{each.network} /{each.subnet_len}" for each in (network.ranges if network else ())
            ),
            backend=status.backend,
            vni=vni,
            port=made.port if made else None,
            mtu=known(status.mtu),
            uplink_mtu=uplink.mtu if uplink else None,
            store=store_kind(store.name) if store else None,
            ready=health.ready if health else True,
            conditions=tuple(
                sorted({each.part for each in (known(health.conditions) or ())} if health else ())
            ),
        ),
    )


def _of_peer(peer: PeerStatus, own: set[IPAddress]) -> ClusterNode:
    target = target_of(peer, own)
    return ClusterNode(
        subnets=peer.subnets,
        public_ips=peer.public_ips,
        macs=tuple(mac.lower() for mac in peer.macs),
        backend=peer.backend,
        vni=min(peer.segments, default=None),
        expires=peer.expires,
        state=peer.state,
        reason=peer.reason or ", ".join(peer.conflicts),
        target=target[0] if target else None,
        in_overlay=target is not None and target[1],
    )


def _targets(nodes: Iterable[ClusterNode]) -> Iterator[IPAddress]:
    return (each.target for each in nodes if each.target is not None)


def _told(reply: Reply) -> Told | None:
    return told(reply.facts) if reply.rtt is not None and reply.facts else None


def _with_replies(
    node: ClusterNode,
    queried: Mapping[IPAddress, Reply],
    echoed: Mapping[IPAddress, Reply],
) -> ClusterNode:
    if node.target is None:
        return node
    query = queried[node.target]
    public = next(iter(addresses(node.public_ips[:1])), None)
    return replace(
        node,
        query=query,
        told=_told(query),
        echo=echoed.get(node.target, SILENCE),
        underlay=echoed.get(public, SILENCE) if public else SILENCE,
    )


#: Seconds until a host counts as silent; each is asked twice.
_WITHIN = 0.6
_COLUMNS = ("node", "public ip", "state", "rtt", "backend", "vni", "port", "mtu", "version", "store", "note")
_MORE = ("uplink mtu", "mac", "lease ends", "conditions")
_MUTE = "does not answer queries"
#: States in the order of urgency.
WORST_FIRST = ("PROBLEM", "hint", "ok")


def read(source: DataSource) -> Cluster:
    """Ask all nodes. Raises ``OSError`` if this process may not send ICMP."""
    query = partial(survey.queries, port=port_of(source), within=_WITHIN)
    return gather(source.status, Probes(query, echo), clock.wall())


def echo(targets: Iterable[IPAddress]) -> dict[IPAddress, Reply]:
    """Return the replies to ICMP echoes. Silent hosts are asked by TCP: filters may drop ICMP."""
    replies = survey.echoes(targets, _WITHIN)
    silent = [target for target, reply in replies.items() if reply == survey.SILENCE]
    return replies | dict.fromkeys(survey.reached(silent, _WITHIN), Reply(error=errno.ECONNREFUSED))


def table(cluster: Cluster, found: list[Remark], *, is_wide: bool = False) -> TextTable:
    """Return one line for each node: this one, then the others, worst first."""
    by_node = _by_node(found)
    rows = []
    for node in sorted(
        cluster.nodes, key=lambda each: (not each.is_own, WORST_FIRST.index(state(by_node[each.name])))
    ):
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
                *(_wide(node) if is_wide else ()),
                "; ".join([*(each.text for each in by_node[node.name]), *_more(node)]),
            )
        )
    return TextTable((*_COLUMNS[:-1], *(_MORE if is_wide else ()), _COLUMNS[-1]), rows)


def _wide(node: ClusterNode) -> tuple[str, ...]:
    """Return the columns of ``_MORE``."""
    told = node.told or Told()
    ends = clock.utc_text(node.expires) if node.expires else ""
    return tuple(
        each or "-"
        for each in (str(told.uplink_mtu or ""), ",".join(node.macs), ends, ", ".join(told.conditions))
    )


def state(found: list[Remark]) -> str:
    """Return the state of a node with these remarks."""
    if any(each.rule.severity is Severity.PROBLEM for each in found):
        return "PROBLEM"
    return "hint" if found else "ok"


def _more(node: ClusterNode) -> list[str]:
    """Return what is normal for a node of another kind, but explains missing columns."""
    return [_MUTE] if node.answers == "kernel" else []


def unanswered(cluster: Cluster, source: DataSource) -> list[str]:
    """Return one line about what is not known for want of answers to queries, here or there."""
    mute = sum(node.answers == "kernel" for node in cluster.nodes)
    is_mute = source.status.answer_port == 0
    if not (mute or is_mute):
        return []
    missing = (
        f"port, MTU, version and store of {counted(mute, 'node')}" if mute else "what this node tells others"
    )
    where = " and ".join(["there"] * bool(mute) + ["here"] * is_mute)
    return [f"{missing}; {answer_remedy(port_of(source), where)}"]


def plain(cluster: Cluster, found: list[Remark]) -> list[dict[str, Any]]:
    """Return the nodes as JSON."""
    by_node = _by_node(found)
    return [_described(node, by_node[node.name]) for node in cluster.nodes]


def _described(node: ClusterNode, found: list[Remark]) -> dict[str, Any]:
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
            name: getattr(node.told, name, None)
            for name in ("port", "mtu", "uplink_mtu", "version", "store", "ready", "conditions")
        },
        "notes": [{"rule": each.rule.name, "text": each.text} for each in found],
    }


def _by_node(found: list[Remark]) -> dict[str, list[Remark]]:
    by_node: dict[str, list[Remark]] = defaultdict(list)
    for each in found:
        by_node[each.node.name].append(each)
    return by_node


def examine(source: DataSource) -> tuple[Cluster, list[Remark]]:
    """Ask all nodes and return them with the rules that they break."""
    from flanneld.ctl.checks.cluster import remarks

    cluster = replace(read(source), stored=stored_config(source))
    return cluster, remarks(cluster)
