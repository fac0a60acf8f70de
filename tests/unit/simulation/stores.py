"""Stores of one process of a simulated node: etcd in either API or both, or Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flanneld.model import Lease
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


class SimulatedStore(Protocol):
    """What differs between the stores, for one process."""

    @property
    def manager(self) -> Store: ...

    @property
    def contested(self) -> bool: ...

    def watch(self, process: Process, deliver: Deliver) -> None: ...

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None: ...

    def reread(self) -> None: ...

    def close(self) -> None: ...


class SimulatedEtcdStore:
    """Watches of a process on etcd, in each API that the cluster uses."""

    contested = True

    def __init__(self, etcds: Sequence[SimulatedEtcd], process: Process) -> None:
        self._clients = [SimulatedClient(etcd, process.count_operation) for etcd in etcds]
        sides = [store_on(client) for client in self._clients]
        self._both = BothStores(*sides, pause=process.world.pause) if len(sides) > 1 else None
        self._sides = sides
        self.manager: Store = self._both or sides[0]
        self._watches: list[ListWatch[Position]] = []

    def watch(self, process: Process, deliver: Deliver) -> None:
        hear = self._both.hearing(deliver) if self._both else None
        for side, client in zip(self._sides, self._clients, strict=True):
            told = partial(hear, side.api) if hear else deliver
            self._follow(process, f"{side.api} watch", side.lease_watch(), client, told)

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None:
        hear = self._both.hearing_own(lease, deliver) if self._both else None
        for side, client in zip(self._sides, self._clients, strict=True):
            told = partial(hear, side.api) if hear else deliver
            self._follow(process, f"{side.api} own watch", side.own_watch(lease), client, told)

    def reread(self) -> None:
        for watch in self._watches:
            watch.reread()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        self.manager.close()

    def _follow(
        self,
        process: Process,
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

        task = process.start(name, step)


class SimulatedKubeStore:
    """Watches of a process on the API server."""

    contested = False

    def __init__(self, server: SimulatedApiServer, process: Process, net_config: Path) -> None:
        def open_api(*_: object) -> Any:
            self._apis.append(SimulatedApi(server, process.count_operation))
            return self._apis[-1]

        self._apis: list[SimulatedApi] = []
        options = KubeOptions("http://127.0.0.1:1", "", DEFAULT_PREFIX, str(net_config), "")
        self.manager = self._kube_manager = KubeStore(
            options, {"NODE_NAME": process.host.name}, open_api=open_api
        )
        self._watch: ListWatch[str] | None = None

    def watch(self, process: Process, deliver: Deliver) -> None:
        watch = self._watch = self._kube_manager.node_watch(deliver)

        def step(now: float) -> float:
            wakeup = watch.step(now, deliver)
            api = self._apis[-1]
            api.wake = task.wake
            stream = api.stream
            if stream is not None and not stream.has_news():
                return max(wakeup, stream.wait())
            return wakeup

        task = process.start("watch", step)

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None:
        del lease
        steps: list[Callable[[float], float]] = []
        task = process.start("own watch", lambda now: steps[0](now))
        steps.append(self._kube_manager.own_watch_step(deliver, task.wake))
        self.manager.mark_available()

    def reread(self) -> None:
        self.manager.reread()
        assert self._watch is not None
        self._watch.reread()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.manager.close()
