"""One simulated node: a host that lives on, and the daemon's processes that come and go on it.

A process runs the product's node, which starts and waits in steps of the simulated world.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from msgspec.structs import replace

from flanneld.backends.contract import HostServices
from flanneld.config import Config
from flanneld.effects import Effects
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.model import Event, IPAddress, Lease, LeaseKey, network_around
from flanneld.network.host_settings import KernelForwardingTable
from flanneld.network.rtnetlink.kernel import InterfaceChanged, Notification
from flanneld.node import Node
from flanneld.options import Options
from flanneld.reconcile import controller, last_run
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counters import counted
from flanneld.reconcile.peers import Peers
from flanneld.runtime.process import Notifier
from flanneld.runtime.supervisor import EventQueue, nothing
from flanneld.runtime.waits import Backoff
from flanneld.startup import SingleAttempts
from flanneld.state.resources import ForeignLink, Key, Link, Resource, Route
from flanneld.state.table import Put, Report, Scope, Seen
from flanneld.subnet import subnet_file
from flanneld.subnet.store import Store
from flanneld.subnet.subnet_file import Previous
from tests.unit.simulation.encrypting import Secrets
from tests.unit.simulation.kernel import Kernel
from tests.unit.simulation.kernel_tables import KernelTable, tables
from tests.unit.simulation.world import Crash, Task, World

UPLINK = "eth0"
BRIDGE = "cni0"
#: Seconds until a service manager starts a daemon that has ended again.
RESTART = 5.0
#: Seconds before its end in which a lease is renewed, as the options have it.
MARGIN = 3600.0
_BOOT = "this boot"
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
        self, world: World, number: int, config: Config, open_store: Callable[[Process], Store]
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
        self.services = HostServices(secret=Secrets(self.kernel))
        self.open_store = open_store
        self.process: Process | None = None
        self.is_on = False
        #: Called before and after each write of the daemon to the store, the kernel or a file.
        self.on_effect: Callable[[str], None] = lambda _: None
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
        self.foreign = self.kernel.foreign()
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
        state = replace(self.state or last_run.RunRecord(), **fields)
        if state != self.state:
            self.effect("before the record is written")
            self.state = state
            self.effect("after the record is written")

    def effect(self, when: str) -> None:
        """Tell of a moment next to an effect; the process may end there."""
        self.on_effect(when)


class SimulatedStateFile(last_run.StateFile):
    """The record of the last run, on a simulated host."""

    def __init__(self, host: SimulatedHost) -> None:
        super().__init__(Path(host.name))
        self._host = host

    def load(self) -> last_run.RunRecord | None:
        return self._host.state

    def update(self, **changes: object) -> None:
        self._host.record(**changes)

    def is_writable(self) -> bool:
        return True


class SimulatedSubnetFile:
    """Table of subnet.env on a simulated host, whose container runtime reads it at once."""

    name = subnet_file.TABLE
    what = "subnet.env"
    worker = "host"
    vital = False
    needs: frozenset[str] = frozenset()
    audit: float | None = None

    def __init__(self, process: Process) -> None:
        self._process = process
        self._content: list[Resource] = []

    def read(self, scope: Scope) -> Iterable[Seen]:
        del scope
        return map(Seen, self._content)

    def put(self, puts: Sequence[Put]) -> Report:
        self._process.host.effect("before subnet.env is written")
        self._content = [put.want for put in puts]
        self._process.subnet_file_written()
        self._process.host.effect("after subnet.env is written")
        return Report(made=list(self._content))

    def drop(self, found: Sequence[Resource]) -> Report:
        del found
        return Report()

    def close(self, *, remove: bool) -> None:
        del remove


class UnwatchedForwarding(KernelForwardingTable):
    """The kernel's forwarding, which nothing changes on a simulated host."""

    next_look = math.inf


class SimulatedLoop:
    """Loop of a task, which the world steps once it runs."""

    def __init__(self, process: Process, name: str, step: Callable[[float], float]) -> None:
        self._process = process
        self._name = name
        self._step = step
        self._task: Task | None = None

    def run(self) -> None:
        self._task = self._process.start(self._name, self._step)

    def cancel(self) -> None:
        if self._task:
            self._task.wake()

    def is_alive(self) -> None:
        pass


class SimulatedTasks:
    """Tasks of a process. Each runs until it has told the world what to step."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.failure: BaseException | None = None

    def start(self, name: str, run: Callable[[], None], cancel: Callable[[], None] = nothing, /) -> None:
        del cancel
        if name != "firewall":
            run()

    def request_stop(self, reason: str, /) -> None:
        raise Retryable(reason)

    def heartbeat(self, name: str, within: float, /) -> None:
        pass

    def overdue(self) -> list[str]:
        return []

    def wait(self, *ticks: tuple[Callable[[], None], float]) -> None:
        raise NotImplementedError

    def shutdown(self) -> list[str]:
        raise NotImplementedError


class Process:
    """One run of the daemon: the product's node, with the effects of a simulated host."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host = host
        self.world = host.world
        self._is_over = False
        self._tasks: list[Task] = []
        self._loops: dict[str, SimulatedLoop] = {}
        self._backoff = Backoff()
        self._node: Node | None = None
        self._begun: Node | None = None
        self.tables: dict[str, KernelTable] = {}
        self.host.kernel.before_write = self._before_write
        self.host.kernel.after_write = lambda: host.effect("after a write to the kernel")
        self._store = host.open_store(self)
        options = Options(subnet_file=f"/{host.name}/subnet.env", ip_blackhole_route=False)
        self._options = replace(options, subnet_lease_renew_margin=MARGIN / 60.0)
        self._effects = self._make_effects()
        self.start("start", self._start).wake()

    def _make_effects(self) -> Effects:
        host = self.host
        path = Path(self._options.subnet_file)
        return Effects(
            tasks=SimulatedTasks(),
            make_loop=self._make_loop,
            notifier=Notifier(),
            services=host.services,
            make_queue=lambda: Inbox(lambda: self._loops[controller.NAME].cancel(), self.world.now),
            read_past=lambda _: (
                Previous(subnets=host.subnet_env),
                last_run.LastRun(path, file=SimulatedStateFile(host), boot_id=_BOOT),
            ),
            open_kernel=lambda: (host.kernel, host.kernel.monitor),
            machine_of=lambda _kernel, _uplink: host.machine,
            kernel_tables=lambda _kernel, stale, _networks, _options: self._make_tables(stale),
            file_table=lambda _path, _written: SimulatedSubnetFile(self),
            forwarding_table=lambda _families, uplink, keep: UnwatchedForwarding((), uplink, keep=keep),
            report_settings=lambda *_, **__: None,
            tries_routes=False,
        )

    def _make_loop(
        self, name: str, step: Callable[[float], float], sources: Callable[[], Iterable[int]] = tuple
    ) -> SimulatedLoop:
        del sources
        loop = self._loops[name] = SimulatedLoop(self, name, step)
        return loop

    def _make_tables(self, stale: Callable[[], Iterable[Link]]) -> tuple[KernelTable, ...]:
        self.tables = tables(self.host.kernel, stale)
        for table in self.tables.values():
            table.audit = self.host.audit
        return tuple(self.tables.values())

    def subnet_file_written(self) -> None:
        assert self._node is not None
        assert self._node.member is not None
        self.host.take_subnet(self._node.member.lease)

    def _before_write(self) -> None:
        self.count_operation()
        self.host.effect("before a write to the kernel")

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
    def lease(self) -> Lease | None:
        return self._begun.member.lease if self._begun and self._begun.member else None

    @property
    def controller(self) -> Controller | None:
        return self._begun.controller if self._begun else None

    @property
    def peers(self) -> Peers | None:
        return self.controller.peers if self.controller else None

    @property
    def is_settled(self) -> bool:
        return self.controller is not None and all(each.settled for each in self.controller.tables.states())

    def desired(self) -> Mapping[Key, Resource]:
        """Return what the kernel's tables should hold."""
        return self.controller.peers.desired.state if self.controller else {}

    def _start(self, now: float) -> float:
        """Make one attempt to start a node, as often as its stages ask for another."""
        node = self._node = Node(self._options, self._effects, counted(self._store))
        try:
            node.join(SingleAttempts())
            node.begin(SingleAttempts())
        except (Retryable, Fatal) as reason:
            self.world.tell(f"waiting: {reason}")
            retry_after = reason.retry_after if isinstance(reason, Retryable) else 0.0
            return now + max(self._backoff.pause(), retry_after)
        self._begun = node
        self.host.kernel.monitor.wake = self._loops[controller.NAME].cancel
        return math.inf

    def _ended(self, reason: BaseException) -> None:
        if not isinstance(reason, Retryable | Crash | Fatal | Cancelled):
            raise reason
        self.host.ended(reason)
