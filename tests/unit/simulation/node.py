"""One simulated node: a host that lives on, and the daemon's processes that come and go on it.

A process runs the product's code: acquisition, keeper, watches, uplink manager, backend and controller.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv6Address

from msgspec.structs import replace

from flanneld.backends.contract import Factory
from flanneld.backends.host_gw import HostGw
from flanneld.backends.vxlan import VxlanBackend
from flanneld.config import Config
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.model import Event, IPAddress, Lease, LeaseKey, network_around, single
from flanneld.network.rtnetlink.monitor import InterfaceChanged, Notification
from flanneld.network.uplink_election import InterfaceChoice
from flanneld.network.uplink_facts import connected_networks
from flanneld.reconcile import last_run
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.local_node import LocalNode, UplinkManager, find_uplink
from flanneld.reconcile.peers import Peers
from flanneld.runtime.loop import EventQueue
from flanneld.runtime.supervisor import Supervisor
from flanneld.runtime.waits import Backoff
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import ForeignLink, Key, Resource, Route
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.store import LocalFacts
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kernel_tables import KernelTable, tables
from tests.unit.simulation.stores import SimulatedStore
from tests.unit.simulation.world import Crash, Task, World

UPLINK = "eth0"
BRIDGE = "cni0"
#: Seconds until a service manager starts a daemon that has ended again.
RESTART = 5.0
MARGIN = 3600.0
_BOOT = "this boot"
_FACTORIES: Mapping[str, Factory] = {"vxlan": VxlanBackend, "host-gw": HostGw}
#: Of each family: the length of the network on the uplink, its gateway, and a network behind another one.
_SURROUNDINGS: Mapping[int, tuple[int, str, str, str]] = {
    4: (16, "172.16.255.254", "203.0.113.0/24", "172.16.255.253"),
    6: (64, "fd77::ffff:fffe", "2001:db8::/64", "fd77::ffff:fffd"),
}


class Inbox(EventQueue[list[Event]]):
    """The controller's queue; who puts something in it goes on at once."""

    def __init__(self, wake: Callable[[], None], now: Callable[[], float]) -> None:
        self._news: deque[tuple[float, list[Event]]] = deque()
        self._wake = wake
        self._now = now
        self.since = 0.0

    def put(self, item: list[Event]) -> None:
        self._news.append((self._now(), item))
        self._wake()

    def drain(self) -> list[list[Event]]:
        items = [self._news.popleft() for _ in range(len(self._news))]
        self.since = items[0][0] if items else self.since
        return [item for _, item in items]

    def settle(self) -> None:
        pass


class SimulatedHost:
    """A machine: its kernel, ``subnet.env`` and the record of the last run outlive the daemon."""

    def __init__(
        self, world: World, number: int, config: Config, open_store: Callable[[Process], SimulatedStore]
    ) -> None:
        self.world = world
        self.name = f"n{number}"
        self.number = number
        self.config = config
        self.kernel = Kernel(UPLINK)
        if world.level <= logging.INFO:
            self.kernel.log = world.tell
        self.addresses: tuple[IPAddress, ...] = ()
        self.take_addresses(number)
        self.kernel.add_link(ForeignLink(BRIDGE, "bridge"))
        self.foreign = self.kernel.foreign()
        self.subnet_env: LeaseKey = (None, None)
        self.state: last_run.RunRecord | None = None
        self.machine = last_run.Machine(f"02:00:00:00:00:{number % 256:02x}", f"uuid of {self.name}")
        self.open_store = open_store
        self.process: Process | None = None
        self.is_on = False
        #: Operations that the next process may do before it ends; none if that is not limited.
        self.operations_left = math.inf
        #: Seconds between two audits of a table.
        self.audit = 30.0

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

    def tell(self, *news: Notification) -> None:
        """The kernel notifies the daemon of what another program changed."""
        if self.process is not None:
            self.kernel.monitor.tell(*news)

    def lose_addresses(self) -> None:
        """The uplink loses its addresses, and with them its routes."""
        for address in self.addresses:
            self.kernel.delete_address(UPLINK, address)
        self._tell_of_addresses()
        self.addresses = ()

    def take_addresses(self, number: int) -> None:
        """Have the addresses of this number, and the routes that come with them."""
        every: dict[int, IPAddress] = {
            4: IPv4Address("172.16.0.0") + number,
            6: IPv6Address("fd77::") + number,
        }
        self.addresses = tuple(every[family] for family in self.config.families)
        for address in self.addresses:
            length, gateway, behind, other = _SURROUNDINGS[address.version]
            hop, default = type(address)(gateway), network_around(type(address)(0), 0)
            self.kernel.add_address(UPLINK, address, length)
            self.kernel.add_route(Route(default, UPLINK, hop), 3, 100)
            net, _, bits = behind.partition("/")
            there = network_around(type(address)(net), int(bits))
            self.kernel.add_route(Route(there, UPLINK, type(address)(other)), 3)
        self.foreign = self.kernel.foreign()
        if self.process_is_there():
            self._tell_of_addresses()

    def process_is_there(self) -> bool:
        return getattr(self, "process", None) is not None

    def _tell_of_addresses(self) -> None:
        index = self.kernel.indexes[UPLINK]
        self.tell(*(InterfaceChanged(index, UPLINK, address=address) for address in self.addresses))

    def take_subnet(self, lease: Lease) -> None:
        """The daemon writes subnet.env, and a container runtime takes the subnet for its bridge."""
        self.subnet_env = lease.key
        desired = [Route(net, BRIDGE) for net in lease.key if net is not None]
        for held in list(self.kernel.all_routes()):
            if held.route.device == BRIDGE and held.route not in desired:
                self.kernel.delete_route(held.route)
        for route in desired:
            if all(held.route != route for held in self.kernel.at(route.destination)):
                self.kernel.add_route(route, 2)
        self.foreign = self.kernel.foreign()

    def record(self, **fields: object) -> None:
        """Keep something for the next run."""
        self.state = replace(self.state or last_run.RunRecord(), **fields)


class Process:
    """One run of the daemon."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host = host
        self.world = host.world
        self._is_over = False
        self._tasks: list[Task] = []
        self._backoff = Backoff()
        self.lease: Lease | None = None
        self.controller: Controller | None = None
        self.tables: dict[str, KernelTable] = {}
        self._stop = threading.Event()
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
    def peers(self) -> Peers | None:
        return self.controller.peers if self.controller else None

    @property
    def is_settled(self) -> bool:
        return self.controller is not None and all(each.settled for each in self.controller.tables.states())

    def desired(self) -> Mapping[Key, Resource]:
        """Return what the kernel's tables should hold."""
        return self.controller.peers.desired.state if self.controller else {}

    # ---- the daemon's main flow ------------------------------------------------------------------

    def _start(self, now: float) -> float:
        try:
            node = self._join()
            self._run(node)
        except (Retryable, Fatal) as reason:
            self.world.tell(f"waiting: {reason}")
            retry_after = reason.retry_after if isinstance(reason, Retryable) else 0.0
            return now + max(self._backoff.pause(), retry_after)
        return math.inf

    def _join(self) -> LocalNode:
        host, manager, kernel = self.host, self._store.manager, self.host.kernel
        config = manager.network_config()
        uplink = find_uplink(kernel, config, InterfaceChoice())
        written = last_run.proven_lease(host.state, host.machine, manager.name, host.subnet_env)
        stored = manager.stored(uplink.public(config.families[0])) or (written.attrs if written else None)
        uplinks = UplinkManager(
            kernel, config, InterfaceChoice(), _FACTORIES[config.backend_type], uplink, stored
        )
        avoided = (*connected_networks(kernel, config.families), *map(single, manager.addresses))
        local = LocalFacts(written, avoided, uplinks.is_self)
        lease = manager.acquire(config, uplinks.backend.attributes(), host.subnet_env, local)
        devices = last_run.devices_of_this_boot(host.state, _BOOT)
        host.record(
            boot_id=_BOOT,
            machine=host.machine,
            store=manager.name,
            subnets=lease.key,
            attributes=lease.attrs,
            devices=devices,
        )
        host.take_subnet(lease)
        return LocalNode(
            kernel,
            kernel.monitor,
            uplinks,
            lease,
            lambda left: tuple(self._make_tables(left).values()),
            devices=devices,
            record=host.record,
            store=manager,
            store_addresses=host.state.store_addresses if host.state else (),
        )

    def _make_tables(self, left: Callable[[], object]) -> dict[str, KernelTable]:
        self.tables = tables(self.host.kernel, left)  # type: ignore[arg-type]
        for table in self.tables.values():
            table.audit = self.host.audit
        return self.tables

    def _run(self, node: LocalNode) -> None:
        lease = self.lease = node.lease
        keeper = self._keeper(lease)

        def tell_keeper(events: list[Event]) -> None:
            keeper.deliver(events)
            keeping.wake()

        def moved() -> None:
            self._store.manager.reconnect()
            keeper.announce(node.uplink_manager.backend.attributes())
            keeping.wake()

        controller = Controller(
            node,
            RemovalGuard(),
            stop=self._stop,
            make_loop=Supervisor().loop,
            on_move=moved,
            on_synced=lambda: None,
            reread=self._store.reread,
            event_queue=Inbox(lambda: controlling.wake(), self.world.now),
        )
        controller.prepare()
        self.controller = controller
        controlling = self.start("reconciler", controller.step)
        node.kernel.monitor.wake = controlling.wake  # type: ignore[attr-defined]
        keeping = self.start("keeper", keeper.step)
        self._store.watch(self, controller.event_queue.put)
        self._store.watch_own(self, lease, tell_keeper)

    def _keeper(self, lease: Lease) -> LeaseKeeper:
        return LeaseKeeper(
            self._store.manager,
            lease,
            margin=MARGIN,
            stop=self._stop,
            make_loop=Supervisor().loop,
            revoked=self._revoked,
            contested=self._store.contested,
            written=lambda renewed: self.host.record(attributes=renewed.attrs),
            lost=lambda: self.host.record(attributes=None),
        )

    def _revoked(self) -> None:
        raise Retryable("our lease was revoked")

    def _ended(self, reason: BaseException) -> None:
        if not isinstance(reason, Retryable | Crash | Fatal | Cancelled):
            raise reason
        self.host.ended(reason)
