"""Stores of one process of a simulated node: etcd in either API or both, or Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flanneld.model import Lease
from flanneld.runtime.supervisor import nothing
from flanneld.subnet.etcd.both import BothStores
from flanneld.subnet.etcd.keys import Position
from flanneld.subnet.kube.nodes import DEFAULT_PREFIX
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from flanneld.subnet.list_watch import ListWatch
from flanneld.subnet.store import Deliver, Store
from tests.unit.simulation.etcd import SimulatedClient, SimulatedEtcd, store_on
from tests.unit.simulation.kube import SimulatedApi, SimulatedApiServer

if TYPE_CHECKING:
    from tests.unit.simulation.node import Process


class SimulatedEtcdStore:
    """Store of a process in etcd, in each API that the cluster uses; its watches are stepped by the world."""

    def __init__(self, etcds: Sequence[SimulatedEtcd], process: Process) -> None:
        self._clients = [
            SimulatedClient(etcd, process.count_operation, process.host.effect) for etcd in etcds
        ]
        sides = [store_on(client) for client in self._clients]
        self._both = BothStores(*sides, pause=process.world.pause) if len(sides) > 1 else None
        self._sides = sides
        self._process = process
        self._store: Store = self._both or sides[0]
        self._watches: list[ListWatch[Position]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def watch(self, deliver: Deliver, _alive: Callable[[], None]) -> None:
        hear = self._both.hearing(deliver) if self._both else None
        for side, client in zip(self._sides, self._clients, strict=True):
            told = partial(hear, side.api) if hear else deliver
            self._follow(f"{side.api} watch", side.lease_watch(), client, told)

    def watch_own(self, lease: Lease, deliver: Deliver, _alive: Callable[[], None]) -> None:
        hear = self._both.hearing_own(lease, deliver) if self._both else None
        for side, client in zip(self._sides, self._clients, strict=True):
            told = partial(hear, side.api) if hear else deliver
            self._follow(f"{side.api} own watch", side.own_watch(lease), client, told)

    def reread(self) -> None:
        for watch in self._watches:
            watch.reread()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        self._store.close()

    def _follow(
        self,
        name: str,
        watch: ListWatch[Position],
        client: SimulatedClient,
        deliver: Deliver,
    ) -> None:
        self._watches.append(watch)

        def step(now: float) -> float:
            wakeup = watch.step(now, deliver)
            watcher = client.watchers[watch.name]
            watcher.wake = task.wake
            # What came before the wait is news at once.
            if watch.at is None or watcher.has_more_than(watch.at):
                return wakeup
            return max(wakeup, watcher.wait(watch.at))

        task = self._process.start(name, step)


class SimulatedKubeStore(KubeStore):
    """Store of a process in Kubernetes; its watches are stepped by the world."""

    def __init__(self, server: SimulatedApiServer, process: Process, net_config: Path) -> None:
        def open_api(*_: object) -> Any:
            self._apis.append(SimulatedApi(server, process.count_operation, process.host.effect))
            return self._apis[-1]

        self._apis: list[SimulatedApi] = []
        self._process = process
        self._watch: ListWatch[str] | None = None
        options = KubeOptions("http://127.0.0.1:1", "", DEFAULT_PREFIX, str(net_config), "")
        super().__init__(options, {"NODE_NAME": process.host.name}, open_api=open_api)

    def watch(self, deliver: Deliver, alive: Callable[[], None] = nothing) -> None:
        watch = self._watch = self.node_watch(deliver)
        del alive

        def step(now: float) -> float:
            wakeup = watch.step(now, deliver)
            api = self._apis[-1]
            api.wake = task.wake
            stream = api.stream
            if stream is not None and not stream.has_news():
                return max(wakeup, stream.wait())
            return wakeup

        task = self._process.start("watch", step)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None] = nothing) -> None:
        del lease, alive
        steps: list[Callable[[float], float]] = []
        task = self._process.start("own watch", lambda now: steps[0](now))
        steps.append(self.own_watch_step(deliver, task.wake))

    def reread(self) -> None:
        super().reread()
        assert self._watch is not None
        self._watch.reread()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        super().close()
