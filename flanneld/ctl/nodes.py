"""``flannelctl nodes``: all nodes with their leases, and what they answer; no access to the other hosts."""

from __future__ import annotations

import errno
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from flanneld.compat.glog import counted
from flanneld.ctl.output import State, TextTable, when
from flanneld.ctl.source import DataSource, SourcePart, Unknown
from flanneld.diagnostics.status import (
    LeaseStatus,
    NetworkStatus,
    PeerStatus,
    ProbeStatus,
    SessionStatus,
    Status,
    addresses,
    known,
    resources,
    store_kind,
    understood,
)
from flanneld.errors import FlannelError, NoAnswer
from flanneld.findings import Severity
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
    #: A few of its containers, which it has just heard.
    containers: tuple[str, ...] = ()


class ClusterNode(PeerStatus, frozen=True, gc=False):
    """A node by its lease, and its answers. ``target`` is the address that was asked; None without one.

    ``query`` is its daemon's reply there, ``echo`` that of its kernel, and ``underlay`` that of its kernel at
    its public IP. The latter two are only asked without an answer of the daemon.
    """

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
    def vni(self) -> int | None:
        return min(self.segments, default=None)

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


def gather(told: Status, query: Ask, echo: Ask, now: float) -> Cluster:
    """Ask all nodes of a status. Raises ``OSError`` if this process may not send ICMP."""
    own = our_addresses(told)
    peers = [_of_peer(each, own) for each in told.each_peer]
    queried = query(_targets(peers))
    silent = [each for each in peers if each.target and _told(queried[each.target]) is None]
    # In one survey, because a second one would wait for all silent hosts again.
    hosts = [ip for each in silent if each.in_overlay for ip in addresses(each.public_ips[:1])]
    echoed = echo([*_targets(silent), *hosts])
    asked = [_with_replies(each, queried, echoed) for each in peers]
    ours = [own_node(told)] if told.lease is not UNSET else []
    return Cluster((*ours, *asked), frozenset(map(str, own)), now)


def stored_config(source: DataSource) -> Config | Unknown | None:
    """Return the network config that the store has now, or that it is silent; None if it tells nothing."""
    from flanneld.ctl.store_commands import read_options
    from flanneld.subnet.opening import open_store

    wanted, told = source.options, known(source.status.store)
    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)
    try:
        if not wanted.names_a_store:
            wanted = read_options((), {})
        if not wanted.names_a_store or wanted.has_networks or (told and known(told.problem)):
            return None
        with closing(open_store(wanted, {})) as store:
            return store.network_config()
    except (FlannelError, OSError) as error:
        is_silent = isinstance(error, NoAnswer)
        return Unknown(SourcePart.STORE, f"the store does not tell: {error}") if is_silent else None
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
    """Return the facts of an answer, cut short. Values of another type than expected are left out."""
    short = {name: _short(value) for name, value in facts.items()}
    seen = short.get("seen")
    return understood(Told, short | {"seen": seen[0] if isinstance(seen, tuple) and seen else None})[0]


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(each[:100] for each in value if isinstance(each, str))
    return value[:100] if isinstance(value, str) else value


def own_node(status: Status) -> ClusterNode:
    """Return this node, by its own status."""
    lease, network = known(status.lease) or LeaseStatus(()), known(status.network) or NetworkStatus()
    uplink, health, store = known(status.uplink), known(status.health), known(status.store)
    made = vxlan_of(status)
    vni = made.vni if made else None
    return ClusterNode(
        subnets=lease.subnets,
        public_ips=uplink.public_ips if uplink else (),
        macs=known(lease.macs) or (),
        backend=status.backend,
        also=(known(network.also) if network else None) or UNSET,
        vnis=() if vni is None else (vni,),
        expires=known(lease.expires),
        state="in the kernel",
        is_own=True,
        is_running=status.pid is not UNSET,  # only the daemon tells it
        told=Told(
            version=known(status.version),
            network=tuple(f"{each.network} /{each.subnet_len}" for each in network.ranges),
            backend=status.backend,
            vni=vni,
            port=made.port if made else None,
            mtu=known(status.mtu),
            uplink_mtu=uplink.mtu if uplink else None,
            store=store_kind(store.name) if store else None,
            ready=health.ready if health else True,
            conditions=tuple(sorted({each.part for each in status.conditions})),
        ),
    )


def _of_peer(peer: PeerStatus, own: set[IPAddress]) -> ClusterNode:
    target = target_of(peer, own)
    lease = {name: getattr(peer, name) for name in PeerStatus.__struct_fields__}
    lease |= {"macs": tuple(map(str.lower, peer.macs)), "reason": peer.reason or ", ".join(peer.conflicts)}
    return ClusterNode(
        **lease, target=target[0] if target else None, in_overlay=target is not None and target[1]
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
_MUTE = "does not answer queries"


def read(source: DataSource) -> Cluster:
    """Ask all nodes. Raises ``OSError`` if this process may not send ICMP."""
    query = partial(survey.queries, port=port_of(source), within=_WITHIN)
    return gather(source.status, query, echo, clock.wall())


def echo(targets: Iterable[IPAddress]) -> dict[IPAddress, Reply]:
    """Return the replies to ICMP echoes. Silent hosts are asked by TCP: filters may drop ICMP."""
    replies = survey.echoes(targets, _WITHIN)
    silent = [target for target, reply in replies.items() if reply == survey.SILENCE]
    return replies | dict.fromkeys(survey.reached(silent, _WITHIN), Reply(error=errno.ECONNREFUSED))


Node = TypeVar("Node", bound=PeerStatus)
#: Columns of what the lease says, by their titles.
_OF_THE_LEASE: Mapping[str, Callable[[PeerStatus], str]] = {
    "subnet": lambda each: each.name,
    "node": lambda each: each.name,
    "public ip": lambda each: ",".join(each.public_ips),
    "backend": lambda each: each.backend or "",
    "also": lambda each: each.also or "",
    "mac": lambda each: ",".join(each.macs),
    "lease ends": lambda each: when(each.expires) if each.expires else "",
}


def _lease(*titles: str) -> dict[str, Callable[[PeerStatus], str]]:
    return {title: _OF_THE_LEASE[title] for title in titles}


def _table(columns: Mapping[str, Callable[[Node], str]], shown: Iterable[Node]) -> TextTable:
    """Return a line for each node; unknown values are dashes, but for the last column, a remark."""
    *shows, remark = columns.values()
    rows = [(*(show(each) or "-" for show in shows), remark(each)) for each in shown]
    return TextTable(tuple(columns), rows)


def is_lost(peer: PeerStatus) -> bool:
    """Return True if a peer is not in the kernel as desired, or the last message to it found no answer."""
    probe, sessions = known(peer.probe), known(peer.sessions) or ()
    is_silent = any(each.state == "silent" for each in sessions) or (probe is not None and probe.rtt is None)
    return is_silent or peer.state not in ("in the kernel", "pending")


def peers_table(source: DataSource, *, is_wide: bool = False) -> TextTable:
    """Return one line for each other node, as the daemon has it: nothing is sent."""
    told, now = source.status.each_peer, known(source.status.time)

    def of_sessions(show: Callable[[SessionStatus], str]) -> Callable[[PeerStatus], str]:
        """Show the sessions of a peer: one, or one for each family."""
        return lambda peer: ", ".join(dict.fromkeys(map(show, known(peer.sessions) or ())))

    columns: dict[str, Callable[[PeerStatus], str]] = {
        **_lease("subnet", "public ip", "backend"),
        "state": lambda peer: peer.state,
    }
    if any(peer.probe is not UNSET for peer in told):
        columns["probe"] = lambda peer: _probe(known(peer.probe))
    if any(peer.sessions is not UNSET for peer in told):
        columns["handshake"] = of_sessions(lambda each: handshake(each, now))
        columns["received"] = of_sessions(lambda each: _bytes(each.rx_bytes))
        columns["sent"] = of_sessions(lambda each: _bytes(each.tx_bytes))
        columns["endpoint"] = of_sessions(lambda each: each.endpoint)
    columns |= _lease("also", "mac", "lease ends") if is_wide else {}
    columns["reason"] = lambda peer: (
        peer.reason or (f"with {', '.join(peer.conflicts)}" if peer.conflicts else "")
    )
    return _table(columns, told)


def _probe(last: ProbeStatus | None) -> str:
    if last is None:
        return "-"
    return "no answer" if last.rtt is None else f"{1000 * last.rtt:.2f} ms"


def handshake(session: SessionStatus, now: float | None) -> str:
    """Show how long ago keys were last agreed on; a clock set back makes that the future.

    ``now`` is the daemon's time, None if it does not tell that.
    """
    stamp = session.handshake
    if session.state == "silent":
        return "no answer"
    if stamp is None:
        return "none yet"
    if now is None:
        return when(stamp)
    return f"{now - stamp:.0f} s ago" if stamp <= now else "in the future"


def _bytes(number: int) -> str:
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def table(cluster: Cluster, found: list[Remark], *, is_wide: bool = False) -> TextTable:
    """Return one line for each node, as it answers: this one, then the others, worst first."""
    by_node = _by_node(found)

    def told(name: str) -> Callable[[ClusterNode], str]:
        return lambda node: _text(getattr(node.told, name, None))

    def note(node: ClusterNode) -> str:
        mute = [_MUTE] if node.answers == "kernel" else []  # that explains missing columns
        return "; ".join([*(each.text for each in by_node[node.name]), *mute])

    columns: dict[str, Callable[[ClusterNode], str]] = {
        **_lease("node", "public ip"),
        "state": lambda node: state(by_node[node.name]),
        "rtt": lambda node: (
            "this node" if node.is_own else "" if node.rtt is None else f"{1000 * node.rtt:.1f} ms"
        ),
        **_lease("backend"),
        "vni": lambda node: _text(node.vni),
        **{name: told(name) for name in ("port", "mtu", "version", "store")},
    }
    if is_wide:
        columns |= {"uplink mtu": told("uplink_mtu"), **_lease("also", "mac", "lease ends")}
        columns["conditions"] = lambda node: ", ".join(node.told.conditions) if node.told else ""
    columns["note"] = note
    order = sorted(
        cluster.nodes, key=lambda each: (not each.is_own, [*State].index(state(by_node[each.name])))
    )
    return _table(columns, order)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def state(found: list[Remark]) -> State:
    """Return the state of a node with these remarks."""
    if any(each.rule.severity is Severity.PROBLEM for each in found):
        return State.PROBLEM
    return State.HINT if found else State.OK


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
        "also": node.also or None,
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


def examine(source: DataSource, stored: Config | UnsetType | None = UNSET) -> tuple[Cluster, list[Remark]]:
    """Ask all nodes and return them with the rules that they break. The store is asked unless it was."""
    from flanneld.ctl.checks.cluster import remarks

    config = stored_config(source) if isinstance(stored, UnsetType) else stored
    cluster = replace(read(source), stored=None if isinstance(config, Unknown) else config)
    return cluster, remarks(cluster)
