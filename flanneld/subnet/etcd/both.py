"""Store on etcd's v2 and v3 APIs at once, for clusters that move from one to the other.

Our lease is written to both APIs under the same subnet, and leases in either are peers. v3 has precedence: it
decides races between nodes, and its lease counts if v2 has a different one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.config import Config, ConfigError, say_the_same
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.model import (
    Event,
    IPAddress,
    Lease,
    LeaseAttrs,
    LeaseKey,
    Removed,
    Snapshot,
    contests,
    name_of,
)
from flanneld.runtime import clock, supervisor, waits
from flanneld.runtime.logs import Once
from flanneld.subnet.allocation import fits
from flanneld.subnet.etcd.keys import Conflict, NoConfig, NoSuchApi, Position
from flanneld.subnet.etcd.leases import Listing, node_address, say_allocated, say_found, say_kept
from flanneld.subnet.etcd.store import SUBNET_TTL, TRIES, EtcdStore, LeaseTaken
from flanneld.subnet.etcd.union import LeaseUnion, OwnInBoth
from flanneld.subnet.store import LONGEST_SILENCE, NO_FACTS, Deliver, LocalFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds to wait before a missing half is restored. An operator cannot revoke a lease in both APIs at once;
#: this is enough for a script.
GRACE = 1.0

#: Watch function for one API, given a heartbeat callback.
_Watch = Callable[[EtcdStore, Callable[[], None]], None]


class BothStores:
    """``Store`` on two others. The first has precedence.

    An API that the servers lack at startup is left out. If one fails or refuses access later, its peers are
    kept and the other API goes on working.
    """

    def __init__(
        self, *stores: EtcdStore, pause: Callable[[threading.Event, float], bool] = waits.pause
    ) -> None:
        self._all = stores
        self._pause = pause
        #: Those that are there.
        self._sides: Sequence[EtcdStore] = stores
        self._once = Once()
        self._closed = threading.Event()
        self._own = OwnInBoth(side.api for side in stores)
        self._own_lock = threading.Lock()
        #: APIs in which the current renewal has succeeded, and the attributes it writes.
        self._done: set[str] = set()
        self._announced = LeaseAttrs()
        self._local = NO_FACTS

    @property
    def name(self) -> str:
        return " and ".join(side.name for side in self._sides)

    @property
    def problem(self) -> Retryable | None:
        """The current failure of a watch in either API, or None."""
        return next((side.problem for side in self._sides if side.problem), None)

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._all[0].addresses  # both have the same endpoints

    def network_config(self) -> Config:
        found: list[tuple[EtcdStore, Config]] = []
        problems: dict[EtcdStore, Retryable] = {}
        for side in self._all:
            try:
                found.append((side, side.network_config()))
            except ConfigError:
                raise
            except Retryable as problem:
                problems[side] = problem
        if not found:
            raise _no_config(list(problems.values()), self._all[0].config_key)
        config = found[0][1]
        if not all(say_the_same(config.source, other.source) for _, other in found):
            raise Retryable(
                f"the network configs at {self._all[0].config_key} in etcd's v3 and v2 APIs are different",
                "make them equal, or remove the one that is wrong",
            )
        self._sides = [side for side in self._all if not isinstance(problems.get(side), NoSuchApi)]
        for side, reason in problems.items():
            if not isinstance(reason, NoConfig):
                self._once.warn(log, side, f"Only one API of etcd is usable; {side.api}: {reason}")
        return config

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        listings, _ = self._listings(fresh=False)
        for listing in listings.values():
            for _, lease in listing.with_public_ip(public_ip):
                return lease.attrs
        return None

    def read_leases(self) -> Iterable[Lease]:
        listings, _ = self._listings(fresh=False)
        return [lease for each in listings.values() for lease in each.leases.values()]

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        self._local = local
        for side in self._all:
            side.local = local
        for attempt in range(TRIES):
            listings, problem = self._listings(fresh=attempt > 0)
            found = key = _ours(list(listings.values()), config, attrs, previous, local)
            if key is None and problem:
                # Without the other API's leases a new node could choose a subnet that is taken there.
                raise problem
            if key is None:
                union = _union(list(listings.values()))
                key = self._sides[0].pick(config, previous, union, local.connected)
            try:
                lease = self._take(key, attrs, listings)
                self._tidy_up(listings, lease)
            except (Conflict, LeaseTaken) as lost:
                log.log(V(1), "Another node was quicker, trying again: %s", lost)
                continue
            if found is None:
                say_allocated(lease)
            return lease
        raise Retryable(f"other nodes were quicker {TRIES} times in a row", "wait: it is tried again")

    def renew(self, lease: Lease) -> Lease:
        if self._own.missing and self._pause(self._closed, GRACE):
            raise Cancelled
        problems: list[Retryable] = []
        with self._own_lock:
            if self._own.is_gone:
                raise Retryable(f"the lease {lease} has gone from both APIs of etcd")
            if lease.attrs != self._announced:
                self._done.clear()
            self._announced = lease.attrs
            for side in self._sides:
                try:
                    self._renew_in(side, lease)
                except Retryable as problem:
                    problems.append(Retryable(f"{side.api}: {problem.problem}", problem.remedy))
            if problems:
                raise problems[0]
            self._done.clear()
            return self._own.whole()

    def publish_endpoints(self, name: str, text: str) -> None:
        _, problem = self._ask_each(lambda side: side.publish_endpoints(name, text))
        if problem:
            raise problem

    def endpoints(self) -> dict[str, str]:
        found, _ = self._ask_each(lambda side: side.endpoints())
        return {name: text for each in reversed(found.values()) for name, text in each.items()}

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        hear = self.hearing(deliver)
        self._watch_all(lambda side, beat: side.watch(partial(hear, side.api), beat), alive)

    def hearing(self, deliver: Deliver) -> Callable[[str, list[Event]], None]:
        """Return what takes the news of each API, by its name, and delivers those of the whole."""
        union = LeaseUnion(side.api for side in self._sides)
        lock = threading.Lock()

        def hear(api: str, events: list[Event]) -> None:
            with lock:
                told = [news for event in events for news in union.fold(api, event)]
                if told:
                    deliver(told)
                # Only after a snapshot: a node that changes its address updates one API after the other.
                if any(isinstance(event, Snapshot) for event in told):
                    self._warn_of_disputes(union)

        return hear

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        hear = self.hearing_own(lease, deliver)
        self._watch_all(lambda side, beat: side.watch_own(lease, partial(hear, side.api), beat), alive)

    def hearing_own(self, lease: Lease, deliver: Deliver) -> Callable[[str, list[Event]], None]:
        """Return the same for the news of our own lease."""

        def hear(api: str, events: list[Event]) -> None:
            with self._own_lock:
                told = [news for event in events for news in self._own.hear(api, event, clock.now())]
                if told:
                    self._done.discard(api)
                    deliver(told)
                if Removed(lease.key) in events and not self._own.is_gone:
                    log.warning("Our lease %s vanished from etcd %s: restoring it", lease, api)

        return hear

    def reread(self) -> None:
        for side in self._sides:
            side.reread()

    def reconnect(self) -> None:
        for side in self._sides:
            side.reconnect()

    def close(self) -> None:
        self._closed.set()
        for side in self._all:
            side.close()

    # ---- acquiring ---------------------------------------------------------------------------

    def _listings(self, *, fresh: bool) -> tuple[dict[EtcdStore, Listing], Retryable | None]:
        """Return the leases of each readable API, and the error of one that is not; see ``_ask_each``."""
        return self._ask_each(lambda side: side.listing(fresh=fresh))

    def _ask_each(self, ask: Callable[[EtcdStore], T]) -> tuple[dict[EtcdStore, T], Retryable | None]:
        """Return the result of each API that works, and the error of one that does not.

        Raises ``Retryable`` if none works.
        """
        results: dict[EtcdStore, T] = {}
        problem: Retryable | None = None
        for side in self._sides:
            try:
                results[side] = ask(side)
            except Retryable as reason:
                problem = reason
        if problem and not results:
            raise problem
        return results, problem

    def _take(
        self,
        key: LeaseKey,
        attrs: LeaseAttrs,
        listings: dict[EtcdStore, Listing],
    ) -> Lease:
        """Write our lease to every API, or to none. Raises ``LeaseTaken`` if another node has it."""
        had = {
            side: lease
            for side, listing in listings.items()
            for lease in listing.leases.values()
            if lease.key == key
        }
        proven = {
            side: lease
            for side, lease in had.items()
            if self._local.wrote(lease) and not self._local.is_self(lease.attrs, attrs)
        }
        is_reserved = any(lease.expires is None for lease in had.values())
        wanted = Lease(attrs, *key, expires=None if is_reserved else clock.now(), asof=-1)
        taken: dict[EtcdStore, Lease] = {}
        with self._own_lock:
            own = OwnInBoth((side.api for side in self._sides), self._local.is_self)
            for side in self._sides:
                try:
                    # The index that was read permits overwriting this lease, although its public IP differs.
                    asof = proven[side].asof if side in proven else wanted.asof
                    stored = side.renew(replace(wanted, asof=asof))
                    if side not in had:
                        side.yield_to_earlier(stored)
                    own.written(side.api, stored)
                except LeaseTaken:
                    for other, written in taken.items():
                        if other not in had:
                            other.give_back(written)
                    raise
                except Retryable as problem:
                    log.warning("Our lease %s is not in %s yet: %s", wanted, side.api, problem)
                    # By the time of the renewal there our address may be another one.
                    side.remember(wanted)
                    continue
                taken[side] = stored
            if not taken:
                raise Retryable(f"the lease {wanted} could not be written", "see the log above")
            for lease in list((proven or had).values())[:1]:
                (say_kept if proven else say_found)(lease)
            self._own = own
            self._announced = attrs
            return own.whole()

    def _tidy_up(self, listings: dict[EtcdStore, Listing], lease: Lease) -> None:
        """Remove our other leases: a node must not hold two, one in each API."""
        for side, listing in listings.items():
            for _, other in listing.of(lambda theirs: self._local.is_self(theirs, lease.attrs)):
                if other.key != lease.key and other.expires is not None:
                    log.info("Releasing the lease %s in etcd %s: ours is %s", other, side.api, lease)
                    side.give_back(other)

    # ---- renewing ----------------------------------------------------------------------------

    def _renew_in(self, side: EtcdStore, lease: Lease) -> None:
        """Renew our lease in one API, unless this renewal already succeeded there."""
        ends = self._own.ends(side.api)
        lasts = ends is None or ends - clock.now() > SUBNET_TTL / 2
        if side.api in self._done and lasts:
            return
        half = Lease(
            lease.attrs,
            *lease.key,
            expires=None if self._own.is_reserved else lease.expires,
            asof=self._own.asof(side.api, lease.asof),
        )
        try:
            stored = side.renew(half)
        except LeaseTaken as taken:
            if side is self._sides[0] and not self._own.has_written(side.api):
                # It did not answer at the start. Its lease counts, so peers lead to the other node for good.
                raise Fatal(f"{side.api}: {taken.problem}", taken.remedy) from taken
            raise
        self._own.written(side.api, stored)
        self._done.add(side.api)

    # ---- watching ----------------------------------------------------------------------------

    def _watch_all(self, watch: _Watch, alive: Callable[[], None]) -> None:
        """Watch each API in a thread of its own. A failure in one ends all."""
        beats = {side.api: clock.now() for side in self._sides}

        def beat(api: str) -> None:
            beats[api] = now = clock.now()
            if now - min(beats.values()) < LONGEST_SILENCE:
                alive()

        def run(side: EtcdStore) -> None:
            watch(side, lambda: beat(side.api))

        supervisor.run_together([partial(run, side) for side in self._sides], self.close)

    def _warn_of_disputes(self, union: LeaseUnion) -> None:
        for one, other in union.disputes():
            first, second = (side.api for side in self._sides)
            self._once.warn(
                log,
                one.key,
                f"The lease {one} belongs to node {node_address(one.attrs)} in {first}, which counts, and"
                f" to {node_address(other.attrs)} in {second}: remove the one that is wrong",
            )


def _ours(
    listings: Sequence[Listing],
    config: Config,
    attrs: LeaseAttrs,
    previous: LeaseKey,
    local: LocalFacts,
) -> LeaseKey | None:
    """Return the lease that is ours by identity or by proof in either API, or None.

    If there are several, the previous one is preferred.
    """
    mine = dict.fromkeys(
        lease.key
        for each in listings
        for _, lease in (
            *each.written_by(local),
            *each.of(lambda theirs: local.is_self(theirs, attrs)),
        )
    )
    good = [key for key in mine if fits(config, key) and not _is_contested(key, attrs, listings, local)]
    return previous if previous in good else next(iter(good), None)


def _is_contested(key: LeaseKey, attrs: LeaseAttrs, listings: Sequence[Listing], local: LocalFacts) -> bool:
    """Return True if another node, one that uses a single API, holds an overlapping lease."""
    rivals = [
        lease
        for each in listings
        for lease in each.leases.values()
        if not local.is_self(lease.attrs, attrs) and contests(lease.key, key) and not local.wrote(lease)
    ]
    for lease in rivals[:1]:
        log.warning(
            "The lease %s of ours overlaps %s of node %s", name_of(key), lease, node_address(lease.attrs)
        )
    return bool(rivals)


def _union(listings: Sequence[Listing]) -> Listing:
    """Merge listings into one, to find a subnet that is free in all."""
    leases = {
        f"{number}{path}": lease
        for number, each in enumerate(listings)
        for path, lease in each.leases.items()
    }
    return Listing(Position(0), leases, frozenset().union(*(each.unreadable for each in listings)))


def _no_config(problems: list[Retryable], key: str) -> Retryable:
    """Return the error to raise if no API has a readable config."""
    if any(not isinstance(each, NoConfig | NoSuchApi) for each in problems):
        return next(each for each in problems if not isinstance(each, NoConfig | NoSuchApi))
    if all(isinstance(each, NoSuchApi) for each in problems):
        return problems[0]
    remedy = next(each.remedy for each in problems if isinstance(each, NoConfig))
    return Retryable(f"etcd answers, but has no network config at {key}, in neither of its APIs", remedy)
