"""A cluster of three: members that die, hang or lose the others cost no lease and no news."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest
from msgspec.structs import replace

from flanneld.config import parse
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Snapshot
from flanneld.subnet.etcd.api_choice import open_etcd
from flanneld.subnet.etcd.transport import EtcdOptions, EtcdTimeouts
from flanneld.subnet.store import Store
from tests.lab.etcd_v3 import V3Keys
from tests.lab.wait import wait_for
from tests.local_etcd import LocalEtcd, running_cluster

NODES = 30
NETWORK = parse('{"Network": "10.3.0.0/16", "SubnetMin": "10.3.1.0", "SubnetMax": "10.3.30.0"}')
BRIEF = EtcdTimeouts(connect=0.5, read=1.0, silence=0.5, pause=0.1)
_numbers = itertools.count()


@pytest.fixture
def cluster() -> Iterator[list[LocalEtcd]]:
    with running_cluster() as members:
        yield members


class Members:
    """Nodes of a network, each with a watch of the leases."""

    def __init__(self, cluster: list[LocalEtcd], timeouts: EtcdTimeouts, transport: str) -> None:
        self._transport = transport
        self.prefix = f"/cluster-{next(_numbers)}"
        self._urls = tuple(member.url for member in cluster)
        self._timeouts = timeouts
        self._managers: list[Store] = []
        self._threads: list[threading.Thread] = []

    def manager(self, *urls: str) -> Store:
        options = EtcdOptions(urls or self._urls, self.prefix, transport=self._transport)
        self._managers.append(open_etcd(options, "v3", self._timeouts))
        return self._managers[-1]

    def watch(self, manager: Store) -> list[Event]:
        events: list[Event] = []

        def run() -> None:
            with pytest.raises(Cancelled):
                manager.watch(events.extend, lambda: None)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return events

    def close(self) -> None:
        for manager in self._managers:
            manager.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def timeouts() -> EtcdTimeouts:
    return BRIEF


@pytest.fixture(params=["json", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def members(cluster: list[LocalEtcd], timeouts: EtcdTimeouts, transport: str) -> Iterator[Members]:
    members = Members(cluster, timeouts, transport)
    yield members
    members.close()


def leader(cluster: list[LocalEtcd]) -> LocalEtcd:
    def leads(member: LocalEtcd) -> bool:
        status = member.post("/maintenance/status", {})
        return bool(status["leader"] == status["header"]["member_id"])

    return wait_for(lambda: [member for member in cluster if leads(member)], what="a leader")[0]


def known(events: list[Event]) -> set[str]:
    """The subnets that a watch has told of."""
    found: set[str] = set()
    for event in list(events):
        if isinstance(event, Snapshot):
            found |= {str(lease) for lease in event.leases}
        elif isinstance(event, Added):
            found.add(str(event.lease))
    return found


def join(manager: Store, number: int) -> Lease:
    """As a daemon does: try again until it works."""
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number}"))
    while True:
        try:
            return manager.acquire(NETWORK, attrs, (None, None))
        except Retryable:
            continue


def test_thirty_nodes_join_while_the_leader_is_killed(cluster: list[LocalEtcd], members: Members) -> None:
    leases: list[Lease] = []
    ready = threading.Barrier(NODES + 1)
    watches = [members.watch(members.manager()) for _ in range(3)]

    def start(number: int) -> None:
        manager = members.manager()
        ready.wait()
        leases.append(join(manager, number))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(1, NODES + 1)]
    for thread in threads:
        thread.start()
    dying = leader(cluster)
    ready.wait()
    wait_for(lambda: len(leases) >= 3, 20, "the first nodes to have joined")
    dying.signal(signal.SIGKILL)
    for thread in threads:
        thread.join(300)
    subnets = {str(lease) for lease in leases}
    assert len(subnets) == NODES
    for events in watches:
        wait_for(lambda events=events: known(events) == subnets, 20, "a watch to know all")  # type: ignore[misc]
    alive = next(member for member in cluster if member is not dying)
    stored = V3Keys(alive.post).children(f"{members.prefix}/subnets")
    assert len(stored) == NODES


def test_a_member_that_hangs_is_left(cluster: list[LocalEtcd], members: Members) -> None:
    hanging, other = cluster[:2]
    manager = members.manager(hanging.url, other.url)
    events = members.watch(manager)
    wait_for(lambda: events, 10, "the snapshot")
    for number, member in enumerate((hanging, other)):
        member.signal(signal.SIGSTOP)
        try:
            join(members.manager(*(each.url for each in cluster if each is not member)), number + 1)
            wait_for(lambda wanted=number + 1: len(known(events)) == wanted, 10, "the news")  # type: ignore[misc]
        finally:
            member.signal(signal.SIGCONT)
        for each in cluster:
            each.wait_healthy()


@pytest.mark.parametrize("timeouts", [replace(BRIEF, read=60.0, silence=60.0)], ids=["without asking"])
def test_a_member_without_a_leader_is_not_taken_for_one_without_news(
    cluster: list[LocalEtcd], members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def told(what: str) -> int:
        return sum(what in record.getMessage() for record in caplog.records)

    lonely, *others = cluster
    events = members.watch(members.manager(lonely.url))
    wait_for(lambda: events, 10, "the snapshot")
    for member in others:
        member.signal(signal.SIGSTOP)
    try:
        wait_for(lambda: told("Watching"), 20, "a word about it")
    finally:
        for member in others:
            member.signal(signal.SIGCONT)
    join(members.manager(others[0].url), 1)
    wait_for(lambda: len(known(events)) == 1, 10, "the news")
    wait_for(lambda: told("etcd is back"), 10, "a word about that, too")
    assert told("etcd is back") == 1
