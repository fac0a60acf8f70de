"""One suite of a store's watch: list, changes, new lists, new connections and the end, over every store."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from flanneld.errors import Cancelled
from flanneld.model import Event, Snapshot
from flanneld.options import read
from flanneld.subnet.opening import open_store
from flanneld.subnet.store import Store
from tests.lab.wait import wait_for
from tests.local_cluster import ATTRS, peers, running_cluster
from tests.local_etcd import DEADLINE, LocalEtcd, server, silent
from tests.unit.subnet.remote.servers import CONFIG, ROOT, LocalFile, running_server

STORES = ["v2", "v3", "v3 over gRPC", "both", "file", "remote", "Kubernetes"]
_numbers = itertools.count()


class Place(Struct):
    """A store with a way to add and remove the leases of others behind its back."""

    store: Store
    put: Callable[[int], object]
    delete: Callable[[int], object]


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, etcd: LocalEtcd, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as end:
        if request.param == "Kubernetes":
            cluster = end.enter_context(running_cluster(tmp_path))
            store = cluster.open()
            store.acquire(cluster.config, ATTRS, (None, None))

            def delete(number: int) -> None:
                cluster.control.delete_node(f"n{number}")

            place = Place(store, cluster.put_peer, delete)
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
        store = open_store(read(flags, {}), {})
        store.network_config()
        yield Place(store, put, delete)


class Watching:
    """The watch of a store in a thread."""

    def __init__(self, store: Store) -> None:
        self.events: list[Event] = []
        self.ended: list[BaseException] = []
        self._store = store
        self._thread = threading.Thread(target=self._run)
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
