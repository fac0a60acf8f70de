"""Watches of both kinds of stores step by step: list, resume, lost history, restored stores, back-off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from msgspec.structs import replace

from flanneld.config import parse
from flanneld.errors import Cancelled
from flanneld.model import Added, Event, LeaseAttrs, Removed, Snapshot
from flanneld.subnet.kube.nodes import DEFAULT_PREFIX
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from tests.unit.simulation.etcd import (
    PREFIX,
    V2_QUEUE,
    SimulatedClient,
    SimulatedEtcd,
    SimulatedWatcher,
    store_on,
)
from tests.unit.simulation.kube import SimulatedApi, SimulatedApiServer
from tests.unit.simulation.world import World

CONFIG = {"Network": "10.0.0.0/14", "SubnetLen": 24, "Backend": {"Type": "host-gw"}}
LEASE = '{"PublicIP":"172.16.0.%d","BackendType":"host-gw"}'


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    with world.running():
        yield world


class EtcdWatch:
    """A watch of all leases, stepped by a test."""

    def __init__(self, world: World, api: str) -> None:
        self.world = world
        self.etcd = SimulatedEtcd(world, api, CONFIG)
        self.write(1)
        self.events: list[Event] = []
        self.client = SimulatedClient(self.etcd, lambda: None)
        self.machine = store_on(self.client).lease_watch()

    def write(self, number: int) -> None:
        self.etcd.put(f"{PREFIX}/subnets/10.0.{number}.0-24", LEASE % number, 86400)

    def step(self) -> list[str]:
        """Step, and return what was told."""
        self.events.clear()
        self.due = self.machine.step(self.world.time, self.events.extend)
        return [_told(event) for event in self.events]

    @property
    def watcher(self) -> SimulatedWatcher:
        return self.client.watchers[self.machine.name]


def _told(event: Event) -> str:
    match event:
        case Snapshot(leases):
            return f"all: {', '.join(sorted(map(str, leases)))}"
        case Added(lease):
            return f"+{lease}"
        case Removed(key):
            return f"-{key[0]}"
    return str(event)


@pytest.fixture(params=["v2", "v3"])
def watch(world: World, request: pytest.FixtureRequest) -> EtcdWatch:
    return EtcdWatch(world, request.param)


def test_etcd_is_listed_and_then_watched(watch: EtcdWatch) -> None:
    assert watch.machine.at is None
    assert watch.step() == ["all: 10.0.1.0/24"]
    assert watch.machine.at is not None
    watch.write(2)
    assert watch.step() == ["+10.0.2.0/24"]
    watch.etcd.delete(f"{PREFIX}/subnets/10.0.1.0-24")
    assert watch.step() == ["-10.0.1.0/24"]
    assert watch.step() == []
    assert watch.due == watch.world.time + 1, "a read in vain is not repeated at once"


def test_a_stream_that_etcd_dropped_is_noticed(watch: EtcdWatch) -> None:
    watch.step()
    watcher, at = watch.watcher, watch.machine.at
    assert at is not None
    watcher.wait(at)
    for number in range(2, 152):
        watch.write(number)
    is_v2 = watch.etcd.api == "v2"
    assert len(watch.step()) == (V2_QUEUE if is_v2 else 150)
    assert (watcher.wait(at) < watch.world.time + 1) == is_v2
    told = [line for _ in range(50) for line in watch.step()]
    assert len(told) == (50 if is_v2 else 0)


def test_forgotten_history_is_read_again_but_not_at_once(watch: EtcdWatch) -> None:
    watch.step()
    watch.world.time += 0.25
    watch.write(2)
    watch.etcd.compact()
    assert watch.step() == []
    assert (watch.machine.at, watch.due) == (None, watch.world.time + 0.75)
    assert watch.step() == []
    watch.world.time += 0.75
    assert watch.step() == ["all: 10.0.1.0/24, 10.0.2.0/24"]


def test_store_that_went_back_is_read_again(watch: EtcdWatch) -> None:
    watch.write(2)
    watch.step()
    watch.etcd.restore(1)
    for watcher in watch.etcd.watchers:
        watcher.is_broken = False
    watch.world.time += 10
    assert watch.step() == []
    assert watch.step() == ["all: 10.0.1.0/24"]


def test_lost_etcd_is_asked_once_a_second_and_then_read_again(watch: EtcdWatch) -> None:
    watch.step()
    watch.etcd.set_down(down=True)
    for _ in range(3):
        watch.world.time += 5
        assert watch.step() == []
        assert watch.due == watch.world.time + 1
        assert watch.machine.problem is not None
    watch.write(2)
    watch.etcd.set_down(down=False)
    watch.world.time += 1
    assert watch.step() == ["all: 10.0.1.0/24, 10.0.2.0/24"]
    watch.step()
    assert watch.machine.problem is None


def test_reread_cuts_also_a_watch_that_a_proxy_holds(watch: EtcdWatch) -> None:
    watch.step()
    woken: list[float] = []
    watch.watcher.stalled_until = watch.world.time + 1000
    watch.watcher.wake = woken.append
    watch.machine.reread()
    assert woken == [watch.world.time]


def test_reread_reads_everything_and_a_cut_ends_the_watch(watch: EtcdWatch) -> None:
    watch.step()
    watch.machine.reread()
    watch.world.time += 1
    assert watch.step() == []
    assert watch.step() == ["all: 10.0.1.0/24"]
    watch.machine.close()
    with pytest.raises(Cancelled):
        watch.step()


class KubeWatch:
    """A watch of all nodes, stepped by a test."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.server = SimulatedApiServer(world)
        net_config = directory / "net-conf.json"
        net_config.write_text(json.dumps(CONFIG))
        for number in (1, 2):
            self.register(number)
        options = KubeOptions("http://127.0.0.1:1", "", DEFAULT_PREFIX, str(net_config), "")
        self.store = store = KubeStore(
            options,
            {"NODE_NAME": "n1"},
            open_api=lambda *_: SimulatedApi(self.server, lambda: None),  # type: ignore[arg-type]
        )
        store.acquire(parse(json.dumps(CONFIG)), LeaseAttrs(backend_type="host-gw"), (None, None))
        self.events: list[Event] = []
        self.machine = store.node_watch(self.events.extend)

    def register(self, number: int) -> None:
        self.server.add_node(f"n{number}", f"10.0.{number}.0/24")
        notes = {"kube-subnet-manager": "true", "backend-type": "host-gw", "public-ip": f"172.16.0.{number}"}
        annotations = {f"{DEFAULT_PREFIX}/{name}": text for name, text in notes.items()}
        self.server.patch(f"n{number}", {"metadata": {"annotations": annotations}})

    def step(self) -> list[str]:
        self.events.clear()
        self.due = self.machine.step(self.world.time, self.events.extend)
        return [_told(event) for event in self.events]


@pytest.fixture
def nodes(world: World, tmp_path: Path) -> KubeWatch:
    return KubeWatch(world, tmp_path)


def test_nodes_are_listed_and_then_watched(nodes: KubeWatch) -> None:
    assert nodes.machine.at is None
    assert nodes.step() == ["all: 10.0.1.0/24, 10.0.2.0/24"]
    assert nodes.machine.at is not None
    assert nodes.step() == [], "the watch is opened"
    nodes.register(3)
    assert nodes.step() == ["+10.0.3.0/24"]
    nodes.server.delete_node("n2")
    assert nodes.step() == ["-10.0.2.0/24"]


def test_watch_that_broke_is_resumed_without_a_list(nodes: KubeWatch) -> None:
    nodes.step()
    nodes.world.time += 1.5
    nodes.server.break_watches()
    nodes.register(3)
    told = [nodes.step() for _ in range(4)]
    assert [line for lines in told for line in lines] == ["+10.0.3.0/24"]


@pytest.mark.parametrize("happens", ["compacted", "restored"])
def test_lost_history_of_the_nodes_is_listed_again_after_a_pause(nodes: KubeWatch, happens: str) -> None:
    nodes.step()
    nodes.step()  # opens the watch
    nodes.register(3)
    nodes.step()
    if happens == "compacted":
        nodes.register(4)
        nodes.server.compact()
    else:
        nodes.server.restore(2)
    told = [nodes.step() for _ in range(2)]
    assert told == [[], []]
    assert nodes.due > nodes.world.time
    nodes.world.time = nodes.due
    more = ["10.0.3.0/24", "10.0.4.0/24"] if happens == "compacted" else []
    assert nodes.step() == [f"all: {', '.join(['10.0.1.0/24', '10.0.2.0/24', *more])}"]


def test_a_second_backup_is_noticed_although_its_version_has_overtaken_ours(nodes: KubeWatch) -> None:
    nodes.step()
    nodes.step()  # opens the watch
    nodes.register(3)
    assert nodes.step() == ["+10.0.3.0/24"]
    nodes.server.restore(2)
    nodes.step()
    nodes.step()
    nodes.world.time = nodes.due
    assert nodes.step() == ["all: 10.0.1.0/24, 10.0.2.0/24"]
    nodes.step()
    nodes.register(3)
    assert nodes.step() == ["+10.0.3.0/24"]
    nodes.server.restore(2)
    nodes.register(4)
    assert [nodes.step() for _ in range(2)] == [[], ["all: 10.0.1.0/24, 10.0.2.0/24, 10.0.4.0/24"]]


def test_annotations_that_a_backup_lacks_are_missed_also_at_the_version_we_know(nodes: KubeWatch) -> None:
    told: list[Event] = []
    own_step = nodes.store.own_watch_step(told.extend, lambda: None)
    nodes.step()
    nodes.step()  # opens the watch
    own_step(nodes.world.time)
    (event,) = told
    assert isinstance(event, Added)
    attrs = replace(event.lease.attrs, public_ip=IPv4Address("172.16.0.9"))
    nodes.store.renew(replace(event.lease, attrs=attrs))
    nodes.world.time += 1.5
    nodes.server.restore(1)  # before the watch told of it
    told.clear()
    assert [nodes.step() for _ in range(2)] == [[], []]
    own_step(nodes.world.time)
    (event,) = told
    assert isinstance(event, Added)
    assert event.lease.attrs == LeaseAttrs(), "overwritten"


def test_pauses_grow_while_the_api_server_is_down_and_a_reconnect_ends_one(nodes: KubeWatch) -> None:
    nodes.step()
    nodes.server.set_down(down=True)
    pauses = []
    for _ in range(5):
        nodes.step()
        pauses.append(nodes.due - nodes.world.time)
        nodes.world.time = nodes.due
    assert pauses[0] < pauses[-1] <= 4.0
    nodes.server.set_down(down=False)
    nodes.world.time -= 0.1
    assert nodes.step() == []
    nodes.machine.reconnect()
    assert nodes.step() == ["all: 10.0.1.0/24, 10.0.2.0/24"]
