"""The main flow, from the command line to the exit status."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from flanneld import __version__, options
from flanneld.backends import registry
from flanneld.backends.contract import has_peers
from flanneld.compat import glog
from flanneld.config import Config
from flanneld.diagnostics import conditions, host_checks
from flanneld.diagnostics.components import Components
from flanneld.diagnostics.observation import Observation
from flanneld.errors import Cancelled, Fatal, Retryable, lacking
from flanneld.firewall_start import forward_soon, masquerade_now
from flanneld.model import Lease, Snapshot, Uplink
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.monitor import Monitor
from flanneld.network.uplink_election import InterfaceChoice, NoInterface
from flanneld.network.uplink_facts import connected_networks
from flanneld.options import Options
from flanneld.readiness import Readiness
from flanneld.reconcile.convergence import Node
from flanneld.reconcile.kernel_reconciler import KernelReconciler
from flanneld.reconcile.last_run import LastRun, machine_of
from flanneld.reconcile.uplink_manager import UplinkManager, find_uplink
from flanneld.runtime import clock, event_log, sd_notify
from flanneld.runtime.instance_lock import InstanceLock
from flanneld.runtime.process import ensure_descriptors, open_standard_streams
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.removal_guard import RemovalGuard
from flanneld.subnet import subnet_file
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.manager import LONGEST_SILENCE, LocalFacts, NodeStore, SubnetManager
from flanneld.subnet.subnet_file import Previous
from flanneld.wiring import choice_for, extras_for, open_manager

if TYPE_CHECKING:
    from flanneld.reconcile.firewall import Firewall

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Threads hand over sooner than by default: an event reaches the kernel through two of them.
_SWITCH_INTERVAL = 0.0001
#: Objects made between two searches for reference cycles. A list of leases makes many, and no cycles.
_GARBAGE = 50_000
_RECONCILER = "reconciler"
#: Seconds between two looks at subnet.env and at the kernel's forwarding.
_HOST_LOOK = 1.0


def main() -> None:
    """Run with the command line and the environment of this process, and end it."""
    open_standard_streams()
    status = run(sys.argv[1:], os.environ)
    with suppress(OSError):  # a full disk has no say in how we ended
        sys.stderr.flush()
    # Taking thousands of leases apart, object by object, would only make a restart last longer.
    os._exit(status)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve until told to stop; the exit status is 0 then, 1 after a failure, 2 for wrong usage."""
    if not sys.warnoptions:
        # Libraries warn programmers; an operator hears from us what is wrong.
        warnings.simplefilter("ignore")
    try:
        wanted = options.read(argv, environ)
        glog.setup(wanted.v, wanted.vmodule, wanted.log_backtrace_at)
        ensure_descriptors()
    except options.HelpWanted as help_wanted:
        return _print(help_wanted.usage, status=0)
    except options.VersionWanted:
        return _print(f"{__version__}\n", status=0)
    except options.UsageError as wrong:
        return _print("\n".join([wrong.reason, wrong.usage]), status=2)
    except Fatal as wrong:
        return _print(f"flanneld: {wrong}\n", status=1)
    _warn_of_unknown_variables(environ)
    if wanted.is_errand:
        from flanneld import oneshot  # none of it is the daemon's

        return oneshot.run(wanted, environ)
    return _serve(wanted, environ)


def _serve(wanted: Options, environ: Mapping[str, str]) -> int:
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
    except Exception as error:
        lack = lacking(error)
        if lack is None:
            raise
        log.critical("%s", lack)
        return 1


class Member(Struct, frozen=True, gc=False):
    """What makes this node a member of the network."""

    manager: SubnetManager
    config: Config
    previous: Previous
    last_run: LastRun
    kernel: Kernel
    monitor: Monitor
    uplink_manager: UplinkManager
    lease: Lease


class Daemon:
    """One run of flanneld: everything is built once, in the order in which it is needed."""

    def __init__(self, wanted: Options, environ: Mapping[str, str]) -> None:
        self._options = wanted
        self._environ = environ
        self._supervisor = Supervisor(quiet=(Cancelled,))
        self._notifier = sd_notify.Notifier()
        self._readiness = Readiness(self._supervisor.stop, self._notifier)
        path = Path(wanted.subnet_file)
        self._lock = InstanceLock(subnet_file.beside(path, "lock"))
        self._last_run: LastRun | None = None
        self._subnet_file = subnet_file.SubnetFile(path, self._subnet_file_written)
        #: What is to be done as soon as subnet.env is written.
        self._when_written: Callable[[], None] | None = None
        self._forwarding: host_checks.Forwarding | None = None
        #: This node in a few words, and the conditions that were told last.
        self._brief = ""
        self._told: list[str] = []
        self._components = Components(
            wanted,
            event_log.remember(),
            self._supervisor.overdue,
            self._readiness.missing,
            self._readiness.waiting,
            self._conditions_of_host,
        )
        self._observation = Observation(self._components, self._readiness, self._supervisor)

    def serve(self) -> int:
        log.info("flanneld %s %s", __version__, self._options.described())
        self._supervisor.handle_signals()
        self._lock.wait(self._supervisor.stop, tell=self._notifier.status)
        manager = open_manager(self._options, self._environ)
        self._components.observe(manager)
        log.info("Leases are in %s", manager.name)
        self._readiness.tell = partial(self._report, manager)
        self._supervisor.start("closer", lambda: self._close_on_stop(manager))
        self._observation.serve_health()
        try:
            self._go_to_work(self._join(manager))
            return self._wait_and_stop()
        finally:
            self._end(manager)

    def _report(self, manager: SubnetManager, reason: str) -> None:
        if isinstance(manager, NodeStore):
            manager.report(reason)
        self._observation.serve_status()

    def _join(self, manager: SubnetManager) -> Member:
        """Learn what the network is like, decide how this node takes part in it, and get its lease."""
        ask = self._readiness.ask
        path = Path(self._options.subnet_file)
        previous, last_run = subnet_file.read(path), LastRun(path)
        self._last_run = last_run
        config = ask("the network config", manager.network_config)
        for warning in config.warnings:
            log.warning("%s", warning)
        make_backend = registry.load(config.backend_type)
        kernel, monitor = self._readiness.patiently("the kernel", _open_kernel)
        choice = ask("our node", lambda: choice_for(self._options, manager))
        uplink = self._find_uplink(kernel, config, choice)
        machine = machine_of(kernel, uplink)
        written = last_run.claim(machine, manager.name, previous.subnets)
        stored = ask("the leases", lambda: manager.stored(uplink.public(config.families[0])))
        if stored is None and written is not None:
            stored = written.attrs
        uplink_manager = self._readiness.patiently(
            "this host's devices",
            lambda: UplinkManager(kernel, config, choice, make_backend, uplink, stored, previous.networks),
        )
        _warn_of_unread_keys(config)
        local = LocalFacts(written, connected_networks(kernel, config.families))
        attributes = uplink_manager.backend.attributes()
        lease = ask("a lease", lambda: manager.acquire(config, attributes, previous.subnets, local))
        last_run.joined(machine, manager.name, lease)
        log.info(
            "Our subnet is %s, backend %s, MTU %d", lease, config.backend_type, uplink_manager.backend.mtu
        )
        return Member(manager, config, previous, last_run, kernel, monitor, uplink_manager, lease)

    def _go_to_work(self, member: Member) -> None:
        """Make the devices, tell this host about its subnet, and start what keeps all of it true."""
        start = self._supervisor.start
        lease_keeper = self._lease_keeper(member)
        reconciler = self._reconciler(member, lease_keeper)
        self._components.config, self._components.lease_keeper, self._components.reconciler = (
            member.config,
            lease_keeper,
            reconciler,
        )
        self._readiness.patiently("the kernel", reconciler.prepare)
        if self._options.ip_masq:
            masquerade_now(lambda: self._firewall(member), self._supervisor)
        self._write_subnet_file(member)
        self._check_host(member)
        self._readiness.await_peers()
        self._watch_leases(member, reconciler)
        watch_own = member.manager.watch_own
        start(_RECONCILER, reconciler.run, reconciler.cancel)
        alive = self._alive("own lease watch")
        start("own lease watch", lambda: watch_own(member.lease, lease_keeper.deliver, alive))
        start("lease keeper", lease_keeper.run, lease_keeper.cancel)
        self._brief = (
            f"{member.config.backend_type}: subnet {member.lease} through {member.uplink_manager.uplink.name}"
        )
        self._say_status(*filter(None, (self._subnet_file.problem,)))
        self._when_written = partial(self._say_ready, member)
        self._look_at_host()
        start(
            "trouble",
            lambda: conditions.watch(
                self._components, self._supervisor.stop, partial(self._tell, member.manager)
            ),
        )
        if self._options.peer_probes:
            self._probe_peers(member, reconciler)
        if not self._options.ip_masq:
            forward_soon(lambda: self._firewall(member), self._supervisor, self._readiness)
        self._observation.serve_status()

    def _watch_leases(self, member: Member, reconciler: KernelReconciler) -> None:
        """Watch the peers' leases; with a backend that has no peers watch our own node at most."""
        manager, put = member.manager, reconciler.event_queue.put
        alive = self._alive("lease watch")
        if has_peers(member.uplink_manager.backend):
            self._supervisor.start("lease watch", lambda: manager.watch(put, alive))
            return
        put([Snapshot((member.lease,))])
        if isinstance(manager, NodeStore):
            self._supervisor.start("lease watch", lambda: manager.watch_node(alive))

    # ---- the parts ---------------------------------------------------------------------------

    def _lease_keeper(self, member: Member) -> LeaseKeeper:
        return LeaseKeeper(
            member.manager,
            member.lease,
            margin=60.0 * self._options.subnet_lease_renew_margin,
            stop=self._supervisor.stop,
            heartbeat=partial(self._supervisor.heartbeat, "lease keeper"),
            revoked=lambda: self._supervisor.request_stop("our lease was revoked"),
            contested=not isinstance(member.manager, NodeStore),
            written=member.last_run.lease_written,
            lost=member.last_run.lease_lost,
        )

    def _reconciler(self, member: Member, lease_keeper: LeaseKeeper) -> KernelReconciler:
        extras = extras_for(self._options, member.lease)
        last_run = member.last_run
        node = Node(
            member.kernel,
            member.monitor,
            member.uplink_manager,
            member.lease,
            extras,
            former=member.previous.networks,
            devices=last_run.devices,
            adopts=last_run.adopts,
            adopted=last_run.adopted,
            record=last_run.record,
        )
        return KernelReconciler(
            node,
            RemovalGuard(is_on=self._options.removal_brake),
            stop=self._supervisor.stop,
            heartbeat=partial(self._supervisor.heartbeat, _RECONCILER),
            on_move=lambda: self._moved(member, lease_keeper),
            on_synced=self._readiness.complete,
            reread=member.manager.reread,
        )

    # ---- what others may change on this host --------------------------------------------------

    def _check_host(self, member: Member) -> None:
        families, uplink_manager = member.config.families, member.uplink_manager
        host_checks.report(families, uplink_manager.uplink.name, services=self._options.kube_subnet_mgr)
        self._forwarding = host_checks.Forwarding(
            families, lambda: uplink_manager.uplink.name, keep=self._options.keep_forwarding
        )

    def _look_at_host(self) -> None:
        """Put right what others did to subnet.env, and see whether the kernel forwards. For one thread."""
        self._subnet_file.look()
        if self._last_run is not None:
            self._last_run.try_again()
        self._readiness.await_file(self._subnet_file.problem)
        if self._forwarding:
            self._forwarding.look()
        if self._when_written and not self._subnet_file.problem:
            self._when_written()
            self._when_written = None

    def _say_ready(self, member: Member) -> None:
        """A container runtime finds subnet.env: containers can be started."""
        self._say_status(*self._told)
        self._notifier.ready()
        if isinstance(member.manager, NodeStore) and self._options.set_node_network_unavailable:
            member.manager.mark_available()

    def _conditions_of_host(self) -> Iterator[tuple[str, Iterable[str]]]:
        yield "subnet file", filter(None, (self._subnet_file.problem,))
        if self._forwarding:
            yield "forwarding", self._forwarding.problems

    # ---- the steps ---------------------------------------------------------------------------

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

        uplink = self._readiness.patiently("an external interface", attempt)
        log.info("The external interface is %s", uplink)
        return uplink

    def _firewall(self, member: Member) -> Firewall:
        # Not needed by everybody, and not before the packets flow.
        from flanneld.reconcile.firewall import Firewall, wishes_of

        wishes = wishes_of(self._options, member.config, member.lease.key, member.previous)
        heartbeat = partial(self._supervisor.heartbeat, "firewall")
        self._components.firewall = Firewall(wishes, stop=self._supervisor.stop, heartbeat=heartbeat)
        return self._components.firewall

    def _probe_peers(self, member: Member, reconciler: KernelReconciler) -> None:
        from flanneld.diagnostics.probes import Prober  # only for those who ask for it

        heartbeat = partial(self._supervisor.heartbeat, "prober")
        self._components.prober = Prober(
            self._options.peer_probes,
            member.lease,
            reconciler,
            stop=self._supervisor.stop,
            heartbeat=heartbeat,
        )
        self._supervisor.start("prober", self._components.prober.run)

    def _write_subnet_file(self, member: Member) -> None:
        self._subnet_file.tell(
            subnet_file.SubnetEnv(
                networks=tuple(each.network for each in member.config.ranges),
                subnets=tuple(net for net in member.lease.key if net is not None),
                mtu=member.uplink_manager.backend.mtu,
                ip_masq=self._options.ip_masq,
            )
        )
        self._readiness.await_file(self._subnet_file.problem)

    def _subnet_file_written(self) -> None:
        if self._last_run is not None:
            self._last_run.subnet_file_written()

    def _alive(self, name: str) -> Callable[[], None]:
        return partial(self._supervisor.heartbeat, name, LONGEST_SILENCE)

    def _moved(self, member: Member, lease_keeper: LeaseKeeper) -> None:
        """The uplink is another one: the store, the peers and this host have to know."""
        member.manager.reconnect()
        lease_keeper.announce(member.uplink_manager.backend.attributes())
        member.last_run.record(machine=machine_of(member.kernel, member.uplink_manager.uplink))
        self._write_subnet_file(member)

    def _tell(self, manager: SubnetManager, troubles: list[str]) -> None:
        self._told = troubles
        self._say_status(*troubles)
        if troubles:
            self._report(manager, "; ".join(troubles))

    def _say_status(self, *troubles: str) -> None:
        self._notifier.status("; ".join([self._brief, *troubles]))

    def _wait_and_stop(self) -> int:
        ticks = [(self._look_at_host, _HOST_LOOK)]
        interval = sd_notify.watchdog_interval(self._environ)
        if interval is not None:
            ticks.append((self._feed_watchdog, interval))
        self._supervisor.wait(*ticks)
        self._notifier.stopping()
        return 1 if self._supervisor.failure else 0

    def _end(self, manager: SubnetManager) -> None:
        """Stop all tasks and close what they leave open; also after a start that failed."""
        self._supervisor.stop.set()
        manager.close()  # there may be keys in temporary files
        late = self._supervisor.shutdown()
        for name in late:
            log.warning("%s did not stop in time", name)
        if self._components.reconciler and _RECONCILER not in late:
            self._components.reconciler.close()

    def _feed_watchdog(self) -> None:
        if not self._supervisor.overdue():
            self._notifier.watchdog()

    def _close_on_stop(self, manager: SubnetManager) -> None:
        """Cuts every blocked request of any thread, this one's included."""
        self._supervisor.stop.wait()
        manager.close()


def _open_kernel() -> tuple[Kernel, Monitor]:
    kernel = Kernel()
    return kernel, Monitor(kernel.port)


def _warn_of_unread_keys(config: Config) -> None:
    for key, nearest in config.backend.unread():
        hint = f"; did you mean {nearest}?" if nearest else ""
        log.warning("Unknown key %s in Backend of the network config%s", key, hint)


def _warn_of_unknown_variables(environ: Mapping[str, str]) -> None:
    for name, nearest in options.unknown_variables(environ):
        hint = f"; did you mean {nearest}?" if nearest else "; flanneld -help lists the flags"
        log.warning("Unknown variable %s%s", name, hint)


def _print(text: str, *, status: int) -> int:
    sys.stderr.write(text)
    return status
