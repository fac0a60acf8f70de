"""What each command shows, out of a document and what the kernel holds (pure)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flanneld.compat.glog import counted
from flanneld.ctl.data_source import Source
from flanneld.ctl.snapshot import Entry
from flanneld.ctl.tables import Table

_UNKNOWN = "unknown"


def status(source: Source) -> list[Table]:
    """The node in a few lines."""
    document = source.document
    rows = [
        ("daemon", _daemon(document) if source.origin == "daemon" else "does not answer"),
        ("ready", _ready(document)),
        ("trouble", _trouble(document)),
        ("store", _store(document)),
        ("backend", str((document.get("network") or {}).get("backend") or _UNKNOWN)),
        ("network", ", ".join(each["network"] for each in _ranges(document)) or _UNKNOWN),
        ("lease", _lease(document)),
        ("uplink", _uplink(document)),
        ("MTU", str(document.get("mtu", _UNKNOWN))),
        ("devices", ", ".join(document["devices"]) or "none" if "devices" in document else _UNKNOWN),
        ("peers", _peers(document)),
        ("last sync", _last_sync(document)),
        ("repairs", _repairs(document)),
        ("refused", _refused(document)),
        ("brake", _removal_guard(document)),
        ("firewall", _firewall(document)),
    ]
    return [Table((), rows), *notes(source)]


def notes(source: Source) -> list[Table]:
    """What could not be had."""
    return [Table((), [(f"not known: {why}",) for why in source.unknown])] if source.unknown else []


def peers(source: Source) -> list[Table]:
    known = source.document.get("peers", ())
    probed = any("probe" in peer for peer in known)
    rows = [
        (
            ",".join(peer["subnets"]),
            ",".join(peer["public_ips"]) or "-",
            peer["backend"] or "-",
            peer["state"],
            *([_probe(peer["probe"])] if probed else []),
            peer["reason"] or (f"with {', '.join(peer['conflicts'])}" if peer["conflicts"] else ""),
        )
        for peer in known
    ]
    columns = ("subnet", "public ip", "backend", "state", *(["probe"] if probed else []), "reason")
    return [Table(columns, rows), *notes(source)]


def _probe(last: Mapping[str, Any] | None) -> str:
    if not last:
        return "-"
    return "no answer" if last["rtt"] is None else f"{1000 * last['rtt']:.2f} ms"


def routes(source: Source, entries: Sequence[Entry]) -> list[Table]:
    rows = [(entry.state, entry.kind, str(entry), entry.owner) for entry in entries]
    return [Table(("state", "kind", "object", "for"), rows), *notes(source)]


def events(source: Source) -> list[Table]:
    rows = [
        (_when(event["time"]), event["severity"], event["source"], event["text"])
        for event in source.document.get("events", ())
    ]
    return [Table(("time", "", "from", "event"), rows), *notes(source)]


def _daemon(document: Mapping[str, Any]) -> str:
    return f"flanneld {document['version']}, pid {document['pid']}, since {_when(document['started'])}"


def _ready(document: Mapping[str, Any]) -> str:
    health = document.get("health")
    if not health:
        return _UNKNOWN
    wrong = [*health["missing"], *health.get("waiting", ()), *health["late"]]
    return "yes" if not wrong else f"no: {'; '.join(wrong)}"


def _trouble(document: Mapping[str, Any]) -> str:
    found = (document.get("health") or {}).get("troubles")
    if found is None:
        return _UNKNOWN
    return "; ".join(f"{each['part']}: {each['trouble']}" for each in found) or "none"


def _store(document: Mapping[str, Any]) -> str:
    store = document.get("store")
    if not store:
        return _UNKNOWN
    problem = f"; {store['problem']}" if store.get("problem") else ""
    cache = f"; leases are taken from {store['cache']}" if store.get("cache") else ""
    return f"{store['name']}{problem}{cache}"


def _ranges(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (document.get("network") or {}).get("ranges") or ()


def _lease(document: Mapping[str, Any]) -> str:
    lease = document.get("lease")
    if not lease:
        return "none" if "store" in document else _UNKNOWN
    if "expires" not in lease:
        return f"{','.join(lease['subnets'])} by the subnet file"
    until = f"until {_when(lease['expires'])}" if lease["expires"] else "reserved"
    return f"{','.join(lease['subnets'])}, {until}"


def _uplink(document: Mapping[str, Any]) -> str:
    uplink = document.get("uplink")
    if not uplink:
        return _UNKNOWN
    return f"{uplink['name']}, MTU {uplink['mtu']}, {', '.join(uplink['addresses'])}"


def _peers(document: Mapping[str, Any]) -> str:
    if "peers" not in document:
        return _UNKNOWN
    states = Counter(peer["state"] for peer in document["peers"])
    return ", ".join(
        [str(states.total()), *(f"{number} {state}" for state, number in sorted(states.items()))]
    )


def _repairs(document: Mapping[str, Any]) -> str:
    if "repairs" not in document:
        return _UNKNOWN
    found = (f"{each['number']} {each['kind']} after {each['cause']}" for each in document["repairs"])
    return ", ".join(found) or "none"


def _refused(document: Mapping[str, Any]) -> str:
    if "refused" not in document:
        return _UNKNOWN
    return "; ".join(f"{each['object']}: {each['reason']}" for each in document["refused"]) or "none"


def _removal_guard(document: Mapping[str, Any]) -> str:
    removal_guard = document.get("brake")
    if removal_guard is None:
        return _UNKNOWN
    often = f", {counted(removal_guard['number'], 'time')} so far" if removal_guard.get("number") else ""
    return f"{'holds removals back' if removal_guard['holds'] else 'off'}{often}"


def _firewall(document: Mapping[str, Any]) -> str:
    firewall = document.get("firewall")
    if not firewall:
        return _UNKNOWN
    repairs = sum(each["number"] for each in firewall["repairs"])
    wrong = ", ".join(firewall["not_in_place"])
    state = f"not in place: {wrong}" if wrong else "in place"
    return f"{firewall['place']}, {state}, {counted(repairs, 'repair')}"


def _last_sync(document: Mapping[str, Any]) -> str:
    return _when(document["last_sync"]) if "last_sync" in document else _UNKNOWN


def _when(stamp: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp)) if stamp else "never"
