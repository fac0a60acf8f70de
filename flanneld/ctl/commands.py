"""The commands of ``flannelctl`` that ask a source: their answers as tables for people and as JSON."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from flanneld import __version__
from flanneld.compat.glog import counted
from flanneld.ctl import output, store_commands
from flanneld.ctl.output import State, TextTable, when
from flanneld.ctl.source import DataSource, history, last_words
from flanneld.diagnostics.status import (
    FirewallStatus,
    GuardStatus,
    HealthStatus,
    NetworkStatus,
    PeerStatus,
    RefusalStatus,
    RepairStatus,
    Status,
    StoreStatus,
    UplinkStatus,
    known,
)
from flanneld.errors import FlannelError
from flanneld.runtime import clock

if TYPE_CHECKING:
    from flanneld.ctl.compare import Comparison

#: Tables for people, a function that returns the value for JSON, and True if something is wrong.
CommandAnswer = tuple[list[TextTable], Callable[[], Any], bool]
#: Seconds within which the fixes of the doctor take effect.
_HEALED_WITHIN = 15.0
Value = TypeVar("Value")
_UNKNOWN = "unknown"


def _status(source: DataSource, _arguments: argparse.Namespace) -> CommandAnswer:
    health = known(source.status.health)
    wrong = health is not None and bool(health.missing or health.late or source.status.conditions)
    return _noted(
        source,
        [status_table(source)],
        # Peers and events have commands of their own.
        lambda: {"origin": source.origin, **source.document(but=("peers", "events"))},
        wrong=wrong,
    )


def _peers(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl import nodes

    wrong = any(map(nodes.is_lost, source.status.each_peer))
    return _noted(
        source,
        [nodes.peers_table(source, is_wide=_is_wide(arguments))],
        lambda: {"peers": source.document().get("peers", [])},
        wrong=wrong,
    )


def _routes(source: DataSource, _arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl import compare

    found = compare.read(source.status)
    entries = [
        *compare.compare(source.status, compare.desired_objects(source.status), found),
        *compare.outside(source.status),
    ]
    wrong = any(entry.state in ("missing", "different", "not wanted") for entry in entries)
    objects = [compare.described(entry) for entry in entries]
    return _noted(source, [routes_table(entries)], lambda: {"objects": objects}, wrong=wrong)


def _logs(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    """Return the log's last lines, or those about a peer; with ``--follow`` those that were not shown yet."""
    told, raw = known(source.status.events), source.document().get("events", [])
    lines = list(zip(told, raw, strict=True)) if told else []
    follows = getattr(arguments, "follow", False)
    if follows:  # out of the daemon's file: the whole status is long
        told = history(Path(known(source.status.subnet_file) or source.options.subnet_file))
        former, arguments.shown = getattr(arguments, "shown", ()), frozenset(told)
        lines = [(each, asdict(each)) for each in told if each not in former]
    if name := getattr(arguments, "peer", None):
        is_about = naming(source.status, name)
        lines = [each for each in lines if is_about(each[0].text)]
    rows = [(when(each.time), each.severity, each.source, each.text) for each, _ in lines]
    # Another version's lines are shown as they came.
    plain = {"events": [said for _, said in lines] if told or follows else raw}
    if follows:
        return [TextTable((), rows)], lambda: plain, False
    return _noted(source, [TextTable(("time", "", "from", "event"), rows)], lambda: plain, wrong=False)


def naming(status: Status, name: str) -> Callable[[str], bool]:
    """Return a function that tells whether a text names a peer, by any of its names, or holds ``name``.

    A node that has left has no other name.
    """
    from flanneld.ctl.paths import peer_named

    names = {name}
    with suppress(FlannelError):
        peer = peer_named(name, status)
        names = {name, *peer.subnets, *peer.public_ips, *peer.macs, known(peer.node) or name}
    # 10.5.1.2 is neither in 10.5.1.20 nor in 10.5.1.2.9, but in 10.5.1.2:8472; fd00::1 is not in fd00::1:2.
    either = "|".join(re.escape(each) + (r"(?!:\w)" if ":" in each else "") for each in names)
    return lambda text: bool(re.search(rf"(?<![\w.:])(?:{either})(?!\w|\.\w)", text, re.IGNORECASE))


def _trace(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl.trace import examine

    hops = examine(arguments.address, source.status, arguments.from_container)
    rows = [(hop.hop, hop.state, hop.found, hop.note) for hop in hops]
    table = TextTable(("hop", "state", "found", "note"), rows)
    plain = {"hops": [asdict(hop) for hop in hops]}
    return _noted(source, [table], lambda: plain, wrong=any(hop.state == State.PROBLEM for hop in hops))


def _doctor(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl.doctor import DoctorReport, fixes, run_fixes

    is_cluster, is_json = getattr(arguments, "cluster", False), arguments.output == "json"
    first = DoctorReport.of(source, is_cluster=is_cluster)
    chosen = fixes(first.findings) if getattr(arguments, "fix", False) else []
    if not chosen:
        return first.tables(), first.plain, bool(first.problems)
    if not is_json:
        output.show(first.tables())
    arguments.fix = False  # what one run does not heal, a repetition by --watch does not heal either
    number = counted(sum(map(len, chosen)), "command")
    try:
        store_commands.ask(f"Run {number}, those after fix of each PROBLEM?", arguments)
    except FlannelError as refusal:
        sys.stderr.write(f"flannelctl: {refusal}\n")
        return [], first.plain, True
    ran = run_fixes(chosen)
    # The daemon may still be repairing, or starting.
    again = output.until_good(
        lambda: DoctorReport.of(arguments.find(), is_cluster=is_cluster),
        lambda report: not report.problems,
        _HEALED_WITHIN,
    )
    rows = [("failed" if why else "ran", shlex.join(each), why) for each, why in ran]
    told = [{"command": each, "failure": why} for each, why in ran]
    is_wrong = bool(again.problems) or any(why for _, why in ran)
    return [TextTable((), rows), *again.tables()], lambda: {"ran": told, **again.plain()}, is_wrong


def _nodes(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl import nodes

    cluster, found = nodes.examine(source)
    plain = nodes.plain(cluster, found)
    wrong = any(each["state"] == State.PROBLEM for each in plain)
    unanswered = nodes.unanswered(cluster, source)
    return _noted(
        source,
        [nodes.table(cluster, found, is_wide=_is_wide(arguments))],
        lambda: {"nodes": plain},
        unanswered,
        wrong=wrong,
    )


def _graph(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl import graph, nodes

    cluster, found = nodes.examine(source)
    listed = nodes.table(cluster, found)
    columns, rows = tuple(listed.columns), [tuple(row) for row in listed.rows]
    made = graph.vertices(columns, rows)
    not_known = list(map(str, source.unknown))
    plain = {"nodes": nodes.plain(cluster, found), "edges": graph.edges(made), "not_known": not_known}
    if arguments.format == "html":
        lines = graph.page(made, columns[4:-1], clock.utc_text(cluster.now))
    else:
        lines = {"text": graph.text, "dot": graph.dot}[arguments.format](made)
    shown = output.in_lines(part for line in lines for part in line.split("\n"))
    return [shown], lambda: plain, any(each.state == State.PROBLEM for each in made)


def _netcheck(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl.netcheck import Wanted, examine

    wanted = Wanted(arguments.peer, arguments.container, arguments.count, arguments.size)
    with output.progress(sys.stderr) as tell:
        answer = examine(source, wanted, tell)
    return _noted(source, answer.tables(), answer.plain, answer.unanswered, wrong=answer.is_wrong)


def _bundle(source: DataSource, arguments: argparse.Namespace) -> CommandAnswer:
    from flanneld.ctl import bundle

    path = Path(arguments.file or bundle.default_name())
    reads = ("status", "peers", "routes", "logs", "doctor")
    answers = {name: COMMANDS[name][0](source, arguments)[1]() for name in reads}
    bundle.write(path, bundle.gather(answers, source.options), bundle.known_secrets(source.options))
    shown = output.in_lines([f"Wrote {path}; look through it before you pass it on"])
    return [shown], lambda: {"file": str(path)}, False


def _version(source: DataSource, _arguments: argparse.Namespace) -> CommandAnswer:
    daemon = known(source.status.version)
    rows = [("flannelctl", __version__), ("flanneld", daemon or "no answer")]
    plain = {"flannelctl": __version__, "flanneld": daemon}
    return _noted(source, [TextTable((), rows)], lambda: plain, wrong=False)


def _is_wide(arguments: argparse.Namespace) -> bool:
    return bool(arguments.output == "wide")


def _noted(
    source: DataSource,
    shown: list[TextTable],
    plain: Callable[[], dict[str, Any]],
    more: Sequence[str] = (),
    *,
    wrong: bool,
) -> CommandAnswer:
    """Return an answer that ends with the missing sources of answers, and ``more`` that is not known."""
    missing = [*map(str, source.unknown), *more]
    notes = [output.in_lines(f"not known: {why}" for why in missing)] if missing else []
    return [*shown, *notes], lambda: plain() | {"not_known": missing}, wrong


#: Each command with its meaning.
COMMANDS: dict[str, tuple[Callable[[DataSource, argparse.Namespace], CommandAnswer], str]] = {
    "status": (_status, "summary of the daemon and this node"),
    "peers": (_peers, "the other nodes, with the state of each"),
    "routes": (_routes, "devices, routes and entries: desired and actual"),
    "logs": (_logs, "last lines of the daemon's log, or those about a peer"),
    "trace": (_trace, "path of a packet to an address, hop by hop"),
    "bundle": (_bundle, "archive of diagnostics without secrets, for a remote expert"),
    "nodes": (_nodes, "all nodes of the cluster, one a line; sends queries"),
    "graph": (_graph, "this node and its paths to all others, as text, for Graphviz, or as a page"),
    "netcheck": (_netcheck, "the paths to peers: where packets stop, and what spoils them; sends probes"),
    "version": (_version, "versions of flannelctl and of the daemon"),
    "doctor": (_doctor, "problems of this node, and the commands that solve them"),
}
#: Former names of commands, which are accepted, too.
ALIASES = {"mtu": "netcheck", "ping": "netcheck", "events": "logs"}


# ---- the tables ---------------------------------------------------------------------------------


def status_table(source: DataSource) -> TextTable:
    """Return a summary of the node."""
    told = source.status

    def row(
        title: str, value: Value | UnsetType | None, show: Callable[[Value], str], *, if_null: str = _UNKNOWN
    ) -> tuple[str, str]:
        """Return a row for one part of the status: ``if_null`` if it is null, unknown if it is absent."""
        if value is None or isinstance(value, UnsetType):
            return title, _UNKNOWN if value is UNSET else if_null
        return title, show(value)

    rows = [
        ("daemon", _daemon(told) if source.origin == "daemon" else _silent_daemon(told)),
        row("ready", told.health, _ready),
        row("conditions", told.health, _conditions),
        row("store", told.store, _store),
        row("backend", told.network, _backend),
        row("network", told.network, _networks),
        ("lease", _lease(told)),
        row("uplink", told.uplink, _uplink),
        row("MTU", told.mtu, partial(_mtu, lowered_from=known(told.mtu_lowered_from))),
        row("devices", told.devices, lambda devices: ", ".join(devices) or "none"),
        row("peers", told.peers, _states),
        row("last sync", told.last_sync, when, if_null="never"),
        row("repairs", told.repairs, _repairs),
        row("refused", told.refused, _refused),
        row("removal guard", told.removal_guard, _removal_guard),
        row("firewall", told.firewall, _firewall),
    ]
    return TextTable((), rows)


def routes_table(entries: Sequence[Comparison]) -> TextTable:
    rows = [(entry.state, entry.kind, str(entry), entry.owner) for entry in entries]
    return TextTable(("state", "kind", "object", "for"), rows)


def _daemon(told: Status) -> str:
    version = known(told.version) or "of an unknown version"
    return f"flanneld {version}, pid {known(told.pid) or _UNKNOWN}, since {when(known(told.started))}"


def _silent_daemon(told: Status) -> str:
    return "; ".join(filter(None, ("does not answer", last_words(told))))


def _ready(health: HealthStatus) -> str:
    wrong = [*health.missing, *health.waiting, *health.late]
    return "yes" if not wrong else f"no: {'; '.join(wrong)}"


def _conditions(health: HealthStatus) -> str:
    if isinstance(health.conditions, UnsetType):
        return _UNKNOWN
    return "; ".join(f"{each.part}: {each.problem}" for each in health.conditions) or "none"


def _store(store: StoreStatus) -> str:
    problem = f"; {store.problem}" if known(store.problem) else ""
    cache = f"; leases are taken from {store.cache}" if store.cache else ""
    return f"{store.name}{problem}{cache}"


def _networks(network: NetworkStatus) -> str:
    return ", ".join(each.network for each in network.ranges) or _UNKNOWN


def _backend(network: NetworkStatus) -> str:
    also = f", also {network.also}" if known(network.also) else ""
    return f"{network.backend or _UNKNOWN}{also}"


def _lease(told: Status) -> str:
    lease = known(told.lease)
    if lease is None:
        return "none" if told.store is not UNSET else _UNKNOWN
    subnets = ",".join(lease.subnets)
    if isinstance(lease.expires, UnsetType):
        return f"{subnets} by the subnet file"
    return f"{subnets}, until {when(lease.expires)}" if lease.expires else f"{subnets}, reserved"


def _uplink(uplink: UplinkStatus) -> str:
    return f"{uplink.name}, MTU {uplink.mtu}, {', '.join(uplink.addresses)}"


def _states(told: Sequence[PeerStatus]) -> str:
    states = Counter(peer.state for peer in told)
    return ", ".join(
        [str(states.total()), *(f"{number} {state}" for state, number in sorted(states.items()))]
    )


def _mtu(mtu: int, lowered_from: int | None) -> str:
    return f"{mtu}, lowered from {lowered_from} by -follow-path-mtu" if lowered_from else str(mtu)


def _repairs(made: Sequence[RepairStatus]) -> str:
    return ", ".join(f"{each.number} {each.kind} after {each.cause}" for each in made) or "none"


def _refused(objects: Sequence[RefusalStatus]) -> str:
    return "; ".join(f"{each.object}: {each.reason}" for each in objects) or "none"


def _removal_guard(guard: GuardStatus) -> str:
    often = f", {counted(guard.number, 'time')} so far" if guard.number else ""
    return f"{'holds removals back' if guard.holds else 'off'}{often}"


def _firewall(firewall: FirewallStatus) -> str:
    repairs = sum(each.number for each in firewall.repairs)
    wrong = ", ".join(firewall.not_in_place)
    state = f"not in place: {wrong}" if wrong else "in place"
    return f"{firewall.place}, {state}, {counted(repairs, 'repair')}"
