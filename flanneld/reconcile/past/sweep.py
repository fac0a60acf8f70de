"""Sweep of an earlier run's stale objects, once all leases are known."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

from flanneld.compat.glog import counted
from flanneld.reconcile.host.host_watch import RETRY
from flanneld.reconcile.node_tables import NodeTables
from flanneld.reconcile.past.left_behind import LeftBehind
from flanneld.reconcile.peers import Peers
from flanneld.reconcile.permits import LeasePermits
from flanneld.state.removal_guard import RemovalGuard
from flanneld.state.resources import Resource

log = logging.getLogger(__name__)

#: Log lines about single objects, at most.
_FEW = 10


class Sweep:
    """Sweep of stale objects of an earlier run. It is repeated until all tables could be read."""

    def __init__(
        self,
        peers: Peers,
        tables: NodeTables,
        permits: LeasePermits,
        left_behind: LeftBehind,
        removal_guard: RemovalGuard,
    ) -> None:
        self._peers = peers
        self._tables = tables
        self._permits = permits
        self._left_behind = left_behind
        self._removal_guard = removal_guard
        self._was_in_sync = False
        #: Time of the next attempt, in seconds on ``clock.now``.
        self.due = math.inf

    def is_unfinished(self) -> bool:
        """Return True if stale objects of an earlier run are still there."""
        return self._permits.sweeps

    def run(self, now: float) -> bool:
        """Sweep, unless the removal guard stops it. Return False if the tables could not be read.

        Raises ``OSError`` if the sweep cannot be recorded; then it is tried again.
        """
        self._tables.reconciler.adopt = self._permits.sweeps = True
        self.due = math.inf
        report = self._tables.converge(now)
        if not self._was_in_sync:
            self._was_in_sync = True
            log.info(
                "In sync with %s: made %s, removed %d left by an earlier run",
                counted(len(self._peers), "peer"),
                counted(len(report.made), "object"),
                len(report.removed),
            )
            with suppress(OSError):
                self._left_behind.report_unclaimed()
        tell_of_removals(report.removed)
        if any(state.problem for state in self._tables.reconciler.states()):
            self.due = now + RETRY
            return False
        if not self._removal_guard.sweep_is_held:
            self.due = now + RETRY
            self._left_behind.record_sweep()
            self._tables.reconciler.adopt = self._permits.sweeps = False
            self.due = math.inf
        return True


def tell_of_removals(removed: Sequence[Resource]) -> None:
    """Log the removal of objects that an earlier run left."""
    for resource in removed[:_FEW]:
        log.info("Removed, left by an earlier run: %s", resource)
    if len(removed) > _FEW:
        log.info("Removed, left by an earlier run: %d more objects", len(removed) - _FEW)
