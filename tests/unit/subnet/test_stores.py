"""One suite over every store: list, changes, new lists, new connections, the end; contest and renewal."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Event, Lease, LeaseAttrs, Snapshot
from flanneld.options import read
from flanneld.subnet.opening import open_store
from flanneld.subnet.store import Store
from tests.lab.wait import wait_for
from tests.local_cluster import ATTRS, peers, running_cluster
from tests.local_etcd import DEADLINE, LocalEtcd, server, silent
from tests.unit.simulation.etcd import PREFIX, SimulatedClient, SimulatedEtcd, store_on
from tests.unit.simulation.world import World
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, running_server

#: Stores in which nodes choose their subnets; simulated ones answer at once, and are watched in other tests.
KEYS = ["v2", "v3", "v3 over gRPC", "both", "file", "remote"]
STORES = [*KEYS, "Kubernetes"]
SIMULATED = ["simulated v2", "simulated v3"]
OF_KEYS = pytest.mark.parametrize("place", [*KEYS, *SIMULATED], indirect=True)
ALL = pytest.mark.parametrize("place", [*STORES, *SIMULATED], indirect=True)
NOTHING = (None, None)
#: Changes while a reader is busy.
BURST = 240
_numbers = itertools.count()


def node(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.0.2.{number}"), backend_type="host-gw")


class Place(Struct):
    """A store of our node with a way to add and remove the leases of others behind its back.

    ``another`` opens the store for another node, with a function to call before each of its requests.
    """

    store: Store
    put: Callable[[int], object]
    delete: Callable[[int], object]
    another: Callable[[Callable[[], None]], Store]
    config: Config
    attrs: LeaseAttrs = node(1)


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, etcd: LocalEtcd, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as end:
        if request.param == "Kubernetes":
            cluster = end.enter_context(running_cluster(tmp_path))
            store = cluster.open()
            store.acquire(cluster.config, ATTRS, NOTHING)

            def another(_before: Callable[[], None]) -> Store:
                cluster.put_node("n9", "10.5.9.0/24")
                other = cluster.open(environ={"NODE_NAME": "n9"})
                other.acquire(cluster.config, ATTRS, NOTHING)
                return other

            def delete(number: int) -> None:
                cluster.control.delete_node(f"n{number}")

            place = Place(store, cluster.put_peer, delete, another, cluster.config, ATTRS)
        elif "simulated" in request.param:
            place = end.enter_context(simulated_place(request.param[-2:]))
        else:
            place = end.enter_context(keys_place(request.param, etcd, tmp_path))
        end.callback(place.store.close)
        yield place


@contextmanager
def keys_place(kind: str, etcd: LocalEtcd, directory: Path) -> Iterator[Place]:
    """Yield a store of keys: etcd in any API, a file, or a server over a file."""
    with ExitStack() as end:
        root = ROOT
        if kind in ("file", "remote"):
            file = LocalFile(directory / "leases.db")
            sides: list[Any] = [file]
            flags = [f"-store={directory / 'leases.db'}"]
            if kind == "remote":
                flags = [f"-remote=127.0.0.1:{end.enter_context(running_server(file)).port}"]
        else:
            root = f"/watches-{next(_numbers)}"
            apis = ["v2", "v3"] if kind == "both" else [kind[:2]]
            sides = [etcd.keys(api) for api in apis]
            transport = "grpc" if "gRPC" in kind else "json"
            api = "both" if kind == "both" else kind[:2]
            flags = [f"-etcd-endpoints={etcd.url}", f"-etcd-api={api}", f"-etcd-transport={transport}"]
            flags.append(f"-etcd-prefix={root}")

        def put(number: int) -> None:
            for side in sides:
                value = json.dumps({"PublicIP": f"192.0.2.{number}"})
                side.put(f"{root}/subnets/10.5.{number}.0-24", value, 3600)

        def delete(number: int) -> None:
            for side in sides:
                side.delete(f"{root}/subnets/10.5.{number}.0-24")

        for side in sides:
            side.put(f"{root}/config", CONFIG)

        def opened(_before: Callable[[], None] = lambda: None) -> Store:
            store = open_store(read(flags, {}), {})
            end.callback(store.close)
            return store

        store = opened()
        yield Place(store, put, delete, opened, store.network_config())


@contextmanager
def simulated_place(api: str) -> Iterator[Place]:
    world = World(1)
    with world.running():
        etcd = SimulatedEtcd(world, api, json.loads(CONFIG))

        def put(number: int) -> None:
            etcd.put(
                f"{PREFIX}/subnets/10.5.{number}.0-24", json.dumps({"PublicIP": f"192.0.2.{number}"}), 3600
            )

        def another(before: Callable[[], None]) -> Store:
            return store_on(SimulatedClient(etcd, before))

        store = another(lambda: None)
        yield Place(
            store,
            put,
            lambda number: etcd.delete(f"{PREFIX}/subnets/10.5.{number}.0-24"),
            another,
            store.network_config(),
        )


class Watching:
    """The watch of a store in a thread."""

    def __init__(self, store: Store) -> None:
        self.events: list[Event] = []
        self.ended: list[BaseException] = []
        self._store = store
        self._thread = threading.Thread(target=self._run, daemon=True)  # a failed test may not end it
        self._thread.start()

    def lists(self) -> int:
        return sum(isinstance(event, Snapshot) for event in list(self.events))

    def wait_for(self, *numbers: int) -> None:
        wanted = {f"10.5.{number}.0/24" for number in numbers}
        wait_for(lambda: self.lists() and peers(self.events) == wanted, 10, f"just {wanted}")

    def end(self) -> None:
        self._store.close()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()
        assert [type(error) for error in self.ended] == [Cancelled]

    def _run(self) -> None:
        try:
            self._store.watch(self.events.extend, lambda: None)
        except BaseException as error:
            self.ended.append(error)


def test_watch_lists_and_then_tells_changes(place: Place) -> None:
    place.put(2)
    watching = Watching(place.store)
    watching.wait_for(2)
    place.put(3)
    watching.wait_for(2, 3)
    place.delete(2)
    watching.wait_for(3)
    watching.end()


def test_reread_lists_again_whenever_it_is_requested(place: Place) -> None:
    place.put(2)
    watching = Watching(place.store)
    place.store.reread()  # before it connects, or while it lists
    watching.wait_for(2)
    for number in (3, 4):
        before = watching.lists()
        place.store.reread()
        wait_for(lambda: watching.lists() > before, 10, "a list")  # noqa: B023
        place.put(number)
    watching.wait_for(2, 3, 4)
    watching.end()


def test_reconnect_loses_no_change_whenever_it_is_requested(place: Place) -> None:
    watching = Watching(place.store)
    for number in range(2, 6):
        place.store.reconnect()
        place.put(number)
    watching.wait_for(2, 3, 4, 5)
    place.store.reconnect()
    place.delete(2)
    watching.wait_for(3, 4, 5)
    watching.end()


def test_burst_of_changes_comes_in_few_deliveries(place: Place) -> None:
    """They come while the reader is busy with the first change."""
    events: list[Event] = []
    deliveries: list[int] = []
    busy = threading.Event()
    other = Watching(place.another(lambda: None))  # when it has them all, the server has sent them

    def deliver(told: list[Event]) -> None:
        deliveries.append(len(told))
        events.extend(told)
        if len(deliveries) == 2:
            busy.wait(DEADLINE)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(place.store.watch, deliver, lambda: None)
        wait_for(lambda: deliveries, DEADLINE, "the list")
        place.put(2)
        wait_for(lambda: len(deliveries) == 2, DEADLINE, "the first change")
        for number in range(3, 2 + BURST):
            place.put(number)
        wait_for(lambda: f"10.5.{number}.0/24" in peers(other.events), DEADLINE, "the last one to be sent")
        busy.set()
        wait_for(lambda: len(peers(events)) == BURST, DEADLINE, "all changes")
        other.end()
        place.store.close()
        assert isinstance(watching.exception(DEADLINE), Cancelled)
    assert len(deliveries) <= BURST / 30, deliveries


@pytest.mark.parametrize("store", ["v2", "v3", "both", "remote"])
@pytest.mark.parametrize("way", ["reread", "reconnect", ""])
def test_close_ends_a_watch_whose_server_is_silent(store: str, way: str) -> None:
    asked = threading.Event()

    def stuck(connection: socket.socket) -> None:
        asked.set()
        silent(connection)

    with server(stuck) as url:
        flags = [f"-etcd-endpoints={url}", f"-etcd-api={store}"]
        if store == "remote":
            flags = [f"-remote={url.removeprefix('http://')}"]
        opened = open_store(read(flags, {}), {})
        watching = Watching(opened)
        assert asked.wait(DEADLINE)
        if way:
            getattr(opened, way)()
        watching.end()


# ---- contest ---------------------------------------------------------------------------------------


def leases(store: Store) -> dict[str, IPv4Address | None]:
    return {str(lease): lease.attrs.public_ip for lease in store.read_leases()}


WANTED = (IPv4Network("10.5.7.0/24"), None)


@pytest.mark.parametrize("place", KEYS, indirect=True)
def test_of_nodes_that_want_one_subnet_at_once_one_gets_it_and_each_gets_one(place: Place) -> None:
    numbers = range(2, 6)
    stores = [place.another(lambda: None) for _ in numbers]
    together = threading.Barrier(len(stores))

    def join(store: Store, number: int) -> Lease:
        store.network_config()
        together.wait(DEADLINE)
        return store.acquire(place.config, node(number), WANTED)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(join, stores, numbers))
    assert sum(lease.key == WANTED for lease in found) == 1
    assert leases(place.another(lambda: None)) == {str(lease): lease.attrs.public_ip for lease in found}
    assert len({lease.key for lease in found}) == len(stores)


@pytest.mark.parametrize("place", SIMULATED, indirect=True)
@pytest.mark.parametrize("before", ["list", "create"])
def test_node_that_another_beats_to_a_subnet_gets_another_one(place: Place, before: str) -> None:
    won: list[Lease] = []
    requests = iter(["list", "create"])

    def beat() -> None:
        if next(requests, "") == before:
            won.append(place.store.acquire(place.config, node(1), WANTED))

    lost = place.another(beat).acquire(place.config, node(2), WANTED)
    assert [lease.key for lease in won] == [WANTED]
    assert leases(place.another(lambda: None)) == {
        "10.5.7.0/24": node(1).public_ip,
        str(lost): node(2).public_ip,
    }


@OF_KEYS
def test_subnet_of_another_node_is_not_taken(place: Place) -> None:
    place.put(7)
    lease = place.store.acquire(place.config, place.attrs, WANTED)
    assert lease.key != WANTED
    assert leases(place.another(lambda: None)) == {
        "10.5.7.0/24": IPv4Address("192.0.2.7"),
        str(lease): place.attrs.public_ip,
    }


# ---- renewal ---------------------------------------------------------------------------------------


@ALL
def test_renewal_keeps_the_lease_and_the_end_is_not_before(place: Place) -> None:
    lease = place.store.acquire(place.config, place.attrs, NOTHING)
    renewed = place.store.renew(lease)
    assert (renewed.key, renewed.attrs) == (lease.key, lease.attrs)
    assert (renewed.expires is None) == (lease.expires is None)
    assert (renewed.expires or 0) >= (lease.expires or 0) - 1  # v3 counts whole seconds


@ALL
def test_renewal_writes_new_attributes_for_the_others(place: Place) -> None:
    lease = place.store.acquire(place.config, place.attrs, NOTHING)
    moved = replace(place.attrs, public_ip=IPv4Address("192.0.2.77"))
    renewed = place.store.renew(replace(lease, attrs=moved))
    assert renewed.attrs.public_ip == moved.public_ip
    other = place.another(lambda: None)
    if "Kubernetes" in other.name:
        other.acquire(place.config, node(9), NOTHING)
    assert leases(other)[str(lease)] == moved.public_ip


@OF_KEYS
def test_renewal_writes_a_lease_that_was_lost(place: Place) -> None:
    lease = place.store.acquire(place.config, place.attrs, WANTED)
    place.delete(7)
    assert leases(place.another(lambda: None)) == {}
    assert place.store.renew(lease).key == WANTED
    assert leases(place.another(lambda: None)) == {"10.5.7.0/24": place.attrs.public_ip}


@OF_KEYS
def test_renewal_does_not_overwrite_the_lease_of_another_node(place: Place) -> None:
    lease = place.store.acquire(place.config, place.attrs, WANTED)
    place.delete(7)
    place.put(7)
    with pytest.raises(Retryable):
        place.store.renew(lease)
    assert leases(place.another(lambda: None)) == {"10.5.7.0/24": IPv4Address("192.0.2.7")}


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_renewal_waits_for_no_watch(place: Place) -> None:
    lease = place.store.acquire(place.config, place.attrs, NOTHING)
    watching = Watching(place.store)
    wait_for(watching.lists, DEADLINE, "the list")
    assert place.store.renew(lease).key == lease.key
    watching.end()
