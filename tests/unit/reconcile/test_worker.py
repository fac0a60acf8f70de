"""The thread of tables that would keep the kernel waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv4Network

import pytest
from msgspec.structs import replace

from flanneld.backends.extension.backend import PEERS, PeerSetup, Startup
from flanneld.backends.ipsec.resources import SharedKey
from flanneld.backends.udp.control import UdpProxy
from flanneld.model import Secret
from flanneld.reconcile.worker import Worker
from flanneld.runtime.supervisor import StepLoop
from flanneld.state.desired import Delta
from flanneld.state.permits import Knowledge
from flanneld.state.resources import Resource
from flanneld.state.table import Claim, Put
from tests.unit.reconcile.simulated_table import SimulatedTable, Thing


def test_each_message_of_a_long_queue_is_a_sign_of_life() -> None:
    beats: list[float] = []
    stop = threading.Event()

    def loop(
        _name: str, step: Callable[[float], float], sources: Callable[[], Iterable[int]] = tuple
    ) -> StepLoop:
        return StepLoop(step, sources, stop=stop, heartbeat=beats.append)

    worker = Worker("slow", [SimulatedTable()], stop=stop, make_loop=loop)
    for _ in range(3):
        worker.send(Delta(), Knowledge())
    worker.step(0.0)
    assert len(beats) == 2, "one after each but the last, whose end is the end of the step"


NETWORK, PUBLIC = IPv4Network("10.1.0.0/16"), IPv4Address("192.0.2.5")
OWN = Startup(NETWORK, None, IPv4Network("10.1.5.0/24"), None, PUBLIC, None)
PEER = PeerSetup(IPv4Network("10.1.9.0/24"), None, IPv4Address("192.0.2.9"), None, "new")
KEY = SharedKey(PUBLIC, Secret(b"new"))
PROXY = UdpProxy("flannel0", PUBLIC, 8285, IPv4Address("10.1.5.0"), 1472)


@pytest.mark.parametrize(
    ("needed", "was"),
    [
        pytest.param(OWN, replace(OWN, public_ip=None), id="commands of this node's extension"),
        pytest.param(KEY, replace(KEY, secret=Secret(b"old")), id="key in charon"),
        pytest.param(PROXY, replace(PROXY, port=8286), id="udp proxy"),
    ],
)
def test_outage_of_the_store_keeps_no_old_object_of_this_node_and_replaces_none_of_a_peer(
    needed: Resource, was: Resource
) -> None:
    place = str(needed.key[0])
    tables = {name: SimulatedTable(name) for name in (place, PEERS)}
    tables[place].hold(was, Claim.OURS)
    tables[PEERS].hold(newer := replace(PEER, data="newer than the cache"), Claim.OURS)
    worker = Worker("backend", [*tables.values()], stop=threading.Event())
    whole = Delta((Put(needed), Put(PEER)))
    cached = Knowledge(cached="a file", local={needed.key})
    worker.send(whole, cached, whole=True)
    worker.step(0.0)
    assert tables[place].held[needed.key].resource == needed
    assert tables[PEERS].held[PEER.key].resource == newer
    worker.send(whole, Knowledge(synced=True), whole=True)
    worker.step(1.0)
    assert tables[PEERS].held[PEER.key].resource == PEER


def test_what_is_sent_is_written_at_once_and_stays_desired() -> None:
    table = SimulatedTable()
    worker = Worker("slow", [table], stop=threading.Event())
    one, two, three = map(Thing, ("one", "two", "three"))
    known = Knowledge(synced=True)
    worker.send(Delta((Put(one), Put(two))), known, whole=True)
    worker.step(0.0)
    reads = table.reads
    worker.send(Delta((Put(three),), (one,)), known)
    worker.step(1.0)
    assert table.held.keys() == {two.key, three.key}
    assert table.reads == reads
    table.held.clear()
    worker.step(40.0)
    assert table.held.keys() == {two.key, three.key}
    worker.send(Delta((Put(one),)), known, whole=True)
    worker.step(41.0)
    assert table.held.keys() == {one.key}
