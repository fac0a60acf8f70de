"""One simulated node: a host that lives on, and the daemon's processes that come and go on it.

A process runs the product's code: acquisition, keeper, watches, peers, removal guard, backend and reconciler.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Protocol

from flanneld.backends.contract import Backend, Host
from flanneld.backends.host_gw import HostGw
from flanneld.backends.vxlan import build as build_vxlan
from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import Event, Lease, LeaseKey, Uplink
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.reconciler import Reconciler
from flanneld.runtime.backoff import Backoff
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import ForeignLink, Route
from flanneld.subnet.etcd.watch import KeyWatchMachine
from flanneld.subnet.kube.manager import KubeManager, KubeOptions
from flanneld.subnet.kube.nodes import DEFAULT_PREFIX
from flanneld.subnet.kube.watch import NodeWatchMachine
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.manager import Deliver, SubnetManager
from tests.unit.simulation.etcd import SimulatedEtcd, SimulatedWatcher, open_manager
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kube import SimulatedApi, SimulatedApiServer
from tests.unit.simulation.world import Crash, Task, World

UPLINK = "eth0"
BRIDGE = "cni0"
#: Seconds until a service manager starts a daemon that has ended again.
RESTART = 5.0
MARGIN = 3600.0


class Store(Protocol):
    """What differs between the stores, for one process."""

    @property
    def manager(self) -> SubnetManager: ...

    @property
    def contested(self) -> bool: ...

    def watch(self, process: Process, deliver: Deliver) -> None: ...

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None: ...

    def reread(self) -> None: ...

    def close(self) -> None: ...


class EtcdStore:
    """Watches of a process on etcd."""

    contested = True

    def __init__(self, etcd: SimulatedEtcd, process: Process) -> None:
        self.manager = self._etcd_manager = open_manager(etcd, process.count_operation)
        self._watches: list[KeyWatchMachine] = []

    def watch(self, process: Process, deliver: Deliver) -> None:
        self._follow(process, "watch", self._etcd_manager.watch_machine(deliver))

    def watch_own(self, process: Process, lease: Lease, deliver: Deliver) -> None:
        self._follow(process, "own watch", self._etcd_manager.own_watch_machine(lease, deliver))

    def reread(self) -> None:
        self._watches[0].reread()

    def close(self) -> None:
        for machine in self._watches:
            machine.close()
        self.manager.close()

    def _follow(self, process: Process, name: str, machine: KeyWatchMachine) -> None:
        watcher = machine._watcher
        assert isinstance(watcher, SimulatedWatcher)
        self._watches.append(machine)

        def step(now: float) -> float:
            wakeup = machine.step(now)
            # What came before the wait is news at once.
            return (
                max(wakeup, watcher.wait())
                if machine.listens and not watcher.has_more_than(machine._at)
                else wakeup
            )

        task = process.start(name, step)
        watcher.wake = task.wake


class KubeStore:
    """Watches of a process on the API server."""

    contested = False

    def __init__(self, server: SimulatedApiServer, process: Process, net_config: Path) -> None:
        def open_api(*_: object) -> Any:
            self._apis.append(SimulatedApi(server, process.count_operation))
            return self._apis[-1]

        self._apis: list[SimulatedApi] = []
        options = KubeOptions("http://127.0.0.1:1", "", DEFAULT_PREFIX, str(net_config), "")
        self.manager = self._kube_manager = KubeManager(
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


class SimulatedHost:
    """A machine: its kernel and ``subnet.env`` outlive the daemon."""

    def __init__(
        self, world: World, number: int, config: Config, open_store: Callable[[Process], Store]
    ) -> None:
        self.world = world
        self.name = f"n{number}"
        self.number = number
        self.config = config
        self.address = IPv4Address("172.16.0.0") + number
        self.kernel = Kernel(UPLINK, self.address)
        if world.level <= logging.INFO:
            self.kernel.log = world.tell
        self.kernel.add_route(Route(IPv4Network("172.16.0.0/16"), UPLINK), 2, 100)
        self.kernel.add_route(Route(IPv4Network("0.0.0.0/0"), UPLINK, IPv4Address("172.16.255.254")), 3, 100)
        self.kernel.add_route(Route(IPv4Network("203.0.113.0/24"), UPLINK, IPv4Address("172.16.255.253")), 3)
        self.kernel.add_link(ForeignLink(BRIDGE, "bridge"))
        self.foreign = self.kernel.foreign()
        self.subnet_env: LeaseKey = (None, None)
        self.open_store = open_store
        self.process: Process | None = None
        self.is_on = False
        #: Operations that the next process may do before it ends; none if that is not limited.
        self.operations_left = math.inf

    def start(self) -> None:
        """Let the service manager run the daemon."""
        self.is_on = True
        if self.process is None:
            self.process = Process(self)

    def stop(self) -> None:
        """Switch the machine off for good."""
        self.is_on = False
        self.kill()

    def kill(self) -> None:
        """End the daemon as SIGKILL does."""
        process, self.process = self.process, None
        if process is not None:
            process.end()

    def ended(self, reason: BaseException) -> None:
        """The daemon has ended by itself, or was killed: the service manager starts it again."""
        self.world.tell(f"the daemon has ended: {type(reason).__name__} {reason}")
        self.kill()
        self.world.at(self.world.time + RESTART, lambda: self.start() if self.is_on else None)

    def take_subnet(self, lease: Lease) -> None:
        """The daemon writes subnet.env, and a container runtime takes the subnet for its bridge."""
        self.subnet_env = lease.key
        assert lease.subnet is not None
        wanted = Route(lease.subnet, BRIDGE)
        for held in list(self.kernel.all_routes()):
            if held.route.device == BRIDGE and held.route != wanted:
                self.kernel.delete_route(held.route)
        if all(held.route != wanted for held in self.kernel.all_routes()):
            self.kernel.add_route(wanted, 2)
        self.foreign = self.kernel.foreign()


class Process:
    """One run of the daemon."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host = host
        self.world = host.world
        self._is_over = False
        self._tasks: list[Task] = []
        self._backoff = Backoff()
        self.lease: Lease | None = None
        self.peers: Peers | None = None
        self.reconciler: Reconciler | None = None
        self._stop = threading.Event()
        self._guard = RemovalGuard()
        self.host.kernel.before_write = self.count_operation
        self._store = host.open_store(self)
        self.start("start", self._start).wake()

    def count_operation(self) -> None:
        """Note a request to the store, or a write to the kernel; the process may end instead."""
        if self._is_over:
            raise Crash("a process that has ended goes on")
        self.host.operations_left -= 1
        if self.host.operations_left < 0:
            self.host.operations_left = math.inf
            raise Crash("killed")

    def start(self, name: str, step: Callable[[float], float]) -> Task:
        task = Task(self.world, f"{self.host.name} {name}", step, self._ended)
        self._tasks.append(task)
        task.wake()
        return task

    def end(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.end()
        self._store.close()

    @property
    def is_settled(self) -> bool:
        return self.reconciler is not None and all(state.settled for state in self.reconciler.states())

    # ---- the daemon's main flow ------------------------------------------------------------------

    def _start(self, now: float) -> float:
        try:
            lease, backend = self._join()
        except Retryable as reason:
            self.world.tell(f"waiting: {reason}")
            return now + max(self._backoff.pause(), reason.retry_after)
        self.lease = lease
        self.host.take_subnet(lease)
        networks = [each.network for each in self.host.config.ranges]
        self.peers = Peers(lease, networks, self._guard)
        self.peers.wish_locally(backend.local(lease))
        kernel = self.host.kernel
        wanted = {name: self.peers.wanted.table(name) for name in kernel.tables}
        self.reconciler = Reconciler(list(kernel.tables.values()), wanted, self._stop.is_set)
        self._reconcile = self.start("reconciler", self._reconcile_step)
        keeper = self._keeper(lease)
        self._store.watch(self, partial(self._hear, backend))

        def tell_keeper(events: list[Event]) -> None:
            keeper.deliver(events)
            keeping.wake()

        keeping = self.start("keeper", keeper.step)
        self._store.watch_own(self, lease, tell_keeper)
        return math.inf

    def _join(self) -> tuple[Lease, Backend]:
        config = self._store.manager.network_config()
        address = self.host.address
        uplink = Uplink(UPLINK, 2, 1500, address=address, public_ip=address)
        host = Host(
            uplink=uplink,
            stored=self._store.manager.stored(address),
            mac_of=self.host.kernel.mac_of,
            link_to=lambda _: UPLINK,
            random_bytes=self.world.random.randbytes,
        )
        backend: Backend = (
            build_vxlan(config, host) if config.backend_type == "vxlan" else HostGw(config, host)
        )
        return self._store.manager.acquire(config, backend.attributes(), self.host.subnet_env), backend

    def _keeper(self, lease: Lease) -> LeaseKeeper:
        return LeaseKeeper(
            self._store.manager,
            lease,
            margin=MARGIN,
            stop=self._stop,
            heartbeat=lambda _: None,
            revoked=self._revoked,
            contested=self._store.contested,
        )

    def _revoked(self) -> None:
        raise Retryable("our lease was revoked")

    # ---- leases to tables ------------------------------------------------------------------------

    def _hear(self, backend: Backend, events: list[Event]) -> None:
        assert self.peers is not None
        assert self.reconciler is not None
        was_synced = self.peers.synced
        delta = self.peers.take(events, backend)
        if was_synced:
            self.reconciler.change(delta, self.world.time)
        elif self.peers.synced:
            # Nothing is removed before the first snapshot.
            self.reconciler.converge(self.world.time)
        self.peers.tell()
        if self.peers.synced:
            self._reconcile.wake()
        if self._guard.next_reading < math.inf:
            self.world.at(self._guard.next_reading, self._read_again)

    def _reconcile_step(self, now: float) -> float:
        assert self.peers is not None
        assert self.reconciler is not None
        return self.reconciler.step(now) if self.peers.synced else math.inf

    def look_at_kernel(self) -> None:
        """The kernel has notified of a change."""
        if self.reconciler is not None:
            self._reconcile.wake(self.world.time + 0.005)

    def _read_again(self) -> None:
        if not self._is_over and self._guard.is_due():
            self._store.reread()

    def _ended(self, reason: BaseException) -> None:
        if not isinstance(reason, Retryable | Crash):
            known = type(reason).__name__ in ("Fatal", "Cancelled")
            if not known:
                raise reason
        self.host.ended(reason)
