"""The main flow, from the command line to the exit status."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flanneld import (
    __version__,
    backends,
    clock,
    events,
    glog,
    host_checks,
    notify,
    options,
    subnet_file,
    trouble,
)
from flanneld.brake import Brake
from flanneld.config import Config
from flanneld.errors import Fatal, Retryable
from flanneld.keeper import Keeper
from flanneld.model import Lease, Uplink
from flanneld.network.interface import InterfaceChoice, NoInterface
from flanneld.network.kernel import Kernel
from flanneld.network.monitor import Monitor
from flanneld.network.resources import Blackhole
from flanneld.options import Options
from flanneld.reconcile import Reconciler
from flanneld.sight import Sight
from flanneld.site import Site, find_uplink
from flanneld.subnet.manager import LONGEST_SILENCE, Cancelled, NodeStore, SubnetManager
from flanneld.subnet_file import Previous
from flanneld.supervisor import Supervisor
from flanneld.wiring import choice_for, open_manager

if TYPE_CHECKING:
    from flanneld.firewall import Firewall
    from flanneld.status_socket import StatusSocket

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_RETRY = 1.0
#: Threads hand over sooner than by default: an event reaches the kernel through two of them.
_SWITCH_INTERVAL = 0.0001
#: How long and how often to look whether the peers are known, before the rules that can wait, in seconds.
_SYNC_PATIENCE, _SYNC_LOOK = 5.0, 0.02
#: Objects made between two searches for reference cycles. A list of leases makes many, and no cycles.
_GARBAGE = 50_000


def main() -> None:
    """The console script."""
    status = run(sys.argv[1:], os.environ)
    sys.stderr.flush()
    # Taking thousands of leases apart, object by object, would only make a restart last longer.
    os._exit(status)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve until told to stop; the exit status is 0 then, 1 after a failure, 2 for wrong usage."""
    try:
        wanted = options.read(argv, environ)
        glog.setup(wanted.v, wanted.vmodule, wanted.log_backtrace_at)
    except options.HelpWanted as help_wanted:
        return _print(help_wanted.usage, status=0)
    except options.VersionWanted:
        return _print(f"{__version__}\n", status=0)
    except options.UsageError as wrong:
        return _print(f"{wrong.reason}\n{wrong.usage}", status=2)
    except Fatal as wrong:
        return _print(f"flanneld: {wrong}\n", status=1)
    if wanted.is_errand:
        from flanneld import errands  # none of it is the daemon's

        return errands.run(wanted, environ)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    try:
        return Daemon(wanted, environ).serve()
    except Cancelled:
        return 0
    except Fatal as failure:
        log.critical("%s", failure)
        return 1


@dataclass(frozen=True, slots=True)
class Member:
    """What makes this node a member of the network."""

    manager: SubnetManager
    config: Config
    previous: Previous
    kernel: Kernel
    monitor: Monitor
    site: Site
    lease: Lease


class Daemon:
    """One run of flanneld: everything is built once, in the order in which it is needed."""

    def __init__(self, wanted: Options, environ: Mapping[str, str]) -> None:
        self._options = wanted
        self._environ = environ
        self._supervisor = Supervisor(quiet=(Cancelled,))
        self._notifier = notify.Notifier()
        self._missing = ["no lease yet"]
        #: What the start waits for at the moment, and why.
        self._waiting: list[str] = []
        self._report: Callable[[str], None] = lambda _reason: None
        self._once = glog.Once()
        self._written: subnet_file.SubnetEnv | None = None
        self._status_socket: StatusSocket | None = None
        self._sight = Sight(wanted, events.remember(), self._supervisor.overdue, lambda: list(self._missing))

    def serve(self) -> int:
        log.info("flanneld %s %s", __version__, self._options.described())
        self._supervisor.handle_signals()
        manager = open_manager(self._options, self._environ)
        self._sight.observe(manager)
        log.info("Leases are in %s", manager.name)
        if isinstance(manager, NodeStore):
            self._report = manager.report
        self._supervisor.start("closer", lambda: self._close_on_stop(manager))
        self._start_health_server()
        try:
            self._go_to_work(self._join(manager))
            return self._wait_and_stop()
        finally:
            # Also after a failure: there may be keys in temporary files.
            self._supervisor.stop.set()
            manager.close()

    def _join(self, manager: SubnetManager) -> Member:
        """Learn what the network is like, decide how this node takes part in it, and get its lease."""
        previous = subnet_file.read(Path(self._options.subnet_file))
        config = self._patiently("the network config", manager.network_config)
        for warning in config.warnings:
            log.warning("%s", warning)
        make_backend = backends.load(config.backend_type)
        kernel = Kernel()
        monitor = Monitor(kernel.port)
        choice = self._patiently("our node", lambda: choice_for(self._options, manager))
        uplink = self._find_uplink(kernel, config, choice)
        stored = self._patiently("the leases", lambda: manager.stored(uplink.public(config.families[0])))
        site = Site(kernel, config, choice, make_backend, uplink, stored, previous.networks)
        _warn_of_unread_keys(config)
        lease = self._patiently(
            "a lease", lambda: manager.acquire(config, site.backend.attributes(), previous.subnets)
        )
        log.info("Our subnet is %s, backend %s, MTU %d", lease, config.backend_type, site.backend.mtu)
        return Member(manager, config, previous, kernel, monitor, site, lease)

    def _go_to_work(self, member: Member) -> None:
        """Make the devices, tell this host about its subnet, and start what keeps all of it true."""
        start = self._supervisor.start
        keeper = self._keeper(member)
        reconciler = self._reconciler(member, keeper)
        self._sight.config, self._sight.keeper, self._sight.reconciler = member.config, keeper, reconciler
        self._patiently("the kernel", reconciler.prepare)
        if self._options.ip_masq:
            self._masquerade_now(member)
        self._write_subnet_file(member)
        host_checks.report(
            member.config.families, member.site.uplink.name, services=self._options.kube_subnet_mgr
        )
        self._missing[:] = ["the peers are not known yet"]
        watch, watch_own = member.manager.watch, member.manager.watch_own
        start("lease watch", lambda: watch(reconciler.inbox.put, self._alive("lease watch")))
        start("reconciler", reconciler.run, reconciler.cancel)
        alive = self._alive("own lease watch")
        start("own lease watch", lambda: watch_own(member.lease, keeper.deliver, alive))
        start("lease keeper", keeper.run, keeper.cancel)
        self._notifier.ready()
        if isinstance(member.manager, NodeStore) and self._options.set_node_network_unavailable:
            member.manager.mark_available()
        brief = f"{member.config.backend_type}: subnet {member.lease} through {member.site.uplink.name}"
        self._notifier.status(brief)
        start(
            "trouble", lambda: trouble.watch(self._sight, self._supervisor.stop, partial(self._tell, brief))
        )
        if self._options.peer_probes:
            self._probe_peers(member, reconciler)
        if not self._options.ip_masq:
            self._forward_soon(member)
        self._start_status_socket()

    # ---- the parts ---------------------------------------------------------------------------

    def _keeper(self, member: Member) -> Keeper:
        return Keeper(
            member.manager,
            member.lease,
            margin=60.0 * self._options.subnet_lease_renew_margin,
            stop=self._supervisor.stop,
            heartbeat=partial(self._supervisor.heartbeat, "lease keeper"),
            revoked=lambda: self._supervisor.request_stop("our lease was revoked"),
            contested=not isinstance(member.manager, NodeStore),
        )

    def _reconciler(self, member: Member, keeper: Keeper) -> Reconciler:
        return Reconciler(
            member.kernel,
            member.monitor,
            member.site,
            member.lease,
            extras=self._blackholes(member.lease),
            former=member.previous.networks,
            stop=self._supervisor.stop,
            heartbeat=partial(self._supervisor.heartbeat, "reconciler"),
            on_move=lambda: self._moved(member, keeper),
            on_synced=self._missing.clear,
            reread=member.manager.reread,
            brake=Brake(is_on=self._options.removal_brake),
        )

    # ---- the steps ---------------------------------------------------------------------------

    def _start_health_server(self) -> None:
        if self._options.healthz_port <= 0:
            return
        from flanneld.health import Checks, HealthServer  # only for those who ask for it

        checks = Checks(
            self._supervisor.overdue,
            lambda: not self._missing,
            lambda: [*self._missing, *self._waiting],
            lambda: [(part.name, part.trouble) for part in trouble.parts(self._sight)],
            self._metrics,
        )
        server = HealthServer(self._options.healthz_ip, self._options.healthz_port, checks)
        self._supervisor.start("health server", server.serve, server.close)

    def _metrics(self, accept: str) -> tuple[str, bytes]:
        from flanneld.metrics import page  # only for those who ask

        return page(self._sight, accept)

    def _start_status_socket(self) -> None:
        """Once the packets flow, or as soon as there is something to wait for."""
        if self._status_socket is not None:
            return
        from flanneld.status_socket import StatusSocket, path_beside

        self._status_socket = StatusSocket(path_beside(Path(self._options.subnet_file)), self._document)
        if self._status_socket.open():
            self._supervisor.start("status socket", self._status_socket.serve, self._status_socket.close)

    def _document(self) -> Iterable[bytes]:
        from flanneld.status import pieces  # only for those who ask

        return pieces(self._sight)

    def _patiently(self, what: str, attempt: Callable[[], Result]) -> Result:
        """Try each second until it works, and say why not once. Raises ``Cancelled`` on a stop."""
        while not self._supervisor.stop.is_set():
            try:
                result = attempt()
            except Retryable as reason:
                self._once.warn(log, what, f"Waiting for {what}: {reason}")
                self._waiting[:] = [f"waiting for {what}: {reason}"]
                self._notifier.status(self._waiting[0])
                self._report(self._waiting[0])
                self._start_status_socket()
                self._supervisor.stop.wait(max(_RETRY, reason.retry_after))
                continue
            self._waiting.clear()
            if self._once.clear(what):
                log.info("Got %s", what)
            return result
        raise Cancelled

    def _find_uplink(self, kernel: Kernel, config: Config, choice: InterfaceChoice) -> Uplink:
        """Elect the uplink, waiting for it as long as ``--iface-wait`` says."""
        deadline = clock.now() + self._options.iface_wait

        def attempt() -> Uplink:
            try:
                return find_uplink(kernel, config, choice)
            except NoInterface as failure:
                if clock.now() >= deadline:
                    raise
                raise Retryable(failure.problem, failure.remedy) from failure
            except OSError as failure:
                raise Retryable(f"cannot read the interfaces: {failure}") from failure

        uplink = self._patiently("an external interface", attempt)
        log.info("The external interface is %s", uplink)
        return uplink

    def _firewall(self, member: Member) -> Firewall:
        # Not needed by everybody, and not before the packets flow.
        from flanneld.firewall import Firewall, wishes_of

        wishes = wishes_of(self._options, member.config, member.lease.key, member.previous)
        heartbeat = partial(self._supervisor.heartbeat, "firewall")
        self._sight.firewall = Firewall(wishes, stop=self._supervisor.stop, heartbeat=heartbeat)
        return self._sight.firewall

    def _probe_peers(self, member: Member, reconciler: Reconciler) -> None:
        from flanneld.probes import Prober  # only for those who ask for it

        heartbeat = partial(self._supervisor.heartbeat, "prober")
        self._sight.prober = Prober(
            self._options.peer_probes,
            member.lease,
            reconciler,
            stop=self._supervisor.stop,
            heartbeat=heartbeat,
        )
        self._supervisor.start("prober", self._sight.prober.run)

    def _masquerade_now(self, member: Member) -> None:
        """A container must not be seen outside with an address that nobody there can answer."""
        wall = self._firewall(member)
        wall.start()
        self._supervisor.start("firewall", wall.run, wall.cancel)

    def _forward_soon(self, member: Member) -> None:
        """Rules that only let traffic through come after the routes on which it goes."""
        walls: list[Firewall] = []

        def run() -> None:
            deadline = clock.now() + _SYNC_PATIENCE
            while self._missing and clock.now() < deadline:
                if self._supervisor.stop.wait(_SYNC_LOOK):
                    return
            walls.append(self._firewall(member))
            walls[0].start_and_run()

        def cancel() -> None:
            for wall in walls:
                wall.cancel()

        self._supervisor.start("firewall", run, cancel)

    def _blackholes(self, lease: Lease) -> tuple[Blackhole, ...]:
        """So that what is for a container that is no more does not go round between host and gateway."""
        wanted = lease.key if self._options.ip_blackhole_route else ()
        return tuple(Blackhole(net) for net in wanted if net is not None)

    def _write_subnet_file(self, member: Member) -> None:
        """A file that cannot be written is only a warning, as upstream has it: the network works without."""
        env = subnet_file.SubnetEnv(
            networks=tuple(each.network for each in member.config.ranges),
            subnets=tuple(net for net in member.lease.key if net is not None),
            mtu=member.site.backend.mtu,
            ip_masq=self._options.ip_masq,
        )
        if env == self._written:
            return
        try:
            subnet_file.write(Path(self._options.subnet_file), env)
        except Retryable as failure:
            log.warning("%s", failure)
            return
        self._written = env
        log.info("Wrote %s", self._options.subnet_file)

    def _alive(self, name: str) -> Callable[[], None]:
        return partial(self._supervisor.heartbeat, name, LONGEST_SILENCE)

    def _moved(self, member: Member, keeper: Keeper) -> None:
        """The uplink is another one: the store, the peers and this host have to know."""
        member.manager.reconnect()
        keeper.announce(member.site.backend.attributes())
        self._write_subnet_file(member)

    def _tell(self, brief: str, troubles: list[str]) -> None:
        self._notifier.status("; ".join([brief, *troubles]))
        if troubles:
            self._report("; ".join(troubles))

    def _wait_and_stop(self) -> int:
        interval = notify.watchdog_interval(self._environ)
        self._supervisor.wait(self._tick, interval)
        self._notifier.stopping()
        for name in self._supervisor.shutdown():
            log.warning("%s did not stop in time", name)
        return 1 if self._supervisor.failure else 0

    def _tick(self) -> None:
        if not self._supervisor.overdue():
            self._notifier.watchdog()

    def _close_on_stop(self, manager: SubnetManager) -> None:
        """Cuts every blocked request of any thread, this one's included."""
        self._supervisor.stop.wait()
        manager.close()


def _warn_of_unread_keys(config: Config) -> None:
    for key, nearest in config.backend.unread():
        hint = f"; did you mean {nearest}?" if nearest else ""
        log.warning("Unknown key %s in Backend of the network config%s", key, hint)


def _print(text: str, *, status: int) -> int:
    sys.stderr.write(text)
    return status
