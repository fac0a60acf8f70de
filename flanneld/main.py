"""Main function of the daemon, from the command line to the exit status.

One-shot actions, such as ``--plan`` and ``--cleanup``, report on stdout, then flanneld exits.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flanneld import __version__, options, startup
from flanneld.compat import glog
from flanneld.diagnostics.components import Components
from flanneld.diagnostics.host_upkeep import HostUpkeep
from flanneld.diagnostics.observation import Observation
from flanneld.errors import Cancelled, Fatal, FlannelError, lacking, prefixed
from flanneld.network import host_settings
from flanneld.options import Options
from flanneld.readiness import Readiness
from flanneld.reconcile.counted_manager import CountedManager, counted
from flanneld.reconcile.local_node import services_of_daemon
from flanneld.reconcile.member import Loops, Member
from flanneld.runtime import logs, process
from flanneld.runtime.instance_lock import DRAIN, PATIENCE, HostClaims, InstanceLock
from flanneld.runtime.loop import MakeLoop
from flanneld.runtime.process import ensure_descriptors, open_standard_streams, tune_interpreter
from flanneld.runtime.supervisor import Supervisor
from flanneld.subnet import subnet_file
from flanneld.subnet.opening import etcd_options, open_store
from flanneld.subnet.store import NodeStore
from flanneld.subnet.subnet_file import SubnetEnv

if TYPE_CHECKING:
    from flanneld.lease_server import LeaseService
    from flanneld.subnet.cni_conf import CniConfTable

log = logging.getLogger(__name__)

#: Seconds for which the rules that only let traffic through wait for the routes.
_PEERS_PATIENCE = 5.0
#: Seconds between two checks of subnet.env.
_HOST_LOOK = 1.0


def main() -> None:
    """Run with the command line and the environment of this process, then exit."""
    open_standard_streams()
    status = run(sys.argv[1:], os.environ)
    with suppress(OSError):  # a full disk must not change the exit status
        sys.stderr.flush()
    # Taking thousands of leases apart, object by object, would only make a restart last longer.
    os._exit(status)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Serve until told to stop. Return 0 then, 1 after a failure, 2 for wrong usage."""
    if not sys.warnoptions:
        # Libraries warn programmers; an operator hears from us what is wrong.
        warnings.simplefilter("ignore")
    try:
        wanted = options.read(argv, environ)
        glog.setup(wanted.v, wanted.vmodule, wanted.log_backtrace_at, wanted.logging_format)
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
        return _run_errand(wanted, environ)
    status = _serve(wanted, environ)
    if status == 0:
        log.info("Exiting cleanly...")
    return status


def _serve(wanted: Options, environ: Mapping[str, str]) -> int:
    tune_interpreter()
    try:
        if wanted.listen and (wanted.serve_only or not wanted.store):
            from flanneld import lease_server  # a node has no use for it

            return lease_server.run(wanted, environ)
        if wanted.has_networks:
            from flanneld import fleet  # most daemons have one network

            return fleet.run(wanted, environ, Daemon)
        return _serve_alone(wanted, environ)
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


def _serve_alone(wanted: Options, environ: Mapping[str, str]) -> int:
    """Wait until no other flanneld has this subnet file, then serve."""
    supervisor, notifier = Supervisor(quiet=(Cancelled,)), process.Notifier()
    events = logs.remember()
    log.info("flanneld %s %s", __version__, wanted.described())
    supervisor.handle_signals()
    lock = InstanceLock(subnet_file.beside(Path(wanted.subnet_file), "lock"))
    lock.wait(supervisor.stop, tell=notifier.status)
    events.keep(subnet_file.beside(Path(wanted.subnet_file), "events"))
    service: LeaseService | None = None
    if wanted.store:
        from flanneld import lease_server  # only for those who keep the leases here
        from flanneld.subnet.embedded.store import store_of

        store = lease_server.open_file_store(wanted, supervisor)
        manager = counted(store_of(store))
        if wanted.listen:
            service = lease_server.LeaseService(wanted, environ, supervisor, store)
            service.start()
    else:
        with prefixed("Failed to create SubnetManager"):
            manager = counted(open_store(wanted, environ))
    log.info("Created subnet manager: %s", manager.name)
    metrics = service.server.metrics_text if service else None
    claims = HostClaims(PATIENCE)
    return Daemon(
        wanted,
        environ,
        supervisor,
        notifier,
        manager,
        events,
        metrics,
        admit=lambda config, backend: claims.take(startup.claims_to(config, backend), startup.clash),
        ticks=((claims.drain, DRAIN),),
    ).serve()


class Daemon:
    """Daemon of one network: its components are built once, in the order in which they are needed."""

    def __init__(
        self,
        wanted: Options,
        environ: Mapping[str, str],
        supervisor: Supervisor,
        notifier: process.Notifier,
        manager: CountedManager,
        events: logs.Events,
        more_metrics: Callable[[], str] | None = None,
        admit: startup.Admit = startup.admit_any,
        make_loop: MakeLoop | None = None,
        ticks: Sequence[tuple[Callable[[], None], float]] = (),
    ) -> None:
        self._admit = admit
        self._ticks = ticks
        self._make_loop = make_loop or supervisor.loop
        self._options = wanted
        self._environ = environ
        self._supervisor = supervisor
        self._notifier = notifier
        self._manager = manager
        self._readiness = Readiness(supervisor.stop, notifier, tell=self._report)
        self._member: Member | None = None
        self._loops: Loops | None = None
        self._host: HostUpkeep | None = None
        self._cni: CniConfTable | None = None
        #: Functions to call as soon as subnet.env is written.
        self._when_written: Callable[[], None] | None = None
        #: Summary of this node, and the conditions last reported.
        self._brief = ""
        self._told: list[str] = []
        self._components = Components(
            wanted,
            manager,
            events,
            supervisor.overdue,
            self._readiness.missing,
            self._readiness.waiting,
            more_metrics,
        )
        self._observation = Observation(self._components, self._readiness, supervisor)

    def serve(self) -> int:
        """Run until a stop or until a task fails. Return the exit status."""
        self._supervisor.start("closer", self._close_on_stop)
        self._observation.serve_health()
        try:
            self._go_to_work(self._join())
            return self._wait_and_stop()
        finally:
            self._end()

    def _report(self, reason: str) -> None:
        if isinstance(self._manager, NodeStore):
            self._manager.report(reason)
        self._observation.serve_status()

    def _join(self) -> Member:
        """Run the stages of startup up to the lease, waiting for the store and this host."""
        if self._options.cni_conf:
            from flanneld.subnet.cni_conf import open_table

            self._cni = open_table(self._options)
        waiting, manager = self._readiness, self._manager
        services = services_of_daemon(self._options.secret_dir, self._environ, self._supervisor.stop)
        loaded = startup.load(self._options, manager, waiting, services)
        elected = startup.elect(loaded, waiting)
        with prefixed("Error registering network"):
            member = startup.join(loaded, elected, waiting, manager.acquire, self._admit)
        mtu = member.uplink_manager.backend.mtu
        log.info("Our subnet is %s, backend %s, MTU %d", member.lease, member.config.backend_type, mtu)
        return member

    def _go_to_work(self, member: Member) -> None:
        """Create the devices, write subnet.env, and start the tasks that maintain both."""
        self._member = member
        self._loops = loops = startup.run(
            member,
            self._supervisor,
            on_synced=self._readiness.complete,
            on_move=lambda: self._write_subnet_file(member),
            make_loop=self._make_loop,
        )
        self._components.join(member.config, loops)
        with prefixed("Error registering network"):
            self._readiness.patiently("the kernel", loops.reconciler.prepare)
        if self._options.ip_masq:
            loops.masquerade()
        self._host = host = self._upkeep(member)
        self._components.host = host
        self._write_subnet_file(member)
        families, uplink = member.config.families, member.uplink_manager.uplink.name
        either = (uplink, *loops.reconciler.domain.links) if member.config.also else ()
        host_settings.report(families, uplink, services=self._options.kube_subnet_mgr, either=either)
        host.maintain()
        self._supervisor.start(host.name, host.run, host.cancel)
        self._readiness.await_peers()
        log.info("Running backend.")
        loops.start()
        self._brief = (
            f"{member.config.backend_type}: subnet {member.lease} through {member.uplink_manager.uplink.name}"
        )
        self._say_status(*filter(None, (host.file_problem,)))
        self._when_written = partial(self._say_ready, member)
        self._look_at_host()
        self._observation.watch_conditions(self._tell)
        self._observation.probe_peers(member.lease, loops.reconciler)
        self._observation.answer_queries()
        if not self._options.ip_masq:
            loops.forward_after(partial(self._readiness.wait_for_peers, _PEERS_PATIENCE))
        self._observation.serve_status()

    # ---- what others may change on this host --------------------------------------------------

    def _upkeep(self, member: Member) -> HostUpkeep:
        return HostUpkeep(
            Path(self._options.subnet_file),
            member.config.families,
            lambda: member.uplink_manager.uplink.name,
            stop=self._supervisor.stop,
            make_loop=self._make_loop,
            keep_forwarding=self._options.keep_forwarding,
            on_write=member.last_run.subnet_file_written,
            cni=self._cni,
        )

    def _look_at_host(self) -> None:
        """Check the record of this run and subnet.env. For one thread."""
        if self._member is None or self._host is None:
            return
        self._member.last_run.try_again()
        file = self._host.file_problem
        clear = self._loops.reconciler.encryption.problem if self._loops else ""
        self._readiness.hold("file", file)
        self._readiness.hold("encryption", clear)
        if self._when_written and not (file or clear):
            self._when_written()
            self._when_written = None

    def _say_ready(self, member: Member) -> None:
        """Report readiness: the container runtime can now read subnet.env and start containers."""
        self._say_status(*self._told)
        self._notifier.ready()
        if isinstance(member.manager, NodeStore) and self._options.set_node_network_unavailable:
            member.manager.mark_available()

    def _write_subnet_file(self, member: Member) -> None:
        assert self._host is not None
        mtu = member.uplink_manager.backend.mtu
        self._host.write(SubnetEnv.of(member.config, member.lease.key, mtu, ip_masq=self._options.ip_masq))
        self._readiness.hold("file", self._host.file_problem)

    def _tell(self, troubles: list[str]) -> None:
        self._told = troubles
        self._say_status(*troubles)
        if troubles:
            self._report("; ".join(troubles))

    def _say_status(self, *troubles: str) -> None:
        self._notifier.status("; ".join([self._brief, *troubles]))

    def _wait_and_stop(self) -> int:
        ticks = [(self._look_at_host, _HOST_LOOK), *self._ticks]
        interval = process.watchdog_interval(self._environ)
        if interval is not None:
            ticks.append((self._feed_watchdog, interval))
        self._supervisor.wait(*ticks)
        self._notifier.stopping()
        return 1 if self._supervisor.failure else 0

    def _end(self) -> None:
        """Stop all tasks and close their resources; also after a failed start."""
        self._supervisor.stop.set()
        self._manager.close()  # there may be keys in temporary files
        late = self._supervisor.shutdown()
        for name in late:
            log.warning("%s did not stop in time", name)
        if self._loops:
            self._loops.reconciler.close(except_for=late)

    def _feed_watchdog(self) -> None:
        if not self._supervisor.overdue():
            self._notifier.watchdog()

    def _close_on_stop(self) -> None:
        """Cut every blocked request of any thread, including this one."""
        self._supervisor.wait()
        self._manager.close()


def _run_errand(wanted: Options, environ: Mapping[str, str]) -> int:
    """Run the action that the options name. Return exit status 1 if something is left to do."""
    errand = _clean_up if wanted.cleanup else _migrate if wanted.migrate_etcd_v2_to_v3 else _plan
    try:
        return 0 if errand(wanted, environ) else 1
    except FlannelError as failure:
        sys.stderr.write(f"flanneld: {failure}\n")
        return 1
    finally:
        sys.stdout.flush()


# Each module is imported by the only action that needs it.


def _clean_up(wanted: Options, _environ: Mapping[str, str]) -> bool:
    from flanneld.diagnostics.cleanup import clean_up
    from flanneld.subnet.kube.node_table import NodeCache

    more = [NodeCache(wanted.state_dir).path]
    if wanted.cni_conf:
        from flanneld.subnet.cni_conf import is_flannelds

        more += filter(is_flannelds, [Path(wanted.cni_conf)])
    return clean_up(Path(wanted.subnet_file), more, print, everything=wanted.all, dry_run=wanted.dry_run)


def _migrate(wanted: Options, _environ: Mapping[str, str]) -> bool:
    from flanneld.subnet.etcd.copy import migrate

    return migrate(etcd_options(wanted), print, dry_run=wanted.dry_run)


def _plan(wanted: Options, environ: Mapping[str, str]) -> bool:
    from flanneld.diagnostics.plan import print_plan

    # Only warnings: the info lines of a startup would report changes that a dry run does not make.
    logging.getLogger().setLevel(logging.WARNING)
    print_plan(wanted, open_store(wanted, environ), print)
    return True


def _warn_of_unknown_variables(environ: Mapping[str, str]) -> None:
    for name, nearest in options.unknown_variables(environ):
        hint = f"; did you mean {nearest}?" if nearest else "; flanneld -help lists the flags"
        log.warning("Unknown variable %s%s", name, hint)
    for name, why in options.WITHOUT_EFFECT.items():
        if name in environ:
            log.info("%s has no effect: %s", name, why)


def _print(text: str, *, status: int) -> int:
    sys.stderr.write(text)
    return status
