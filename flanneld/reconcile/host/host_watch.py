"""Watch of the host facts behind the desired state: the uplink and the host's other networks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from flanneld.backends.contract import encrypts
from flanneld.compat.glog import OneTimeWarnings, counted
from flanneld.errors import cause_of
from flanneld.network.obstacles import Obstacles
from flanneld.network.uplink_facts import read_host_networks
from flanneld.reconcile.encryption_watch import EncryptionWatch
from flanneld.reconcile.host.store_watch import StoreWatch
from flanneld.reconcile.local_node import LocalNode
from flanneld.reconcile.node_tables import NodeTables
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.reconciler import REST, SETTLE
from flanneld.runtime import clock
from flanneld.state.diff import Delta
from flanneld.state.resources import ROUTES, Link, Vxlan

log = logging.getLogger(__name__)

#: Seconds between two checks of the uplink and the host's networks without notifications.
LOOK_PERIOD = 30.0
#: Minimum seconds between two checks because of notifications.
LOOK_SPACING = 0.2
#: Seconds until a failed read of the kernel is tried again.
RETRY = 1.0


class HostWatch:
    """Watch that checks the host on demand and periodically. ``on_move`` is called after a new uplink."""

    def __init__(
        self, node: LocalNode, peers: Peers, tables: NodeTables, on_move: Callable[[], None]
    ) -> None:
        self._node = node
        self._manager = node.uplink_manager
        self._peers = peers
        self._tables = tables
        self._on_move = on_move
        self.encryption = EncryptionWatch()
        self._store = StoreWatch(node, peers.desired.get)
        self._once = OneTimeWarnings()
        self._next_look = clock.now()
        self._earliest_look = 0.0
        #: True if a notification asks to check the uplink as well as the host's networks.
        self.uplink_may_have_moved = False

    @property
    def next_look(self) -> float:
        """Return the time of the next check, in seconds on ``clock.now``."""
        return self._next_look

    def look_soon(self, now: float) -> None:
        """Check as soon as a burst of notifications has ended."""
        self._next_look = min(self._next_look, max(now + SETTLE, self._earliest_look))

    def postpone(self, now: float) -> None:
        """Schedule the next check as if one had just been made."""
        self._next_look = now + LOOK_PERIOD

    def look(self, now: float) -> None:
        """Follow the uplink, and decide again about leases that the host's networks affect."""
        began = clock.cpu_time()
        self.postpone(now)
        try:
            self._follow_uplink(now)
            self.look_at_networks(now)
        except OSError as failure:
            self.could_not_read(failure, now)
            return
        self.tell_of_bypasses()
        self._once.clear("read")
        self._earliest_look = now + max(LOOK_SPACING, REST * (clock.cpu_time() - began))

    def look_at_networks(self, now: float) -> None:
        """Remove the objects of leases that have become unsafe, and restore those that are safe again.

        Raises ``OSError`` if the kernel's tables cannot be read.
        """
        networks = [network for network, _ in self._manager.ranges]
        own = [net for net in self._node.lease.key if net is not None]
        store = self._store.look(now, networks, own)
        self._next_look = min(self._next_look, self._store.due)
        host = read_host_networks(self._node.kernel, networks, own, self._node.kernel.domain.links, store)
        if host != self._peers.safety.obstacles.host:
            self._change(self._peers.look(Obstacles(host), self._manager.backend), now)
        self._store.applied()
        self._peers.log_changes(now)

    def watch_encryption(self, now: float) -> None:
        """Check the host's routes again if the backend encrypts: those of an earlier run have gone."""
        if encrypts(self._manager.backend):
            with suppress(OSError):
                self.look_at_networks(now)
            self.tell_of_bypasses()

    def tell_of_bypasses(self) -> None:
        """Update the report of ways past the encryption, as the host and the tables were last read."""
        if encrypts(self._manager.backend):
            detours = self._peers.safety.obstacles.host.detours
            self.encryption.look(detours, self._peers.desired.table(ROUTES), self._tables.bypasses())

    def wish_for_ourselves(self) -> None:
        """Set the desired objects that this node needs without peers, for the current backend."""
        backend, kernel = self._manager.backend, self._node.kernel
        self._peers.wish_locally((*backend.local(self._node.lease), *self._node.extras))
        ours = self.links()
        kernel.domain = replace(
            kernel.domain,
            uplink=self._manager.uplink.name,
            links=frozenset(link.name for link in ours),
            bridging=frozenset(link.name for link in ours if isinstance(link, Vxlan)),
        )

    def links(self) -> list[Link]:
        """Return the devices that this node needs."""
        return [item for item in self._peers.local_resources() if isinstance(item, Link)]

    def could_not_read(self, failure: OSError, now: float) -> None:
        """Warn once of a failed read of the kernel, and try again soon."""
        self._once.warn(
            log,
            "read",
            f"Cannot read the kernel's tables: {cause_of(failure)}; changing nothing until they can be read",
        )
        self._next_look = min(self._next_look, now + RETRY)

    def _follow_uplink(self, now: float) -> None:
        manager = self._manager
        if not (self.uplink_may_have_moved or manager.asks_routes or manager.is_adrift):
            return
        moved = manager.follow()
        self.uplink_may_have_moved = False
        if moved:
            self.wish_for_ourselves()
        if moved or manager.asks_routes:
            self._change(self._peers.reconsider(manager.backend), now, all_anew=moved)
        if moved:
            self._on_move()

    def _change(self, delta: Delta, now: float, *, all_anew: bool = False) -> None:
        """Apply a new decision. A change of single leases waits until all leases are known."""
        if all_anew:
            report = self._tables.converge(now)
            log.info("Made %s for the new uplink", counted(len(report.made), "object"))
        elif delta and self._peers.synced:
            self._tables.change(delta, now)
        elif delta and self._peers.cached:
            self._tables.converge(now)
