"""Effects of a node: what it reads and writes outside itself, and the threads that step its parts.

A dry run and a simulator of whole clusters start the same node with effects of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct, structs

from flanneld.backends.contract import HostServices
from flanneld.model import FAMILIES, Event, IPNetwork, Uplink
from flanneld.network import host_settings, processes
from flanneld.network.host import HostKernel, HostMonitor
from flanneld.network.host_settings import KernelForwardingTable
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.tables import tables
from flanneld.options import Options
from flanneld.reconcile.last_run import LastRun, Machine, machine_of
from flanneld.reconcile.local_node import services_of_daemon, services_of_dry_run
from flanneld.runtime import process
from flanneld.runtime.process import Notifier
from flanneld.runtime.supervisor import EventQueue, MakeLoop, Supervisor, nothing
from flanneld.state.resources import Link
from flanneld.state.table import Table
from flanneld.subnet import subnet_file
from flanneld.subnet.subnet_file import Previous, SubnetFileTable


class Tasks(Protocol):
    """Tasks of a node, as ``Supervisor`` runs them in threads."""

    stop: threading.Event
    failure: BaseException | None

    def start(self, name: str, run: Callable[[], None], cancel: Callable[[], None] = nothing, /) -> None: ...

    def request_stop(self, reason: str, /) -> None: ...

    def heartbeat(self, name: str, within: float, /) -> None: ...

    def overdue(self) -> list[str]: ...

    def wait(self, *ticks: tuple[Callable[[], None], float]) -> None: ...

    def shutdown(self) -> Sequence[str]: ...


class Effects(Struct, frozen=True):
    """Effects of one node.

    - ``read_past`` reads subnet.env and the state file, which belong together.
    - ``kernel_tables`` returns the kernel's tables in the order of creation. Its arguments are the kernel,
      the devices to sweep, the cluster's networks, then former ones, and the options.
    - ``file_table`` returns the table of subnet.env, and calls the function after each write.
    - ``forwarding_table`` returns the table of the kernel's forwarding, and ``report_settings`` corrects or
      reports other settings of this host.
    - ``tries_routes`` is True if a start that does not reach the store may try without an earlier run's
      routes.
    - ``watchdog`` is the number of seconds between two reports to the service manager, None without reports.
    """

    tasks: Tasks
    make_loop: MakeLoop
    notifier: Notifier
    services: HostServices
    make_queue: Callable[[], EventQueue[list[Event]]]
    read_past: Callable[[Path], tuple[Previous, LastRun]]
    open_kernel: Callable[[], tuple[HostKernel, HostMonitor]]
    machine_of: Callable[[HostKernel, Uplink], Machine]
    kernel_tables: Callable[
        [HostKernel, Callable[[], Iterable[Link]], Sequence[IPNetwork], Options], Sequence[Table]
    ]
    file_table: Callable[[Path, Callable[[], None]], Table]
    forwarding_table: Callable[..., KernelForwardingTable]
    report_settings: Callable[..., None]
    tries_routes: bool = True
    watchdog: float | None = None


def real(
    options: Options,
    environ: Mapping[str, str],
    supervisor: Supervisor,
    notifier: Notifier,
    make_loop: MakeLoop | None = None,
) -> Effects:
    """Return the effects of a daemon on this host."""
    return Effects(
        tasks=supervisor,
        make_loop=make_loop or supervisor.loop,
        notifier=notifier,
        services=services_of_daemon(options.secret_dir, environ, supervisor.stop),
        make_queue=EventQueue,
        read_past=lambda path: (subnet_file.read(path), LastRun(path)),
        open_kernel=_open_kernel,
        machine_of=machine_of,
        kernel_tables=_kernel_tables,
        file_table=SubnetFileTable,
        forwarding_table=KernelForwardingTable,
        report_settings=host_settings.report,
        watchdog=process.watchdog_interval(environ),
    )


def dry_run(options: Options, environ: Mapping[str, str]) -> Effects:
    """Return effects that read this host and change nothing of it; the tables are still to be wrapped."""
    supervisor = Supervisor()
    services = services_of_dry_run(options.secret_dir, environ)
    return structs.replace(
        real(options, environ, supervisor, Notifier()),
        services=services,
        read_past=lambda path: (subnet_file.read(path), LastRun(path, is_dry_run=True)),
        tries_routes=False,
    )


def _open_kernel() -> tuple[Kernel, HostMonitor]:
    kernel = Kernel()
    return kernel, kernel.listen()


def _kernel_tables(
    kernel: HostKernel, stale: Callable[[], Iterable[Link]], networks: Sequence[IPNetwork], options: Options
) -> Sequence[Table]:
    """Return the tables of devices and routes, and of policies and charon left by an ipsec backend."""
    assert isinstance(kernel, Kernel)
    found: list[Table] = [*tables(kernel, stale, spread=options.route_protocol_spread == "auto")]
    if options.guard_tunnel:
        from flanneld.network.firewall.guard import GuardTable  # rarely needed

        found = [*(GuardTable(family) for family in FAMILIES), *found]
    if processes.has_xfrm_policies():
        from flanneld.network.xfrm_table import stale_tables  # rarely needed, and takes its time

        found += stale_tables(networks)
    if processes.CHARON_PID_FILE.exists():
        from flanneld.backends.ipsec.tables import stale_charon  # the same

        found += stale_charon()
    return found
