"""Lease keeper (upstream's MonitorLease): renews our lease in time and keeps its attributes correct."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.errors import LEASE_TAKEN, Fatal, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, Snapshot
from flanneld.runtime import clock
from flanneld.runtime.logs import Once, Outage
from flanneld.runtime.supervisor import MakeLoop
from flanneld.runtime.waits import Backoff
from flanneld.subnet.codec import format_attrs
from flanneld.subnet.store import Store

log = logging.getLogger(__name__)

#: Name of the keeper's thread.
NAME = "lease keeper"
RENEW_RETRY = 60.0
#: Seconds before a failed write of changed attributes is retried. Until it succeeds, peers use the old
#: address.
ANNOUNCE_RETRY = 1.0
#: Seconds after taking a lease in which a conflict with another node makes this one yield, as the newcomer.
PROBATION = 5.0
#: Seconds between two writes of a contested lease, so that two nodes do not overwrite each other
#: continuously. Less than the probation, so that a newcomer notices the conflict in time.
CONTEST_SPACING = 2.0
#: Writes of ours undone by another node after which one of two older ones yields, and the seconds in which it
#: undoes each. Less than the probation: a newcomer that yields and is started again takes longer.
MOST_CONTESTS = 10
_REPLY_TIME = 4.0
#: Seconds without a foreign change after which the growing write interval starts over.
INTERVAL_RESET = 600.0
#: Seconds allowed between a write and its notification, when telling a full TTL from a shorter one.
_TRAVEL = 60.0
#: Longest interval in seconds between writes of attributes that another program keeps changing.
_LONGEST_SPACING = 60.0
#: Lost answers that are remembered; each may be of a write that was done.
_MOST_UNCONFIRMED = 10
#: Whatever the store grants, we do not spin.
_SHORTEST_TERM = 1.0


class LeaseKeeper:
    """Keeper of one lease. ``revoked`` is called if the store removed it.

    ``contested``: a foreign change means that another node may have our lease; else it is corrected.
    ``written`` is called after each renewal, ``lost`` when we yield in a conflict. ``wrote`` returns True for
    attributes that this host wrote into the lease before, as the backup of a store shows them.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        *,
        margin: float,
        stop: threading.Event,
        make_loop: MakeLoop,
        revoked: Callable[[], None],
        contested: bool = True,
        written: Callable[[Lease], None] = lambda _lease: None,
        lost: Callable[[], None] = lambda: None,
        wrote: Callable[[LeaseAttrs], bool] = lambda _attrs: False,
        probation: float = PROBATION,
    ) -> None:
        self._store = store
        self._lease = lease
        self._margin = margin
        self._stop = stop
        self._loop = make_loop(NAME, self.step)
        self._revoked = revoked
        self._contested = contested
        self._written = written
        self._lost = lost
        self._wrote = wrote
        self._probation = probation
        self._taken_at = clock.now()
        self._term = None if lease.expires is None else lease.expires - self._taken_at
        self._told_expiry = -math.inf
        self._renewed_at = 0.0
        self._retry_at: float | None = None
        #: Attributes of writes whose answers got lost: they may be in the store, and are ours there.
        self._unconfirmed: deque[LeaseAttrs] = deque(maxlen=_MOST_UNCONFIRMED)
        #: The store tells the peers other attributes than ours.
        self._misrepresented = False
        #: Back-off of corrections, and until when another foreign change counts as repeated.
        self._undone = Backoff(first=CONTEST_SPACING, longest=_LONGEST_SPACING)
        self._contests = 0
        self._contested_until = 0.0
        self._is_contested = False
        #: The conflict we lost, and when to end because of it.
        self._lost_to: Fatal | None = None
        self._end_at = math.inf
        self._inbox: deque[Event | LeaseAttrs] = deque()
        self._once = Once()
        self._outage = Outage(
            log, f"Cannot renew the lease {lease}", f"The lease {lease} could be renewed again"
        )

    @property
    def lease(self) -> Lease:
        """Our lease as now known. May be read from any thread."""
        return self._lease

    @property
    def problem(self) -> str:
        """The conflict that we lost, and its remedy; empty without one. May be read from any thread."""
        return str(self._lost_to or "")

    def announce(self, attrs: LeaseAttrs) -> None:
        """Write new attributes. May be called from any thread."""
        self._inbox.append(attrs)
        self._loop.cancel()

    def deliver(self, events: list[Event]) -> None:
        """Queue events about our lease. May be called from any thread."""
        self._inbox.extend(events)
        self._loop.cancel()

    def cancel(self) -> None:
        """End the wait of ``run``. May be called from any thread."""
        self._loop.cancel()

    def run(self) -> None:
        """Step until ``stop`` is set."""
        self._loop.run()
        log.info("Stopped monitoring lease %s", self._lease)

    def step(self, now: float) -> float:
        """Handle one queued event and renew if due; return the time of the next step."""
        if self._lost_to is not None:
            if now >= self._end_at:
                raise self._lost_to
            return self._end_at
        if self._inbox:
            self._take(self._inbox.popleft(), now)
        if self._stop.is_set():
            return math.inf
        if now >= self._due():
            self._renew()
        return now if self._inbox else self._due()

    def _due(self) -> float:
        """Return the time of the next renewal, which may be past; infinite for a reservation."""
        if self._lost_to is not None:
            return self._end_at
        if self._retry_at is not None:
            return self._retry_at
        if self._lease.expires is None:
            return math.inf
        return max(self._lease.expires - self._margin, self._renewed_at + _SHORTEST_TERM)

    def _take(self, item: Event | LeaseAttrs, now: float) -> None:
        match item:
            case LeaseAttrs():
                if item != self._lease.attrs:
                    self._lease = replace(self._lease, attrs=item)
                    self._correct(now, spacing=0.0)
            case Added(lease):
                self._heard(lease, now)
            case Removed():
                log.error("Lease has been revoked. Shutting down daemon. It was %s", self._lease)
                self._revoked()
            case Snapshot():
                raise TypeError("a watch of one lease delivers no snapshot")

    def _heard(self, lease: Lease, now: float) -> None:
        """Take in what our lease says now; no node wrote after us what is older than our own last write."""
        is_other = self._contested and lease.attrs != self._lease.attrs
        if is_other and lease.asof <= self._lease.asof and not self._misrepresented:
            # It came late, or the store was restored from a backup: only a renewal shows which.
            self._correct(now, spacing=CONTEST_SPACING)
        if lease.asof < self._lease.asof:
            return
        if lease.asof > self._lease.asof and lease.attrs in self._unconfirmed:
            self._unconfirmed.remove(lease.attrs)
            self._confirmed(lease, now)
            return
        if self._is_a_nodes_write(lease, now) and (lease.asof > self._lease.asof or not self._contested):
            (self._contest if self._contested else self._put_right)(lease, now)
            return
        self._confirmed(lease, now)

    def _confirmed(self, lease: Lease, now: float) -> None:
        """Adopt index and expiry from the store; tell the wait for the renewal if it has changed."""
        self._lease = replace(self._lease, expires=lease.expires, asof=lease.asof)
        if lease.expires is not None and abs(lease.expires - self._told_expiry) > _TRAVEL:
            self._told_expiry = lease.expires
            wait = clock.go_duration(self._due() - now)
            log.info("Waiting for %s to renew lease %s", wait, self._lease)

    def _is_a_nodes_write(self, lease: Lease, now: float) -> bool:
        """Return True if a node wrote the change: operators change neither attributes nor the full TTL."""
        if lease.attrs != self._lease.attrs:
            return True
        if lease.expires is None or self._term is None:
            return False
        return lease.expires - now > self._term - _TRAVEL

    def _put_right(self, lease: Lease, now: float) -> None:
        """Correct attributes that another program changed, ever more rarely if it repeats that."""
        self._lease = replace(self._lease, asof=lease.asof)
        if self._misrepresented:
            return
        self._is_contested = now < self._contested_until
        if not self._is_contested:
            self._undone.reset()
            log.warning("Our lease's attributes were overwritten: rewriting them")
        spacing = self._undone.pause()
        self._correct(now, spacing=spacing)
        self._contested_until = now + INTERVAL_RESET

    def _contest(self, lease: Lease, now: float) -> None:
        """Another node took our lease, by our public IP or key; the one that has had it longer keeps it.

        If both have had it for long, as after a restore of the store, the lower attributes yield in the end.
        """
        problem = f"{LEASE_TAKEN} {lease}: {lease.attrs}"
        remedy = "give each node its own address with --public-ip; on a clone remove copied key files"
        if not self._misrepresented:  # else we have not written since the last one, which a late watch shows
            is_reply = now - self._renewed_at < _REPLY_TIME
            self._contests = self._contests + 1 if is_reply else 1
        # What we wrote before may be a restored backup's, unless it is written again after us.
        is_new = now - self._taken_at < self._probation
        is_newcomer = is_new and (self._contests > 1 or not self._wrote(lease.attrs))
        is_long = self._contests >= MOST_CONTESTS
        if is_newcomer or (is_long and _order(self._lease.attrs) < _order(lease.attrs)):
            log.error("%s; %s; yielding to it", problem, remedy)
            self._lost()
            # An immediate restart would find the other node on probation, and the lease would alternate.
            self._lost_to, self._end_at = Fatal(problem, remedy), now + self._probation
            return
        self._once.warn(log, "contest", f"{problem}; keeping it; {remedy}")
        self._lease = replace(self._lease, asof=lease.asof)
        self._correct(now, spacing=CONTEST_SPACING)

    def _correct(self, now: float, *, spacing: float) -> None:
        """Schedule a write of our attributes, at least ``spacing`` seconds after the last one."""
        self._misrepresented = True
        self._retry_at = max(now, self._renewed_at + spacing)

    def _renew(self) -> None:
        try:
            renewed = self._store.renew(self._lease)
        except Retryable as reason:
            self._outage.failed(reason)
            self._unconfirmed.append(self._lease.attrs)
            pause = ANNOUNCE_RETRY if self._misrepresented else RENEW_RETRY
            self._retry_at = clock.now() + max(pause, reason.retry_after)
            return
        self._written(renewed)
        self._lease = renewed
        self._unconfirmed.clear()
        self._renewed_at = clock.now()
        self._retry_at = None
        self._misrepresented = False
        self._outage.over()
        ends = "never"
        if renewed.expires is not None:
            ends = clock.go_text(clock.wall() + renewed.expires - self._renewed_at)
        level = V(1 if self._is_contested else 0)
        log.log(level, "Lease renewed, new expiration: %s, of %s", ends, renewed)
        self._is_contested = False


def _order(attrs: LeaseAttrs) -> str:
    """Return a text by which two nodes agree whose attributes are lower."""
    return format_attrs(attrs, with_ipv6=True)
