"""Output of each command, from a document and the kernel's objects."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flanneld.compat.glog import counted
from flanneld.ctl.compare import Comparison
from flanneld.ctl.output import TextTable
from flanneld.ctl.source import DataSource, last_words

_UNKNOWN = "unknown"


def status(source: DataSource) -> list[TextTable]:
    """Return a summary of the node."""
    document = source.document

    def row(title: str, name: str, show: Callable[[Any], str], *, if_null: str = _UNKNOWN) -> tuple[str, str]:
        """Return a row for one part of the document: ``if_null`` if it is null, unknown if it is absent."""
        value = document.get(name)
        if value is None:
            return title, if_null if name in document else _UNKNOWN
        return title, show(value)

    return [
        TextTable(
            (),
            [
                ("daemon", _daemon(document) if source.origin == "daemon" else _silent_daemon(document)),
                row("ready", "health", _ready),
                row("conditions", "health", _conditions),
                row("store", "store", _store),
                row("backend", "network", _backend),
                row("network", "network", _networks),
                ("lease", _lease(document)),
                row("uplink", "uplink", _uplink),
                row("MTU", "mtu", str),
                row("devices", "devices", lambda devices: ", ".join(devices) or "none"),
                row("peers", "peers", _peers),
                row("last sync", "last_sync", _when, if_null="never"),
                row("repairs", "repairs", _repairs),
                row("refused", "refused", _refused),
                row("removal guard", "removal_guard", _removal_guard),
                row("firewall", "firewall", _firewall),
            ],
        ),
        *notes(source),
    ]


def notes(source: DataSource, more: Sequence[str] = ()) -> list[TextTable]:
    """Return the missing sources of answers, and ``more`` that is not known, as a table."""
    missing = [*source.unknown, *more]
    return [TextTable((), [(f"not known: {why}",) for why in missing])] if missing else []


def peers(source: DataSource) -> list[TextTable]:
    known = source.document.get("peers", ())
    probed = any("probe" in peer for peer in known)
    encrypted = any("sessions" in peer for peer in known)
    now = source.document.get("time", 0.0)
    rows = [
        (
            ",".join(peer["subnets"]),
            ",".join(peer["public_ips"]) or "-",
            peer["backend"] or "-",
            peer["state"],
            *([_probe(peer["probe"])] if probed else []),
            *(_sessions(peer.get("sessions", ()), now) if encrypted else ()),
            peer["reason"] or (f"with {', '.join(peer['conflicts'])}" if peer["conflicts"] else ""),
        )
        for peer in known
    ]
    columns = (
        *("subnet", "public ip", "backend", "state"),
        *(["probe"] if probed else []),
        *(["handshake", "received", "sent", "endpoint"] if encrypted else []),
        "reason",
    )
    return [TextTable(columns, rows), *notes(source)]


def _probe(last: Mapping[str, Any] | None) -> str:
    if not last:
        return "-"
    return "no answer" if last["rtt"] is None else f"{1000 * last['rtt']:.2f} ms"


def _sessions(sessions: Sequence[Mapping[str, Any]], now: float) -> tuple[str, str, str, str]:
    """Show the sessions of a peer: one, or one for each family."""

    def shown(show: Callable[[Mapping[str, Any]], str]) -> str:
        return ", ".join(dict.fromkeys(map(show, sessions))) or "-"

    return (
        shown(lambda each: handshake(each, now)),
        shown(lambda each: _bytes(each["rx_bytes"])),
        shown(lambda each: _bytes(each["tx_bytes"])),
        shown(lambda each: each["endpoint"] or "-"),
    )


def handshake(session: Mapping[str, Any], now: float) -> str:
    """Show how long ago keys were last agreed on; a clock set back makes that the future."""
    stamp = session["handshake"]
    if session["state"] == "silent":
        return "no answer"
    if stamp is None:
        return "none yet"
    return f"{now - stamp:.0f} s ago" if stamp <= now else "in the future"


def _bytes(number: int) -> str:
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def routes(source: DataSource, entries: Sequence[Comparison]) -> list[TextTable]:
    rows = [(entry.state, entry.kind, str(entry), entry.owner) for entry in entries]
    return [TextTable(("state", "kind", "object", "for"), rows), *notes(source)]


def events(source: DataSource) -> list[TextTable]:
    rows = [
        (_when(event["time"]), event["severity"], event["source"], event["text"])
        for event in source.document.get("events", ())
    ]
    return [TextTable(("time", "", "from", "event"), rows), *notes(source)]


def _daemon(document: Mapping[str, Any]) -> str:
    return f"flanneld {document['version']}, pid {document['pid']}, since {_when(document['started'])}"


def _silent_daemon(document: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, ("does not answer", last_words(document))))


def _ready(health: Mapping[str, Any]) -> str:
    wrong = [*health["missing"], *health.get("waiting", ()), *health["late"]]
    return "yes" if not wrong else f"no: {'; '.join(wrong)}"


def _conditions(health: Mapping[str, Any]) -> str:
    found = health.get("conditions")
    if found is None:
        return _UNKNOWN
    return "; ".join(f"{each['part']}: {each['problem']}" for each in found) or "none"


def _store(store: Mapping[str, Any]) -> str:
    problem = f"; {store['problem']}" if store.get("problem") else ""
    cache = f"; leases are taken from {store['cache']}" if store.get("cache") else ""
    return f"{store['name']}{problem}{cache}"


def _networks(network: Mapping[str, Any]) -> str:
    return ", ".join(each["network"] for each in network.get("ranges") or ()) or _UNKNOWN


def _backend(network: Mapping[str, Any]) -> str:
    also = f", also {network['also']}" if network.get("also") else ""
    return f"{network.get('backend') or _UNKNOWN}{also}"


def _lease(document: Mapping[str, Any]) -> str:
    lease = document.get("lease")
    if not lease:
        return "none" if "store" in document else _UNKNOWN
    if "expires" not in lease:
        return f"{','.join(lease['subnets'])} by the subnet file"
    until = f"until {_when(lease['expires'])}" if lease["expires"] else "reserved"
    return f"{','.join(lease['subnets'])}, {until}"


def _uplink(uplink: Mapping[str, Any]) -> str:
    return f"{uplink['name']}, MTU {uplink['mtu']}, {', '.join(uplink['addresses'])}"


def _peers(known: Sequence[Mapping[str, Any]]) -> str:
    states = Counter(peer["state"] for peer in known)
    return ", ".join(
        [str(states.total()), *(f"{number} {state}" for state, number in sorted(states.items()))]
    )


def _repairs(made: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{each['number']} {each['kind']} after {each['cause']}" for each in made) or "none"


def _refused(objects: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{each['object']}: {each['reason']}" for each in objects) or "none"


def _removal_guard(guard: Mapping[str, Any]) -> str:
    often = f", {counted(guard['number'], 'time')} so far" if guard.get("number") else ""
    return f"{'holds removals back' if guard['holds'] else 'off'}{often}"


def _firewall(firewall: Mapping[str, Any]) -> str:
    repairs = sum(each["number"] for each in firewall["repairs"])
    wrong = ", ".join(firewall["not_in_place"])
    state = f"not in place: {wrong}" if wrong else "in place"
    return f"{firewall['place']}, {state}, {counted(repairs, 'repair')}"


def _when(stamp: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp)) if stamp else "never"
