"""This node as a member of the network, and its loops."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from flanneld.config import Config
from flanneld.model import Lease, Snapshot
from flanneld.network.rtnetlink.kernel import Kernel
from flanneld.network.rtnetlink.monitor import Monitor
from flanneld.options import Options
from flanneld.reconcile import controller
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.last_run import LastRun, machine_of
from flanneld.reconcile.local_node import LocalNode, UplinkManager
from flanneld.runtime import clock
from flanneld.runtime.loop import MakeLoop
from flanneld.runtime.supervisor import Supervisor
from flanneld.state.removal_guard import RemovalGuard
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.store import LONGEST_SILENCE, NodeStore, Store
from flanneld.subnet.subnet_file import Previous

if TYPE_CHECKING:
    from flanneld.reconcile.firewall import Firewall

log = logging.getLogger(__name__)


class Member(Struct, frozen=True, gc=False):
    """Node with a lease, and the backend that the lease announces."""

    options: Options
    manager: Store
    config: Config
    previous: Previous
    last_run: LastRun
    kernel: Kernel
    monitor: Monitor
    uplink_manager: UplinkManager
    lease: Lease


class Loops:
    """Loops that maintain the node's desired state and its lease, as tasks of the supervisor.

    ``on_synced`` is called when the routes to the peers exist, ``on_move`` when the uplink has changed.
    ``make_loop`` chooses the threads that step the controller and the workers.
    """

    def __init__(
        self,
        member: Member,
        node: LocalNode,
        supervisor: Supervisor,
        *,
        on_synced: Callable[[], None],
        on_move: Callable[[], None],
        make_loop: MakeLoop,
    ) -> None:
        self._member = member
        self._make_loop = make_loop
        self._supervisor = supervisor
        self._on_move = on_move
        self.lease_keeper = LeaseKeeper(
            member.manager,
            member.lease,
            margin=60.0 * member.options.subnet_lease_renew_margin,
            stop=supervisor.stop,
            heartbeat=partial(supervisor.heartbeat, "lease keeper"),
            revoked=lambda: supervisor.request_stop("our lease was revoked"),
            contested=not isinstance(member.manager, NodeStore),
            written=member.last_run.lease_written,
            lost=member.last_run.lease_lost,
        )
        self.reconciler = Controller(
            node,
            RemovalGuard(is_on=member.options.removal_guard),
            stop=supervisor.stop,
            make_loop=make_loop,
            on_move=self._moved,
            on_synced=on_synced,
            reread=member.manager.reread,
        )
        #: None until rules are needed.
        self.firewall: Firewall | None = None

    def start(self) -> None:
        """Start the watches of the store and the tasks that act on their events."""
        member, start = self._member, self._supervisor.start
        self._watch_leases()
        start(controller.NAME, self.reconciler.run, self.reconciler.cancel)
        for worker in self.reconciler.workers:
            start(worker.name, worker.run, worker.cancel)
        if self.firewall:
            # Not earlier: it begins with all chains of the host, and containers wait for subnet.env.
            start(self.firewall.name, self.firewall.run, self.firewall.cancel)
        watch_own = partial(member.manager.watch_own, member.lease, self.lease_keeper.deliver)
        self._watch("own lease watch", watch_own)
        start("lease keeper", self.lease_keeper.run, self.lease_keeper.cancel)

    def masquerade(self) -> None:
        """Set the masquerading rules before the first packet, so that no container's address leaves."""
        self._make_firewall().prepare(clock.now())

    def forward_after(self, wait_for_peers: Callable[[], bool]) -> None:
        """Set the accept rules after the routes, unless the wait returns False."""

        def run() -> None:
            if wait_for_peers():
                self._make_firewall().run()

        def cancel() -> None:
            if self.firewall:
                self.firewall.cancel()

        self._supervisor.start("firewall", run, cancel)

    def _make_firewall(self) -> Firewall:
        # Imported here: not all options need it, and without masquerading traffic flows before.
        from flanneld.reconcile.firewall import Firewall, firewall_settings

        member = self._member
        settings = firewall_settings(member.options, member.config, member.lease.key, member.previous)
        self.firewall = firewall = Firewall(settings, stop=self._supervisor.stop, make_loop=self._make_loop)
        return firewall

    def _watch_leases(self) -> None:
        """Watch the peers' leases. For a backend without peers watch our own node at most."""
        manager, put = self._member.manager, self.reconciler.event_queue.put
        if self._member.uplink_manager.backend.has_peers:
            log.info("Watching for new subnet leases")
            self._watch("lease watch", partial(manager.watch, put))
            return
        put([Snapshot((self._member.lease,))])
        if isinstance(manager, NodeStore):
            self._watch("lease watch", manager.watch_node)

    def _watch(self, name: str, watch: Callable[[Callable[[], None]], None]) -> None:
        alive = partial(self._supervisor.heartbeat, name, LONGEST_SILENCE)
        self._supervisor.start(name, partial(watch, alive))

    def _moved(self) -> None:
        """Reconnect to the store, announce the new uplink in our lease, and record it for the next run."""
        member, uplink_manager = self._member, self._member.uplink_manager
        member.manager.reconnect()
        self.lease_keeper.announce(uplink_manager.backend.attributes())
        member.last_run.record(machine=machine_of(member.kernel, uplink_manager.uplink))
        self._on_move()
