"""Node of one network: its parts are made, started and ended in one order.

Other threads read the parts without locks. So every value read is a counter, is replaced as a whole, or is
copied at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flanneld import startup
from flanneld.config import Config
from flanneld.effects import Effects
from flanneld.errors import NoAnswer, Retryable, prefixed
from flanneld.model import Snapshot
from flanneld.options import Options
from flanneld.reconcile.controller import NAME as RECONCILER
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counters import CountedStore, StoreCounters
from flanneld.reconcile.local_node import Member
from flanneld.reconcile.reconciler import Reconciler
from flanneld.reconcile.worker import Worker
from flanneld.runtime import clock
from flanneld.runtime.logs import Events
from flanneld.startup import Acquire, Admit, Readiness, Waiting
from flanneld.state.desired import Delta
from flanneld.state.permits import RemovalGuard, everything
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Put, Table
from flanneld.subnet import lease_keeper, subnet_file
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.store import LONGEST_SILENCE, NodeStore
from flanneld.subnet.subnet_file import SubnetEnv, SubnetEnvFile

if TYPE_CHECKING:
    # Only imported if the options need them.
    from flanneld.reconcile.firewall import Firewall
    from flanneld.reconcile.probes import Prober
    from flanneld.subnet.cni_conf import CniConfTable

log = logging.getLogger(__name__)

#: Seconds for which the rules that only let traffic through wait for the routes.
_PEERS_PATIENCE = 5.0
#: Seconds between two checks of subnet.env.
_HOST_LOOK = 1.0

#: A function, and the seconds within which it is called again.
Tick = tuple[Callable[[], None], float]


class Phase(Enum):
    """Phase of a node at which those who look at it may begin."""

    #: Nothing is there yet but the options and the store.
    BEGINS = auto()
    #: Startup waits, or a condition of health is told to the cluster.
    WAITS = auto()
    #: Containers have traffic.
    SERVES = auto()


def alone(_node: Node, _phase: Phase) -> None:
    """Look at nothing: nobody is beside the node."""


class Node:
    """Node of one network.

    ``admit`` is called before it takes a lease. ``beside`` is called at each ``Phase`` and starts what looks
    at the node. ``more_metrics`` returns the counters of a lease server in this process, as Prometheus' text.
    """

    def __init__(
        self,
        options: Options,
        effects: Effects,
        store: CountedStore,
        *,
        admit: Admit = startup.admit_any,
        beside: Callable[[Node, Phase], None] = alone,
        events: Events | None = None,
        more_metrics: Callable[[], str] | None = None,
    ) -> None:
        self.options = options
        self.store = store
        self.tasks = effects.tasks
        self.make_loop = effects.make_loop
        self.events = events or Events()
        self.more_metrics = more_metrics
        self.started = clock.wall()
        self.readiness = Readiness(effects.tasks.stop, effects.notifier, tell=self._report)
        #: None until made. Set by one thread, read from any.
        self.member: Member | None = None
        self.lease_keeper: LeaseKeeper | None = None
        self.controller: Controller | None = None
        self.firewall: Firewall | None = None
        self.host: Worker | None = None
        self.prober: Prober | None = None
        self._effects = effects
        self._admit = admit
        self._beside = beside
        self._cni: CniConfTable | None = None
        #: Desired files and settings of this host. Once a thread keeps them, it writes them.
        self._on_host: dict[Key, Resource] = {}
        self._host_has_thread = False
        self._is_told_ready = False
        #: Summary of this node, and the conditions last reported.
        self._brief = ""
        self._told: list[str] = []

    # ---- what there is to see, from any thread -----------------------------------------------------

    def overdue(self) -> list[str]:
        """Return a line for each task without a recent heartbeat."""
        return self.tasks.overdue()

    def missing(self) -> list[str]:
        """Return the missing conditions of readiness."""
        return self.readiness.missing()

    def waiting(self) -> list[str]:
        """Return what startup waits for, at most one line."""
        return self.readiness.waiting()

    @property
    def config(self) -> Config | None:
        """The network config; None without a lease."""
        return self.member.config if self.member else None

    def reconcilers(self) -> Iterator[Reconciler]:
        """Yield the reconcilers of all tables: of the kernel, backends, firewall and host."""
        if self.controller:
            yield from self.controller.tables.reconcilers
        for worker in filter(None, (self.firewall, self.host)):
            yield worker.reconciler

    def heals(self) -> Counter[tuple[str, str]]:
        """Count repairs by kind of object and cause, in all tables."""
        return sum((Counter(each.work.heals) for each in self.reconcilers()), Counter())

    @property
    def store_counters(self) -> StoreCounters:
        """Counters of requests to the store and of its events."""
        return self.store.counters

    @property
    def store_problem(self) -> Retryable | None:
        """The current failure of the store, of a watch or of a request; None without one."""
        return self.store.problem or next(iter(self.store_counters.problems.values()), None)

    @property
    def store_is_up(self) -> bool:
        """True if the store answers, also with a refusal. False before the first request."""
        return any(self.store_counters.requests.counts) and not isinstance(self.store_problem, NoAnswer)

    @property
    def cached(self) -> str:
        """Source of the leases while they do not come from the store; else empty."""
        return self.controller.peers.cached if self.controller else ""

    @property
    def file_problem(self) -> str:
        """Reason why the subnet file does not hold what it should; empty if it does."""
        states = self.host.states() if self.host else ()
        return next(
            (each.trouble for each in states if each.name == subnet_file.TABLE and not each.settled), ""
        )

    # ---- the life of a daemon ----------------------------------------------------------------------

    def serve(self, *ticks: Tick) -> int:
        """Run until a stop or until a task fails, and call the ticks meanwhile. Return the exit status."""
        self.tasks.start("closer", self._close_on_stop)
        self._beside(self, Phase.BEGINS)
        try:
            self.join(self.readiness)
            self.begin(self.readiness)
            self._wait(*ticks)
            return 1 if self.tasks.failure else 0
        finally:
            self._end()

    def join(self, waiting: Waiting, acquire: Acquire | None = None) -> Member:
        """Run the stages of startup up to the lease, which ``acquire`` gets or predicts."""
        if self.options.cni_conf:
            from flanneld.subnet.cni_conf import open_table

            self._cni = open_table(self.options)
        loaded = startup.load(self.options, self.store, waiting, self._effects)
        elected = startup.elect(loaded, waiting)
        with prefixed("Error registering network"):
            member = startup.join(loaded, elected, waiting, acquire or self.store.acquire, self._admit)
        mtu = member.uplink_manager.mtu
        log.info("Our subnet is %s, backend %s, MTU %d", member.lease, member.config.backend_type, mtu)
        self.member = member
        return member

    def begin(self, waiting: Waiting) -> None:
        """Create the devices, write subnet.env, and start the tasks that maintain both and the lease."""
        member = self._joined
        keeper = self.lease_keeper = self._make_keeper(member)
        controller = self.controller = self._make_controller(member)
        with prefixed("Error registering network"):
            waiting.patiently("the kernel", controller.prepare)
        if self.options.ip_masq:
            # Before the first packet, so that no container's address leaves.
            self._make_firewall(member).prepare(clock.now())
        self._start_host(member, controller)
        self.readiness.await_peers()
        log.info("Running backend.")
        self._start_loops(member, controller, keeper)
        self._brief = (
            f"{member.config.backend_type}: subnet {member.lease} through {member.uplink_manager.uplink.name}"
        )
        self._say_status(*filter(None, (self.file_problem,)))
        # First: what the service manager starts once we are ready may ask the status socket.
        self._beside(self, Phase.SERVES)
        self._look_at_host()
        if not self.options.ip_masq:
            self.tasks.start("firewall", self._forward, self._cancel_firewall)

    def _wait(self, *ticks: Tick) -> None:
        more = [(self._look_at_host, _HOST_LOOK), *ticks]
        if self._effects.watchdog is not None:
            more.append((self._feed_watchdog, self._effects.watchdog))
        self.tasks.wait(*more)
        self._effects.notifier.stopping()

    def _end(self) -> None:
        """Stop all tasks and close their resources; also after a failed start."""
        self.tasks.stop.set()
        self.store.close()  # there may be keys in temporary files
        late = self.tasks.shutdown()
        for name in late:
            log.warning("%s did not stop in time", name)
        if self.controller:
            self.controller.close(except_for=late)
        for worker in filter(None, (self.firewall, self.host)):
            if worker.name not in late:
                worker.close()

    def _feed_watchdog(self) -> None:
        if not self.tasks.overdue():
            self._effects.notifier.watchdog()

    def _close_on_stop(self) -> None:
        """Cut every blocked request of any thread, including this one."""
        self.tasks.wait()
        self.store.close()

    # ---- the loops ---------------------------------------------------------------------------------

    @property
    def _joined(self) -> Member:
        assert self.member is not None
        return self.member

    def _make_keeper(self, member: Member) -> LeaseKeeper:
        return LeaseKeeper(
            member.store,
            member.lease,
            margin=60.0 * self.options.subnet_lease_renew_margin,
            stop=self.tasks.stop,
            make_loop=self.make_loop,
            revoked=lambda: self.tasks.request_stop("our lease was revoked"),
            contested=not isinstance(member.store, NodeStore),
            written=member.last_run.lease_written,
            lost=member.last_run.lease_lost,
            wrote=lambda attrs: attrs in member.last_run.earlier,
        )

    def _make_controller(self, member: Member) -> Controller:
        return Controller(
            startup.desired(member, self._effects),
            RemovalGuard(is_on=self.options.removal_guard),
            stop=self.tasks.stop,
            make_loop=self.make_loop,
            on_move=self._moved,
            on_synced=self.readiness.complete,
            on_leases=self._leases_changed,
            on_mtu=self._mtu_lowered,
            reread=member.store.reread,
            event_queue=self._effects.make_queue(),
        )

    def _start_loops(self, member: Member, controller: Controller, keeper: LeaseKeeper) -> None:
        """Start the watches of the store and the tasks that act on their events."""
        start = self.tasks.start
        self._watch_leases(member, controller)
        start(RECONCILER, controller.run, controller.cancel)
        # The firewall not earlier: it begins with all chains of the host, and containers wait for subnet.env.
        for worker in (*controller.workers, *filter(None, [self.firewall])):
            start(worker.name, worker.run, worker.cancel)
        self._watch("own lease watch", partial(member.store.watch_own, member.lease, keeper.deliver))
        start(lease_keeper.NAME, keeper.run, keeper.cancel)

    def _watch_leases(self, member: Member, controller: Controller) -> None:
        """Watch the peers' leases. For a backend without peers watch our own node at most."""
        put = controller.event_queue.put
        if member.uplink_manager.backend.has_peers:
            log.info("Watching for new subnet leases")
            self._watch("lease watch", partial(member.store.watch, put))
            return
        put([Snapshot((member.lease,))])
        if isinstance(member.store, NodeStore):
            self._watch("lease watch", member.store.watch_node)

    def _watch(self, name: str, watch: Callable[[Callable[[], None]], None]) -> None:
        alive = partial(self.tasks.heartbeat, name, LONGEST_SILENCE)
        self.tasks.start(name, partial(watch, alive))

    def _moved(self) -> None:
        """Reconnect to the store, announce the new uplink in our lease, and record it for the next run."""
        member, uplink_manager = self._joined, self._joined.uplink_manager
        member.store.reconnect()
        assert self.lease_keeper is not None
        self.lease_keeper.announce(uplink_manager.backend.attributes())
        member.last_run.record(machine=self._effects.machine_of(member.kernel, uplink_manager.uplink))
        self._write_subnet_file(member)

    def _mtu_lowered(self) -> None:
        """Tell containers of the lower MTU, and record it: a restart does not raise it."""
        member = self._joined
        member.last_run.record(path_mtu=member.uplink_manager.lowered)
        self._write_subnet_file(member)

    def _leases_changed(self) -> None:
        if self.firewall:
            self.firewall.leases_changed()

    # ---- the packet filter -------------------------------------------------------------------------

    def _make_firewall(self, member: Member) -> Firewall:
        # Imported here: not all options need it, and without masquerading traffic flows before.
        from flanneld.reconcile.firewall import Firewall, firewall_settings

        settings = firewall_settings(self.options, member.config, member.lease.key, member.last_run.former)
        assert self.controller is not None
        nodes = self.controller.peers.public_ips if settings.spares_nodes else None
        firewall = Firewall(settings, stop=self.tasks.stop, make_loop=self.make_loop, nodes=nodes)
        self.firewall = firewall
        return firewall

    def _forward(self) -> None:
        """Set and keep the accept rules, after the routes."""
        if self.readiness.wait_for_peers(_PEERS_PATIENCE):
            self._make_firewall(self._joined).run()

    def _cancel_firewall(self) -> None:
        if self.firewall:
            self.firewall.cancel()

    # ---- what others may change on this host -------------------------------------------------------

    def _start_host(self, member: Member, controller: Controller) -> None:
        """Write subnet.env at once, then correct settings of this host, then keep both in a thread."""
        effects, families, uplink = self._effects, member.config.families, member.uplink_manager
        forwarding = effects.forwarding_table(
            families, lambda: uplink.uplink.name, keep=self.options.keep_forwarding
        )
        file = effects.file_table(Path(self.options.subnet_file), member.last_run.subnet_file_written)
        tables: list[Table] = [file, *filter(None, [self._cni]), forwarding]
        host = self.host = Worker("host", tables, stop=self.tasks.stop, make_loop=self.make_loop)
        self._write_subnet_file(member)
        name = uplink.uplink.name
        either = (name, *controller.domain.links) if member.config.also else ()
        effects.report_settings(families, name, services=self.options.kube_subnet_mgr, either=either)
        self._want_on_host(*forwarding.desired)
        self._host_has_thread = True
        self.tasks.start(host.name, host.run, host.cancel)

    def _write_subnet_file(self, member: Member) -> None:
        mtu = member.uplink_manager.mtu
        env = SubnetEnv.of(member.config, member.lease.key, mtu, ip_masq=self.options.ip_masq)
        file = SubnetEnvFile.of(Path(self.options.subnet_file), env)
        self._want_on_host(file, *([self._cni.desired(env)] if self._cni else ()))
        self.readiness.hold("file", self.file_problem)

    def _want_on_host(self, *resources: Resource) -> None:
        assert self.host is not None
        self._on_host |= {resource.key: resource for resource in resources}
        self.host.send(Delta(tuple(map(Put, self._on_host.values()))), everything(), whole=True)
        if not self._host_has_thread:
            self.host.step(clock.now())

    def _look_at_host(self) -> None:
        """Check the record of this run and subnet.env. For one thread."""
        assert self.controller is not None
        self._joined.last_run.try_again()
        if self.controller.networks is not None and self.firewall and self.firewall.has_swept():
            self._joined.last_run.record(former=self.controller.networks)
        self._effects.notifier.try_again()
        file, clear = self.file_problem, self.controller.encryption.problem
        self.readiness.hold("file", file)
        self.readiness.hold("encryption", clear)
        if not (self._is_told_ready or file or clear):
            self._is_told_ready = True
            self._say_ready()

    # ---- reports -----------------------------------------------------------------------------------

    def tell(self, troubles: list[str]) -> None:
        """Report the conditions of health to the service manager, and to the cluster if there are any."""
        self._told = troubles
        self._say_status(*troubles)
        if troubles:
            self._report("; ".join(troubles))

    def _report(self, reason: str) -> None:
        if isinstance(self.store, NodeStore):
            self.store.report(reason)
        self._beside(self, Phase.WAITS)

    def _say_ready(self) -> None:
        """Report readiness: the container runtime can now read subnet.env and start containers."""
        self._say_status(*self._told)
        self._effects.notifier.ready()
        if isinstance(self.store, NodeStore) and self.options.set_node_network_unavailable:
            self.store.mark_available()

    def _say_status(self, *troubles: str) -> None:
        self._effects.notifier.status("; ".join([self._brief, *troubles]))
