"""All tables of a node: in which order they are written, whatever the backend brings."""

from __future__ import annotations

import threading
from ipaddress import IPv4Network

import pytest

from flanneld.backends.host_gw import HostGw
from flanneld.model import IPNetwork, Lease, LeaseAttrs, Snapshot
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.worker import NodeTables
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.permits import Permits, RemovalGuard
from flanneld.state.resources import ADDRESSES, FDB, LINKS, NEIGHBORS, ROUTES, Key
from flanneld.state.table import Bypass, Table, TunnelSession
from tests.unit.backends.test_host_gw import made
from tests.unit.reconcile.simulated_table import SimulatedTable, Thing

OWN = Lease(LeaseAttrs(), IPv4Network("10.1.5.0/24"))
RANGES: list[tuple[IPNetwork, int]] = [(IPv4Network("10.1.0.0/16"), 24)]
BEFORE = [LINKS, ADDRESSES, NEIGHBORS, FDB]


def tables_of(peers: Peers) -> NodeTables:
    return NodeTables(
        peers,
        Permits(peers.known),
        stop=threading.Event(),
        make_loop=Supervisor().loop,
        after=lambda _: None,
        recording=lambda table: table,
    )


@pytest.mark.parametrize(
    ("needs", "order"), [(LINKS, [*BEFORE, "peers", ROUTES]), (ROUTES, [*BEFORE, ROUTES, "peers"])]
)
def test_what_routes_lead_into_is_made_before_them_unless_it_needs_them(needs: str, order: list[str]) -> None:
    class WithPeers(HostGw):
        def tables(self) -> tuple[Table, ...]:
            return (SimulatedTable("peers", needs=frozenset({needs})),)

    tables = tables_of(Peers(OWN, RANGES, RemovalGuard()))
    tables.make([SimulatedTable(name) for name in (*BEFORE, ROUTES)], made(kind=WithPeers))
    assert [state.name for state in tables.states()] == order


class Tunnels(SimulatedTable):
    """A table of another thread, which knows sessions and what passes the encryption."""

    session = TunnelSession(IPv4Network("10.1.9.0/24"), True, 7.0)
    bypass = Bypass("policy src here", "ip xfrm policy delete src here")

    def sessions(self) -> list[TunnelSession]:
        return [self.session]

    def bypasses(self) -> list[Bypass]:
        return [self.bypass]


def test_each_worker_is_given_its_part_of_the_desired_state() -> None:
    others = {
        "inside": SimulatedTable("inside"),
        "cloud": SimulatedTable("cloud"),
        "tunnels": Tunnels("tunnels"),
    }
    others["cloud"].worker, others["tunnels"].worker = "cloud", "a daemon"

    class WithThreads(HostGw):
        def tables(self) -> tuple[Table, ...]:
            return tuple(others.values())

    peers = Peers(OWN, RANGES, RemovalGuard())
    peers.take([Snapshot((OWN,))], made(kind=WithThreads))
    tables = tables_of(peers)
    tables.make([SimulatedTable(name) for name in (*BEFORE, ROUTES)], made(kind=WithThreads))
    assert {worker.name: set(worker.tables) for worker in tables.workers} == {
        "cloud": {"cloud"},
        "a daemon": {"tunnels"},
    }

    def held(now: float) -> list[set[Key]]:
        for worker in tables.workers:
            worker.step(now)
        return [set(each.held) for each in others.values()]

    first, second = ([Thing(each, table=name) for name in others] for each in ("first", "second"))
    peers.set_local([*first, *second])
    tables.converge(0.0)
    assert held(0.0) == [{one.key, two.key} for one, two in zip(first, second, strict=True)]
    tables.change(peers.set_local(first), 1.0)
    assert held(1.0) == [{one.key} for one in first]
    peers.set_local(second)
    tables.converge(2.0)
    assert held(2.0) == [{two.key} for two in second]
    assert (tables.sessions(), tables.bypasses()) == ([Tunnels.session], [Tunnels.bypass])
    tables.close(except_for=["cloud"], own="reconciler")
    assert [each.closed for each in others.values()] == [[False], [], [False]]
