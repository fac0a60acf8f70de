"""Health conditions of a running daemon, evaluated on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flanneld.findings import Condition
from flanneld.model import LEASE_ENDS_SOON, Lease
from flanneld.node import Node
from flanneld.runtime import clock, waits
from flanneld.state.permits import RemovalGuard
from flanneld.state.resources import Key
from flanneld.state.table import Failure, silence

#: Seconds between two checks of ``watch``, and for which a condition must last to be reported.
LOOK, LASTING = 1.0, 5.0
#: Parts reported at once, because READY must not appear without them.
_AT_ONCE = frozenset({"leases"})


def parts(node: Node) -> list[Condition]:
    """Return all parts. May be called from any thread; costs next to nothing."""
    return [Condition(name, "; ".join(filter(None, found))) for name, found in _looks(node)]


def unhealthy_parts(node: Node) -> list[Condition]:
    """Return the parts with a condition."""
    return [part for part in parts(node) if part.problem]


def watch(node: Node, stop: threading.Event, tell: Callable[[list[str]], None]) -> None:
    """Report the conditions on each change until ``stop``; an empty list when all are over.

    Conditions that end soon are not reported.
    """
    told: list[str] = []
    since: dict[str, float] = {}
    while not waits.pause(stop, LOOK):
        now, found = clock.now(), unhealthy_parts(node)
        since = {each.part: since.get(each.part, now) for each in found}
        lasting = [str(each) for each in found if each.part in _AT_ONCE or now - since[each.part] >= LASTING]
        if lasting != told:
            told = lasting
            tell(told)


def _looks(node: Node) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield each part with its problems; an empty text is none."""
    # Without the seconds, which would change at each check.
    yield "threads", (line.partition(" for ")[0] for line in node.overdue())
    yield "store", [str(node.store_problem or "")]
    yield "leases", [f"taken from {node.cached}" if node.cached else ""]
    if node.lease_keeper:
        margin = 60.0 * node.options.subnet_lease_renew_margin
        yield "lease", [_of_the_lease(node.lease_keeper.lease, margin), node.lease_keeper.problem]
    if node.controller:
        tables, uplinks = node.controller.tables, node.controller.uplink_manager
        yield "uplink", [f"{uplinks.uplink.name} is not usable" if uplinks.is_adrift else ""]
        yield "kernel", _of_the_kernel(tables.pending(), contested=tables.is_contested())
        yield "encryption", [node.controller.encryption.problem]
        yield "sessions", [silence(tables.sessions())]
        if tables.mesh is not None:
            yield "mesh", [tables.mesh.problem]
        yield (
            "peers",
            [_first("a lease would harm this host and is not followed", node.controller.peers.unsafe())],
        )
        yield "removals", [_of_the_removal_guard(node.controller.removal_guard)]
    if node.firewall:
        yield "firewall", [*(state.trouble for state in node.firewall.states()), node.firewall.problem]
    for state in node.host.states() if node.host else ():
        yield state.name.replace("-", " "), [state.trouble]


def _of_the_lease(lease: Lease, margin: float) -> str:
    is_late = lease.expires is not None and lease.expires - clock.now() < min(LEASE_ENDS_SOON, margin / 2)
    return "it was not renewed in time, and ends soon" if is_late else ""


def _of_the_kernel(pending: Mapping[Key, Failure], *, contested: bool) -> Iterator[str]:
    yield _first("refused", list(pending.values()))
    if contested:
        yield "another program keeps changing our objects; see flannelctl logs"


def _of_the_removal_guard(removal_guard: RemovalGuard) -> str:
    return f"held back: {removal_guard.reason}" if removal_guard.holds else ""


def _first(problem: str, found: Sequence[object]) -> str:
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{problem}: {found[0]}{more}" if found else ""
