"""Work per lease, counted instead of timed, so that a busy machine changes nothing.

A bound is at most a tenth above what Python 3.11 needs for 1,000 vxlan peers; later versions need less.
Whoever makes a count smaller lowers its bound.
"""

from __future__ import annotations

import gc
import json
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

from flanneld.backends.vxlan import VxlanBackend
from flanneld.ctl import compare as snapshot
from flanneld.ctl.compare import ActualState, Comparison
from flanneld.diagnostics.describe import described, peers_of
from flanneld.diagnostics.status import NetworkStatus, PeerStatus, RangeStatus, Status, UplinkStatus
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot, Uplink
from flanneld.network.interfaces import index_of
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.tables import tables
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.reconciler import Reconciler
from flanneld.state.permits import RemovalGuard
from flanneld.subnet.etcd import v2_messages
from flanneld.subnet.etcd.keys import KeyReply, Position
from flanneld.subnet.etcd.leases import LeaseReader
from flanneld.subnet.etcd.transport import Answer
from tests.bench.cluster import Peer, open_leases
from tests.lab import Lab, wait_for
from tests.lab.etcd import PREFIX
from tests.lab.namespace import Namespace
from tests.netns.test_kernel import empty
from tests.unit.backends.test_vxlan import config as vxlan_config
from tests.unit.backends.test_vxlan import host as vxlan_host

PEERS = 1000
OWN = Lease(LeaseAttrs(IPv4Address("198.18.0.1"), None, "vxlan"), IPv4Network("10.0.0.0/24"))
NETWORK = IPv4Network("10.0.0.0/8")
DOMAIN = Domain("up0", frozenset({"flannel.1"}), ((NETWORK, 24),), bridging=frozenset({"flannel.1"}))
#: Memory blocks, and calls of functions, from etcd's answer to the desired state.
BLOCKS, CALLS = 24.7, 219.0
#: Calls of functions for each object of an audit, and for all that one peer needs that comes or goes.
AUDIT_CALLS, ADDED_CALLS, REMOVED_CALLS = 20.5, 500, 380
#: Calls for each peer in the daemon's document, and for each object that the doctor compares.
TELLING_CALLS, COMPARING_CALLS = 147, 25
#: Bytes that arrive for each lease of a list, and for one event.
BYTES, EVENT_BYTES = 350, 1200

__all__ = ["empty"]


class StoredList:
    """A client whose store holds the leases of ``number`` peers, as v2 of etcd lists them."""

    def __init__(self, number: int, first: int = 0) -> None:
        nodes = [
            {
                "key": f"{PREFIX}/subnets/{str(peer.subnet).replace('/', '-')}",
                "value": peer.value("vxlan"),
                "expiration": "2030-01-01T00:00:00.000000000Z",
                "ttl": 86400,
                "modifiedIndex": peer.number + 5,
                "createdIndex": peer.number + 5,
            }
            for peer in map(Peer, range(first, number))
        ]
        here = {
            "key": f"{PREFIX}/subnets",
            "dir": True,
            "nodes": nodes,
            "modifiedIndex": 4,
            "createdIndex": 4,
        }
        self._body = json.dumps({"action": "get", "node": here}).encode()

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        del key, recursive
        return v2_messages.read(Answer("etcd", 200, Position(1 << 20, "c"), body=self._body))


class Net:
    """A node with the backend vxlan, in this namespace."""

    def __init__(self) -> None:
        address = IPv4Address("198.18.0.1")
        uplink = Uplink("up0", index_of("up0"), 1500, address, address)
        host = replace(vxlan_host(), uplink=uplink, identity={4: "02:00:00:00:00:01"})
        self.backend = VxlanBackend(vxlan_config(), host)
        self.peers = Peers(OWN, [(NETWORK, 24)], RemovalGuard())
        self.peers.set_local(self.backend.local(OWN))
        kernel = Kernel(DOMAIN)
        self.monitor = kernel.listen()
        all_tables = tables(kernel)
        desired = {table.name: self.peers.desired.table(table.name) for table in all_tables}
        self.reconciler = Reconciler(all_tables, desired, lambda: False)
        self._reader = LeaseReader(f"{PREFIX}/subnets")

    def leases(self, client: StoredList) -> tuple[Lease, ...]:
        return tuple(self._reader.read_all(client).leases.values())  # type: ignore[arg-type]

    def take_list(self, client: StoredList) -> None:
        self.peers.take([Snapshot((OWN, *self.leases(client)))], self.backend)

    def take(self, event: Event) -> None:
        report = self.reconciler.change(self.peers.take([event], self.backend), 0.0)
        assert report.failed == []

    def audit(self) -> None:
        assert self.reconciler.converge(0.0).made == []


@pytest.fixture
def net(empty: Namespace) -> Iterator[Net]:
    empty.ip(
        "link set lo up",
        "link add up0 type veth peer name up1",
        "link set up0 up",
        "link set up1 up",
        "address add 198.18.0.1/15 dev up0",
    )
    node = Net()
    node.reconciler.converge(0.0)
    node.take_list(StoredList(10))  # what is made once, such as caches, is no lease's
    yield node
    node.monitor.close()


def calls(act: Callable[[], object]) -> int:
    """Count the calls of functions of Python and of C."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


class CountedSocket(socket.socket):
    """A socket that keeps what was sent."""

    sends: ClassVar[list[bytes]] = []

    def send(self, data: bytes, *flags: int) -> int:  # type: ignore[override]
        self.sends.append(bytes(data))
        return super().send(data, *flags)


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What sockets that are made from now on have sent."""
    sent: list[bytes] = []
    monkeypatch.setattr(socket, "socket", CountedSocket)
    monkeypatch.setattr(CountedSocket, "sends", sent)
    return sent


def messages_in(sends: list[bytes]) -> int:
    count = 0
    for data in sends:
        offset = 0
        while offset < len(data):
            offset += struct.unpack_from("=I", data, offset)[0]
            count += 1
    return count


def test_a_lease_takes_few_objects_and_few_calls(net: Net) -> None:
    client = StoredList(PEERS)
    gc.collect()  # frees as well what the interpreter keeps for objects to come
    before = sys.getallocatedblocks()
    net.take_list(client)
    gc.collect()
    assert (sys.getallocatedblocks() - before) / PEERS < BLOCKS
    assert calls(lambda: Net().take_list(client)) / PEERS < CALLS


def test_bulk_audit_and_event_take_few_messages(sends: list[bytes], net: Net) -> None:
    net.take_list(StoredList(PEERS))
    sends.clear()
    net.reconciler.converge(0.0)
    dumps = 8
    assert messages_in(sends) <= 3 * PEERS + dumps
    assert len(sends) <= sum(map(len, sends)) / (12 << 10) + dumps
    sends.clear()
    made = calls(net.audit)
    assert messages_in(sends) <= dumps
    assert made / (3 * PEERS) < AUDIT_CALLS
    (lease,) = net.leases(StoredList(PEERS + 1, PEERS))
    for event, limit in ((Added(lease), ADDED_CALLS), (Removed(lease.key), REMOVED_CALLS)):
        sends.clear()
        made = calls(partial(net.take, event))
        assert made < limit
        assert messages_in(sends) == 3
        net.audit()


def test_the_doctor_needs_few_calls_for_each_object(net: Net) -> None:
    net.take_list(StoredList(PEERS))
    net.reconciler.converge(0.0)
    local = tuple(described(each, {}) for each in net.peers.local_resources())
    told = Status(
        network=NetworkStatus((RangeStatus(str(NETWORK), 24),)),
        uplink=UplinkStatus(DOMAIN.uplink, 1500),
        devices=tuple(sorted(DOMAIN.links)),
        local=local,
    )
    peers: list[PeerStatus] = []
    telling = calls(lambda: peers.extend(peers_of(net.peers.view(), {})))
    told = replace(told, peers=tuple(peers))
    found: list[ActualState] = []
    entries: list[Comparison] = []

    def compare() -> None:
        found.append(snapshot.read(told))
        entries.extend(snapshot.compare(told, found[0].left, found[0]))

    comparing = calls(compare)
    assert len(found[0].right) / PEERS == 3
    assert {entry.state for entry in entries} == {"ok"}
    assert telling / PEERS < TELLING_CALLS
    assert comparing / (3 * PEERS) < COMPARING_CALLS


def received(namespace: Namespace) -> int:
    """Return the bytes that came in over a node's uplink."""
    with namespace.entered():
        rows = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (row,) = [row for row in rows if row.strip().startswith("eth0:")]
    return int(row.partition(":")[2].split()[0])


@pytest.mark.parametrize("api", ["v2", "v3"])
def test_the_list_of_leases_is_read_once_and_an_event_reads_no_list(api: str) -> None:
    with Lab(api=api) as lab:
        lab.etcd.put_config({"Network": str(NETWORK), "SubnetLen": 24, "Backend": {"Type": "vxlan"}})
        with open_leases(lab.etcd, "vxlan") as leases:
            leases.load(PEERS)
            (node,) = lab.add_nodes()
            before = received(node.namespace)
            node.start()
            node.wait_ready()
            node.wait_for_log(f"In sync with {PEERS} peers")
            at_start = received(node.namespace) - before
            before = received(node.namespace)
            for number in range(PEERS, PEERS + 10):
                leases.send(leases.addition(Peer(number)))
                leases.finish()
            wait_for(
                lambda: len(node.namespace.json("ip", "-j", "route", "show", "dev", "flannel.1")) > PEERS + 9
            )
            per_event = (received(node.namespace) - before) / 10
    assert at_start / PEERS < BYTES
    assert per_event < EVENT_BYTES
