"""The order of a node's tables."""

from __future__ import annotations

from ipaddress import ip_network
from threading import Event
from typing import Any, cast

from flanneld.backends.contract import Backend
from flanneld.model import Lease, LeaseAttrs
from flanneld.network.rtnetlink.tables import KERNEL_TABLES
from flanneld.reconcile.node_tables import NodeTables
from flanneld.reconcile.peers import Peers
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.table import Table


class Named:
    """A table of which only the name matters."""

    vital, needs, audit, what = True, frozenset[str](), None, "things"

    def __init__(self, name: str, worker: str = "kernel") -> None:
        self.name, self.worker = name, worker


class WithTables:
    """A backend with one table in the kernel's thread and one in its own."""

    def tables(self) -> tuple[Named, ...]:
        return Named("policies"), Named("charon", "charon")


def test_tables_of_a_backend_are_written_before_the_routes() -> None:
    """A route must not lead to a peer before its keys and policies exist."""
    permits: Any = None
    peers = Peers(Lease(LeaseAttrs(), None), [ip_network("10.5.0.0/16")], RemovalGuard())
    tables = NodeTables(
        peers,
        permits,
        stop=Event(),
        heartbeat=lambda *_: None,
        after=lambda _: None,
        recording=lambda table: table,
    )
    kernel = [cast(Table, Named(name)) for name in KERNEL_TABLES]
    tables.make(kernel, cast(Backend, WithTables()))
    *before, last = [state.name for state in tables.reconciler.states()]
    assert (last, "policies" in before) == ("routes", True)
