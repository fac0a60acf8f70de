"""All tables of a node: in which order they are written, whatever the backend brings."""

from __future__ import annotations

import threading
from ipaddress import IPv4Network

import pytest

from flanneld.backends.host_gw import HostGw
from flanneld.model import Lease, LeaseAttrs
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.worker import NodeTables
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.permits import Permits, RemovalGuard
from flanneld.state.resources import ADDRESSES, FDB, LINKS, NEIGHBORS, ROUTES
from flanneld.state.table import Table
from tests.unit.backends.test_host_gw import made
from tests.unit.reconcile.simulated_table import SimulatedTable

OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"))
BEFORE = [LINKS, ADDRESSES, NEIGHBORS, FDB]


@pytest.mark.parametrize(
    ("needs", "order"), [(LINKS, [*BEFORE, "peers", ROUTES]), (ROUTES, [*BEFORE, ROUTES, "peers"])]
)
def test_what_routes_lead_into_is_made_before_them_unless_it_needs_them(needs: str, order: list[str]) -> None:
    class WithPeers(HostGw):
        def tables(self) -> tuple[Table, ...]:
            return (SimulatedTable("peers", needs=frozenset({needs})),)

    guard = RemovalGuard()
    peers = Peers(OWN, [(IPv4Network("10.1.0.0/16"), 24)], guard)
    tables = NodeTables(
        peers,
        Permits(peers.known, guard),
        stop=threading.Event(),
        make_loop=Supervisor().loop,
        after=lambda _: None,
        recording=lambda table: table,
    )
    tables.make([SimulatedTable(name) for name in (*BEFORE, ROUTES)], made(kind=WithPeers))
    assert [state.name for state in tables.states()] == order
