"""Health conditions of a running daemon, evaluated on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from flanneld.findings import Condition
from flanneld.model import LEASE_ENDS_SOON, Lease
from flanneld.node import Node
from flanneld.reconcile.local_node import UplinkManager
from flanneld.reconcile.peers import Peers
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
    return [Condition(name, "; ".join(found)) for name, found in _looks(node)]


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
    # Without the seconds, which would change at each check.
    yield "threads", (line.partition(" for ")[0] for line in node.overdue())
    yield "store", _of_the_store(node)
    yield "leases", _of_the_leases(node)
    if node.lease_keeper:
        yield (
            "lease",
            _of_the_lease(node.lease_keeper.lease, 60.0 * node.options.subnet_lease_renew_margin),
        )
    if node.reconciler:
        yield "uplink", _of_the_uplink(node.reconciler.uplink_manager)
        tables = node.reconciler.tables
        yield "kernel", _of_the_kernel(tables.pending(), contested=tables.is_contested())
        yield "encryption", filter(None, (node.reconciler.encryption.problem,))
        yield "sessions", filter(None, (silence(node.reconciler.tables.sessions()),))
        if tables.mesh is not None:
            yield "mesh", filter(None, (tables.mesh.problem,))
        yield "peers", _of_the_peers(node.reconciler.peers)
        yield "removals", _of_the_removal_guard(node.reconciler.removal_guard)
    if node.firewall:
        troubles = (state.trouble for state in node.firewall.states())
        yield "firewall", filter(None, (*troubles, node.firewall.problem))
    for state in node.host.states() if node.host else ():
        yield state.name.replace("-", " "), filter(None, (state.trouble,))


def _of_the_store(node: Node) -> Iterator[str]:
    if node.store_problem:
        yield str(node.store_problem)


def _of_the_leases(node: Node) -> Iterator[str]:
    if node.cached:
        yield f"taken from {node.cached}"


def _of_the_lease(lease: Lease, margin: float) -> Iterator[str]:
    if lease.expires is not None and lease.expires - clock.now() < min(LEASE_ENDS_SOON, margin / 2):
        yield "it was not renewed in time, and ends soon"


def _of_the_uplink(uplink_manager: UplinkManager) -> Iterator[str]:
    if uplink_manager.is_adrift:
        yield f"{uplink_manager.uplink.name} is not usable"


def _of_the_kernel(pending: Mapping[Key, Failure], *, contested: bool) -> Iterator[str]:
    refused = list(pending.values())
    if refused:
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        yield f"refused: {refused[0]}{more}"
    if contested:
        yield "another program keeps changing our objects; see flannelctl logs"


def _of_the_peers(peers: Peers) -> Iterator[str]:
    unsafe = peers.unsafe()
    if unsafe:
        more = f", and {len(unsafe) - 1} more" if len(unsafe) > 1 else ""
        yield f"a lease would harm this host and is not followed: {unsafe[0]}{more}"


def _of_the_removal_guard(removal_guard: RemovalGuard) -> Iterator[str]:
    if removal_guard.holds:
        yield f"held back: {removal_guard.reason}"
