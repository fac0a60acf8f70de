"""Log of changed leases: a line for each, or their number where many change."""

from __future__ import annotations

import logging
import math

from msgspec import Struct

from flanneld.model import FAMILIES, Lease, LeaseKey, name_of

log = logging.getLogger(__name__)

#: Lines about single leases in each period, at most, and the period in seconds.
FEW, PERIOD = 10, 1.0


class LeaseChange(Struct, frozen=True, gc=False):
    """A new or changed lease, or the key of one that has gone; told in upstream's words."""

    key: LeaseKey
    lease: Lease | None = None
    is_change: bool = False

    def __str__(self) -> str:
        if self.lease is None:
            return f"Subnet removed: {name_of(self.key)}"
        public = ", ".join(str(ip) for family in FAMILIES if (ip := self.lease.attrs.public(family)))
        was = ", which changed" if self.is_change else ""
        return f"Subnet added: {name_of(self.key)} via {public or 'no public IP'}{was}"


class LeaseLog:
    """Log with a limit: a line takes a fifth of the time of the change that it is about.

    The changes that exceed ``FEW`` in a period are told at its end, in one line if they are many.
    """

    def __init__(self) -> None:
        self._waiting: list[LeaseChange] = []
        self._left = FEW
        self._period_end = -math.inf

    @property
    def due(self) -> float:
        """Return the time of the next ``write`` that is needed, infinity if nothing waits."""
        return self._period_end if self._waiting else math.inf

    def note(self, key: LeaseKey, lease: Lease | None = None, *, is_change: bool = False) -> None:
        """Add a change."""
        self._waiting.append(LeaseChange(key, lease, is_change))

    def write(self, now: float) -> None:
        """Log what may be logged by now."""
        if not self._waiting:
            return
        if now >= self._period_end:
            self._left, self._period_end = FEW, now + PERIOD
        if len(self._waiting) <= self._left:
            self._left -= len(self._waiting)
            for change in self._waiting:
                log.info("%s", change)
        elif self._left == FEW:
            self._left = 0
            gone = sum(change.lease is None for change in self._waiting)
            log.info("Leases: %d new or changed, %d gone", len(self._waiting) - gone, gone)
        else:
            return
        self._waiting.clear()
