"""Stores of one process of a simulated node: etcd in either API or both, or Kubernetes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flanneld.model import Lease
from flanneld.subnet.etcd.both import BothStores
from flanneld.subnet.etcd.store import EtcdStore
from flanneld.subnet.kube.nodes import DEFAULT_PREFIX
from flanneld.subnet.kube.store import KubeOptions, KubeStore
from flanneld.subnet.kube.watch import NodeWatchMachine
from flanneld.subnet.list_watch import KeyWatchMachine
from flanneld.subnet.store import Deliver, Store
from tests.unit.simulation.etcd import SimulatedEtcd, SimulatedWatcher, open_manager
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
        sides = [open_manager(etcd, process.count_operation) for etcd in etcds]
        self._both = BothStores(*sides, pause=process.world.pause) if len(sides) > 1 else None
        self._sides = sides
        self.manager: Store = self._both or sides[0]
        self._watches: list[KeyWatchMachine] = []

    def watch(self, process: Process, deliver: Deliver) -> None:
        for side, hear in self._heard(self._both.hearing(deliver) if self._both else deliver):
            self._follow(process, f"{side.api} watch", side.watch_machine(hear))

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None:
        for side, hear in self._heard(self._both.hearing_own(lease, deliver) if self._both else deliver):
            self._follow(process, f"{side.api} own watch", side.own_watch_machine(lease, hear))

    def reread(self) -> None:
        self.manager.reread()
        for machine in self._watches:
            machine.reread()

    def close(self) -> None:
        for machine in self._watches:
            machine.close()
        self.manager.close()

    def _heard(self, deliver: Any) -> list[tuple[EtcdStore, Deliver]]:
        return [(side, partial(deliver, side.api) if self._both else deliver) for side in self._sides]

    def _follow(self, process: Process, name: str, machine: KeyWatchMachine) -> None:
        watcher = machine._watcher
        assert isinstance(watcher, SimulatedWatcher)
        self._watches.append(machine)

        def step(now: float) -> float:
            wakeup = machine.step(now)
            at = machine._at
            # What came before the wait is news at once.
            return wakeup if at is None or watcher.has_more_than(at) else max(wakeup, watcher.wait(at))

        task = process.start(name, step)
        watcher.wake = task.wake


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
        self._machine: NodeWatchMachine | None = None

    def watch(self, process: Process, deliver: Deliver) -> None:
        machine = self._machine = self._kube_manager.watch_machine(deliver)
        api = self._apis[-1]

        def step(now: float) -> float:
            wakeup = machine.step(now)
            stream = api.stream
            if machine.listens and stream is not None and not stream.has_news():
                return max(wakeup, stream.wait())
            return wakeup

        task = process.start("watch", step)
        api.wake = task.wake

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None:
        del lease
        member = self._kube_manager._joined()
        task = process.start("own watch", self._kube_manager.own_watch_step(deliver))
        member.upkeep._wake = task.wake
        member.upkeep.mark_available()

    def reread(self) -> None:
        assert self._machine is not None
        self._machine.reread()

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
        self.manager.close()
