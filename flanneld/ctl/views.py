"""Output of each command, from the status and the kernel's objects."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import UNSET, UnsetType

from flanneld.compat.glog import counted
from flanneld.ctl.compare import Comparison
from flanneld.ctl.output import TextTable
from flanneld.ctl.source import DataSource, last_words
from flanneld.diagnostics.status import (
    FirewallStatus,
    GuardStatus,
    HealthStatus,
    NetworkStatus,
    PeerStatus,
    ProbeStatus,
    RefusalStatus,
    RepairStatus,
    SessionStatus,
    Status,
    StoreStatus,
    UplinkStatus,
    known,
)

Value = TypeVar("Value")
_UNKNOWN = "unknown"


def status(source: DataSource) -> TextTable:
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
        row("MTU", told.mtu, str),
        row("devices", told.devices, lambda devices: ", ".join(devices) or "none"),
        row("peers", told.peers, _peers),
        row("last sync", told.last_sync, _when, if_null="never"),
        row("repairs", told.repairs, _repairs),
        row("refused", told.refused, _refused),
        row("removal guard", told.removal_guard, _removal_guard),
        row("firewall", told.firewall, _firewall),
    ]
    return TextTable((), rows)


def peers(source: DataSource, *, is_wide: bool = False) -> TextTable:
    told = known(source.status.peers) or ()
    probed = any(peer.probe is not UNSET for peer in told)
    encrypted = any(peer.sessions is not UNSET for peer in told)
    now = known(source.status.time) or 0.0
    rows = [
        (
            peer.name,
            ",".join(peer.public_ips) or "-",
            peer.backend or "-",
            peer.state,
            *([_probe(known(peer.probe))] if probed else []),
            *(_sessions(known(peer.sessions) or (), now) if encrypted else ()),
            *((",".join(peer.macs) or "-", _when(peer.expires) if peer.expires else "-") if is_wide else ()),
            peer.reason or (f"with {', '.join(peer.conflicts)}" if peer.conflicts else ""),
        )
        for peer in told
    ]
    columns = (
        *("subnet", "public ip", "backend", "state"),
        *(["probe"] if probed else []),
        *(["handshake", "received", "sent", "endpoint"] if encrypted else []),
        *(["mac", "lease ends"] if is_wide else []),
        "reason",
    )
    return TextTable(columns, rows)


def _probe(last: ProbeStatus | None) -> str:
    if last is None:
        return "-"
    return "no answer" if last.rtt is None else f"{1000 * last.rtt:.2f} ms"


def _sessions(sessions: Sequence[SessionStatus], now: float) -> tuple[str, str, str, str]:
    """Show the sessions of a peer: one, or one for each family."""

    def shown(show: Callable[[SessionStatus], str]) -> str:
        return ", ".join(dict.fromkeys(map(show, sessions))) or "-"

    return (
        shown(lambda each: handshake(each, now)),
        shown(lambda each: _bytes(each.rx_bytes)),
        shown(lambda each: _bytes(each.tx_bytes)),
        shown(lambda each: each.endpoint or "-"),
    )


def handshake(session: SessionStatus, now: float) -> str:
    """Show how long ago keys were last agreed on; a clock set back makes that the future."""
    stamp = session.handshake
    if session.state == "silent":
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


def routes(entries: Sequence[Comparison]) -> TextTable:
    rows = [(entry.state, entry.kind, str(entry), entry.owner) for entry in entries]
    return TextTable(("state", "kind", "object", "for"), rows)


def events(source: DataSource) -> TextTable:
    rows = [
        (_when(event.time), event.severity, event.source, event.text)
        for event in known(source.status.events) or ()
    ]
    return TextTable(("time", "", "from", "event"), rows)


def _daemon(told: Status) -> str:
    version = known(told.version) or "of an unknown version"
    return f"flanneld {version}, pid {known(told.pid) or _UNKNOWN}, since {_when(known(told.started))}"


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
    return f"{subnets}, until {_when(lease.expires)}" if lease.expires else f"{subnets}, reserved"


def _uplink(uplink: UplinkStatus) -> str:
    return f"{uplink.name}, MTU {uplink.mtu}, {', '.join(uplink.addresses)}"


def _peers(told: Sequence[PeerStatus]) -> str:
    states = Counter(peer.state for peer in told)
    return ", ".join(
        [str(states.total()), *(f"{number} {state}" for state, number in sorted(states.items()))]
    )


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


def _when(stamp: float | None) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp)) if stamp else "never"
    except (OverflowError, ValueError):
        return f"{stamp} s after 1970"
