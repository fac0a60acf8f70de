"""The lease keeper step by step, against a store in memory and a clock that the tests turn."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network

import pytest
from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.config import Config
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.model import Added, IPAddress, Lease, LeaseAttrs, LeaseKey, Removed
from flanneld.runtime import clock as monotonic_clock
from flanneld.runtime.supervisor import StepLoop, Supervisor
from flanneld.subnet.lease_keeper import (
    ANNOUNCE_RETRY,
    CONTEST_SPACING,
    INTERVAL_RESET,
    MOST_CONTESTS,
    RENEW_RETRY,
    LeaseKeeper,
)
from flanneld.subnet.lease_keeper import PROBATION as NEWCOMERS_PROBATION
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts, Store
from tests.clock import Clock
from tests.lab.wait import wait_for

HOUR = 3600.0
TTL, MARGIN = 24 * HOUR, HOUR
#: Seconds that a node which yields waits; less than another one's spacing of writes.
PROBATION = NEWCOMERS_PROBATION
#: Seconds that a thread may take to get its turn.
PATIENCE = 30.0
KEY: LeaseKey = (IPv4Network("10.1.5.0/24"), None)


class MemoryStore:
    """Leases in memory, with indexes, terms and watchers, as etcd has them."""

    name = "a store in memory"
    problem: Retryable | None = None

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._watchers: list[Deliver] = []
        self.leases: dict[LeaseKey, Lease] = {}
        self.index = 0
        self.term = TTL
        self.failures: list[Exception] = []
        #: When somebody tried to renew.
        self.attempts: list[float] = []

    def write(self, lease: Lease) -> Lease:
        """A lease without end stays without, any other gets a full term."""
        with self._lock:
            self.index += 1
            expires = None if lease.expires is None else self._now() + self.term
            written = replace(lease, expires=expires, asof=self.index)
            self.leases[lease.key] = written
            for deliver in self._watchers:
                deliver([Added(written)])
            return written

    def remove(self, key: LeaseKey) -> None:
        with self._lock:
            self.index += 1
            del self.leases[key]
            for deliver in self._watchers:
                deliver([Removed(key)])

    def renew(self, lease: Lease) -> Lease:
        with self._lock:
            self.attempts.append(self._now())
            if self.failures:
                raise self.failures.pop(0)
            there = self.leases.get(lease.key)
            if there and there.attrs.public_ip != lease.attrs.public_ip and there.asof != lease.asof:
                raise Fatal("the lease is another node's, and who renews it does not know")
            return self.write(lease)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        del alive
        with self._lock:
            self._watchers.append(deliver)
            deliver([Added(self.leases[lease.key])])

    @property
    def addresses(self) -> frozenset[IPAddress]:
        raise NotImplementedError

    def network_config(self) -> Config:
        raise NotImplementedError

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        raise NotImplementedError

    def read_leases(self) -> Iterable[Lease]:
        raise NotImplementedError

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        raise NotImplementedError

    def publish_endpoints(self, name: str, text: str) -> None:
        raise NotImplementedError

    def endpoints(self) -> dict[str, str]:
        raise NotImplementedError

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        raise NotImplementedError

    def reread(self) -> None:
        raise NotImplementedError

    def reconnect(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Node:
    """A keeper at work for a node, stepped by the test; ``error`` is with what it ended."""

    def __init__(
        self,
        store: MemoryStore,
        clock: Clock,
        lease: Lease,
        *,
        contested: bool = True,
        earlier: tuple[LeaseAttrs, ...] = (),
    ) -> None:
        self.stop = threading.Event()
        self.revoked = threading.Event()
        self.error: BaseException | None = None
        self._clock = clock
        manager: Store = store
        self.lease_keeper = LeaseKeeper(
            manager,
            lease,
            margin=MARGIN,
            stop=self.stop,
            make_loop=Supervisor().loop,
            revoked=self._on_revoked,
            contested=contested,
            wrote=lambda attrs: attrs in earlier,
            probation=PROBATION,
        )
        store.watch_own(lease, self.lease_keeper.deliver, lambda: None)

    def settle(self) -> None:
        """Step until there is nothing to do at the present time."""
        while not self.ended and self._step() <= self._clock.time:
            pass

    def pass_time(self, seconds: float) -> None:
        self._clock.time += seconds
        self.settle()

    @property
    def ended(self) -> bool:
        return self.stop.is_set() or self.error is not None

    def _step(self) -> float:
        try:
            return self.lease_keeper.step(self._clock.time)
        except Exception as error:
            self.error = error
            return math.inf

    def _on_revoked(self) -> None:
        self.revoked.set()
        self.stop.set()


def attrs(number: int) -> LeaseAttrs:
    return LeaseAttrs(IPv4Address(f"192.168.0.{number}"), backend_type="host-gw")


OURS, OTHERS = attrs(1), attrs(2)
LEASE = Lease(OURS, *KEY, expires=0.0)
RESERVATION = replace(LEASE, expires=None)


pytestmark = pytest.mark.usefixtures("daemon_clock")


@pytest.fixture
def real_time(daemon_clock: Clock) -> Iterator[None]:
    del daemon_clock
    with monotonic_clock.replaced(monotonic_clock.Clock()):
        yield


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock)


Start = Callable[[Lease], Node]


@pytest.fixture
def start(store: MemoryStore, clock: Clock) -> Start:
    """Write a lease and let a keeper keep it."""
    nodes: list[Node] = []

    def start(lease: Lease) -> Node:
        nodes.append(Node(store, clock, store.write(lease)))
        nodes[-1].settle()
        return nodes[-1]

    return start


@pytest.fixture
def node(start: Start) -> Node:
    return start(LEASE)


def test_intervals_of_renewal_and_contest_are_those_of_the_docs() -> None:
    assert (RENEW_RETRY, ANNOUNCE_RETRY, NEWCOMERS_PROBATION, CONTEST_SPACING, INTERVAL_RESET) == (
        60,
        1,
        5,
        2,
        600,
    )


# ---- renewal -------------------------------------------------------------------------------------


def test_a_lease_is_renewed_when_only_the_margin_is_left(
    node: Node, store: MemoryStore, clock: Clock
) -> None:
    node.pass_time(TTL - MARGIN - 1)
    assert store.attempts == []
    node.pass_time(1)
    assert store.attempts == [clock.time]
    assert store.leases[KEY] == replace(LEASE, expires=clock.time + TTL, asof=2)


def test_thread_of_the_keeper_renews_on_time_takes_news_and_promises_heartbeats(
    real_time: None,
) -> None:
    del real_time
    store = MemoryStore(monotonic_clock.now)
    store.term = MARGIN + 0.1
    lease = store.write(LEASE)
    store.term = TTL
    stop = threading.Event()
    promises: set[float] = set()
    manager: Store = store

    def loop(
        _name: str, step: Callable[[float], float], sources: Callable[[], Iterable[int]] = tuple
    ) -> StepLoop:
        return StepLoop(step, sources, stop=stop, heartbeat=promises.add)

    keeper = LeaseKeeper(manager, lease, margin=MARGIN, stop=stop, make_loop=loop, revoked=lambda: None)
    thread = threading.Thread(target=keeper.run, daemon=True)
    thread.start()
    wait_for(lambda: store.attempts, PATIENCE, "a renewal")
    assert lease.expires is not None
    assert store.attempts[0] >= lease.expires - MARGIN
    keeper.announce(OTHERS)
    wait_for(lambda: store.leases[KEY].attrs == OTHERS, PATIENCE, "the announcement")
    stop.set()
    keeper.cancel()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert promises == {120.0}


def test_keeper_tells_the_lease_as_it_was_last_written_and_heard(node: Node, store: MemoryStore) -> None:
    assert node.lease_keeper.lease == store.leases[KEY]
    node.pass_time(TTL - MARGIN)
    assert node.lease_keeper.lease == store.leases[KEY]
    assert store.write(RESERVATION).asof == 3
    node.settle()
    assert node.lease_keeper.lease == replace(RESERVATION, asof=3)


def test_a_lease_is_renewed_again_and_again(node: Node, store: MemoryStore) -> None:
    for day in range(1, 4):
        node.pass_time(TTL - MARGIN)
        assert len(store.attempts) == day


def test_a_lease_past_its_time_is_renewed_at_once(start: Start, store: MemoryStore) -> None:
    store.term = -5.0
    start(LEASE)
    assert len(store.attempts) == 1


def test_a_term_shorter_than_the_margin_does_not_make_it_spin(node: Node, store: MemoryStore) -> None:
    store.term = MARGIN / 2
    node.pass_time(TTL - MARGIN)
    node.settle()
    assert len(store.attempts) == 1
    node.pass_time(1)
    assert len(store.attempts) == 2


def test_a_renewal_that_fails_is_tried_again_each_minute(
    node: Node, store: MemoryStore, clock: Clock
) -> None:
    store.failures = [Retryable("no answer")] * 3
    node.pass_time(TTL - MARGIN)
    due = clock.time
    for _ in range(8):
        node.pass_time(RENEW_RETRY / 2)
    assert store.attempts == [due, due + 60, due + 120, due + 180]
    node.pass_time(10 * RENEW_RETRY)
    assert len(store.attempts) == 4


def test_a_failure_is_logged_once_a_minute_and_its_end_once(
    node: Node, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store.failures = [Retryable("no answer", "start etcd")] * 2
    node.pass_time(TTL - MARGIN)
    for _ in range(2):
        node.pass_time(RENEW_RETRY)
    told = [record.getMessage() for record in caplog.records if not record.getMessage().startswith("Waiting")]
    assert [line.split()[0] for line in told] == ["Cannot", "Cannot", "The", "Lease"]
    assert "no answer; start etcd (for 60 s now)" in caplog.text


def test_wait_and_renewal_are_told_once_each_and_a_new_reading_of_the_same_is_not(
    start: Start, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = start(LEASE)
    node.lease_keeper.deliver([Added(store.leases[KEY])] * 3)
    node.pass_time(TTL - MARGIN)
    first, renewal, second = caplog.messages
    time = monotonic_clock.go_duration(TTL - MARGIN)
    assert first == second == f"Waiting for {time} to renew lease 10.1.5.0/24"
    assert renewal.startswith("Lease renewed, new expiration: ")


@pytest.mark.parametrize("failure", [Fatal("forbidden"), Cancelled()])
def test_fatal_error_ends_the_keeper(node: Node, store: MemoryStore, failure: Exception) -> None:
    store.failures = [failure]
    node.pass_time(TTL - MARGIN)
    assert (node.ended, node.error) == (True, failure)


def test_a_stop_ends_the_keeper_though_nothing_is_due(node: Node) -> None:
    assert node.error is None


# ---- reservations --------------------------------------------------------------------------------


def test_a_reservation_is_never_renewed(start: Start, store: MemoryStore) -> None:
    node = start(RESERVATION)
    node.pass_time(100 * 365 * 24 * HOUR)
    assert store.attempts == []


def test_a_reservation_stays_one_when_its_attributes_change(start: Start, store: MemoryStore) -> None:
    node = start(RESERVATION)
    node.lease_keeper.announce(OTHERS)
    node.settle()
    assert store.leases[KEY] == replace(RESERVATION, attrs=OTHERS, asof=2)
    node.pass_time(100 * TTL)
    assert len(store.attempts) == 1


def test_a_lease_that_an_operator_makes_permanent_is_no_longer_renewed(
    node: Node, store: MemoryStore
) -> None:
    store.write(RESERVATION)
    node.pass_time(10 * TTL)
    assert store.attempts == []


def test_a_reservation_that_an_operator_ends_is_renewed(start: Start, store: MemoryStore) -> None:
    node = start(RESERVATION)
    store.write(LEASE)
    node.pass_time(TTL - MARGIN)
    assert len(store.attempts) == 1


# ---- what we are ---------------------------------------------------------------------------------


def test_changed_attributes_are_written_at_once(node: Node, store: MemoryStore, clock: Clock) -> None:
    node.lease_keeper.announce(OTHERS)
    node.settle()
    assert store.leases[KEY] == Lease(OTHERS, *KEY, expires=clock.time + TTL, asof=2)


def test_attributes_that_change_twice_are_written_twice_without_a_pause(
    node: Node, store: MemoryStore
) -> None:
    for changed in (OTHERS, attrs(3)):
        node.lease_keeper.announce(changed)
        node.settle()
        assert store.leases[KEY].attrs == changed


def test_the_same_attributes_are_not_written_again(node: Node, store: MemoryStore) -> None:
    node.lease_keeper.announce(OURS)
    node.settle()
    assert store.attempts == []


def test_renewals_keep_the_changed_attributes(node: Node, store: MemoryStore) -> None:
    node.lease_keeper.announce(OTHERS)
    node.settle()
    for _ in range(2):
        node.pass_time(TTL - MARGIN)
    assert (store.index, store.leases[KEY].attrs) == (4, OTHERS)


def test_an_announcement_that_fails_is_tried_again_each_second(node: Node, store: MemoryStore) -> None:
    store.failures = [Retryable("no answer")] * 2
    node.lease_keeper.announce(OTHERS)
    node.settle()
    for attempts in (2, 3):
        node.pass_time(ANNOUNCE_RETRY / 2)
        assert len(store.attempts) == attempts - 1
        node.pass_time(ANNOUNCE_RETRY / 2)
        assert len(store.attempts) == attempts
    assert store.leases[KEY].attrs == OTHERS


def test_a_store_that_asks_for_more_time_is_given_it(node: Node, store: MemoryStore) -> None:
    store.failures = [Retryable("too many requests", retry_after=ANNOUNCE_RETRY * 8)]
    node.lease_keeper.announce(OTHERS)
    node.settle()
    node.pass_time(ANNOUNCE_RETRY * 7)
    assert len(store.attempts) == 1
    node.pass_time(ANNOUNCE_RETRY)
    assert len(store.attempts) == 2


def test_once_announced_there_is_no_hurry_any_more(node: Node, store: MemoryStore, clock: Clock) -> None:
    node.lease_keeper.announce(OTHERS)
    node.settle()
    store.failures = [Retryable("no answer")]
    node.pass_time(TTL - MARGIN)
    due = clock.time
    node.pass_time(RENEW_RETRY - 1)
    node.pass_time(1)
    assert store.attempts[1:] == [due, due + RENEW_RETRY]


def test_the_last_announcement_counts(node: Node, store: MemoryStore) -> None:
    store.failures = [Retryable("no answer")]
    node.lease_keeper.announce(OTHERS)
    node.lease_keeper.announce(attrs(3))
    node.settle()
    node.pass_time(ANNOUNCE_RETRY)
    assert store.leases[KEY].attrs == attrs(3)


# ---- revocation ----------------------------------------------------------------------------------


def test_a_revoked_lease_is_reported_and_not_written_again(
    node: Node, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.remove(KEY)
    node.settle()
    assert caplog.messages == ["Lease has been revoked. Shutting down daemon. It was 10.1.5.0/24"]
    assert (node.revoked.is_set(), node.error) == (True, None)
    assert (store.leases, store.attempts) == ({}, [])


def test_a_revoked_lease_that_was_due_is_not_written_again(
    node: Node, store: MemoryStore, clock: Clock
) -> None:
    clock.time += 2 * TTL
    store.remove(KEY)
    node.settle()
    assert node.ended
    assert (store.leases, store.attempts) == ({}, [])


# ---- two nodes, one lease ------------------------------------------------------------------------


def test_the_newcomer_yields_and_the_older_node_keeps_the_lease(
    start: Start, store: MemoryStore, clock: Clock
) -> None:
    older = start(LEASE)
    older.pass_time(PROBATION)
    newcomer = start(replace(LEASE, attrs=OTHERS))
    older.settle()
    newcomer.settle()
    newcomer.pass_time(PROBATION)
    assert isinstance(newcomer.error, Fatal)
    assert "--public-ip" in str(newcomer.error)
    assert (older.ended, store.leases[KEY].attrs) == (False, OURS)
    assert store.leases[KEY].expires == clock.time - PROBATION + TTL


def test_holder_within_the_probation_is_a_newcomer(node: Node, store: MemoryStore) -> None:
    node.pass_time(PROBATION / 2)
    store.write(replace(LEASE, attrs=OTHERS))
    node.settle()
    node.pass_time(PROBATION)
    assert isinstance(node.error, Fatal)
    assert store.leases[KEY].attrs == OTHERS


@pytest.mark.parametrize("present", [OURS, attrs(3)], ids=["as taken", "as announced since"])
def test_holder_within_the_probation_keeps_a_lease_that_shows_where_it_was(
    store: MemoryStore, clock: Clock, present: LeaseAttrs
) -> None:
    node = Node(store, clock, store.write(LEASE), earlier=(OTHERS,))
    node.lease_keeper.announce(present)
    node.settle()
    store.write(replace(LEASE, attrs=OTHERS))  # the store was restored from a backup
    node.settle()
    node.pass_time(PROBATION)
    assert (node.ended, store.leases[KEY].attrs) == (False, present)


def test_holder_within_the_probation_yields_if_where_it_was_is_written_again(
    store: MemoryStore, clock: Clock
) -> None:
    node = Node(store, clock, store.write(LEASE), earlier=(OTHERS,))
    for _ in range(2):
        store.write(replace(LEASE, attrs=OTHERS))
        node.settle()
    node.pass_time(PROBATION)
    assert isinstance(node.error, Fatal)
    assert store.leases[KEY].attrs == OTHERS


def test_the_older_node_complains_once(
    node: Node, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    node.pass_time(PROBATION)
    for _ in range(3):
        store.write(replace(LEASE, attrs=OTHERS))
        node.pass_time(CONTEST_SPACING)
        assert store.leases[KEY].attrs == OURS
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_two_nodes_of_old_standing_do_not_write_over_each_other_without_pause(
    store: MemoryStore, clock: Clock
) -> None:
    lease = store.write(LEASE)
    ours, theirs = Node(store, clock, lease), Node(store, clock, lease)
    ours.pass_time(PROBATION)
    theirs.settle()
    theirs.lease_keeper.announce(OTHERS)
    for _ in range(5):
        theirs.settle()
        ours.settle()
    first = len(store.attempts)
    assert 2 <= first <= 3
    for _ in range(4):
        theirs.pass_time(CONTEST_SPACING / 4)
        ours.settle()
    assert first < len(store.attempts) <= first + 2
    for node in (ours, theirs):
        assert not node.ended


BOTH_ORDERS = pytest.mark.parametrize(("ours", "others"), [(OURS, OTHERS), (OTHERS, OURS)])


@BOTH_ORDERS
def test_of_two_nodes_of_old_standing_the_lower_yields_in_the_end(
    ours: LeaseAttrs, others: LeaseAttrs, store: MemoryStore, clock: Clock
) -> None:
    lease = store.write(replace(LEASE, attrs=ours))
    one, other = Node(store, clock, lease), Node(store, clock, lease)
    one.pass_time(PROBATION)
    other.settle()
    other.lease_keeper.announce(others)
    for _ in range(8 * MOST_CONTESTS):
        other.pass_time(CONTEST_SPACING / 4)
        one.settle()
    assert (one.ended, other.ended) == (ours == OURS, others == OURS)
    assert store.leases[KEY].attrs == OTHERS


@pytest.mark.parametrize("quiet", [0.0, PROBATION])
def test_older_node_with_the_lower_address_yields_to_the_tenth_write_of_the_other(
    node: Node, store: MemoryStore, quiet: float
) -> None:
    node.pass_time(PROBATION)
    node.lease_keeper.announce(attrs(3))
    node.settle()
    node.pass_time(quiet)
    for _ in range(MOST_CONTESTS):
        assert node.lease_keeper.problem == ""
        store.write(replace(LEASE, attrs=attrs(4)))
        node.pass_time(CONTEST_SPACING)
    assert "give each node its own address" in node.lease_keeper.problem
    assert len(store.attempts) == MOST_CONTESTS


@pytest.mark.parametrize("outlasted", [attrs(2), attrs(3)], ids=["a lower one", "one with its attributes"])
def test_older_node_that_outlasted_another_yields_to_a_higher_one_at_once(
    node: Node, store: MemoryStore, outlasted: LeaseAttrs
) -> None:
    node.pass_time(PROBATION)
    node.lease_keeper.announce(attrs(3))
    node.settle()
    for _ in range(MOST_CONTESTS + 1):
        store.write(replace(LEASE, attrs=outlasted))
        node.pass_time(CONTEST_SPACING)
    assert (node.lease_keeper.problem, store.leases[KEY].attrs) == ("", attrs(3))
    store.write(replace(LEASE, attrs=attrs(4)))
    node.settle()
    assert node.lease_keeper.problem


@BOTH_ORDERS
@pytest.mark.parametrize("restart", [0.1, 2.0, 30.0])
def test_older_node_keeps_its_lease_while_a_newcomer_is_started_again_and_again(
    ours: LeaseAttrs, others: LeaseAttrs, restart: float, start: Start, store: MemoryStore
) -> None:
    older = start(replace(LEASE, attrs=ours))
    older.pass_time(PROBATION)
    for _ in range(2 * MOST_CONTESTS):
        newcomer = start(replace(LEASE, attrs=others))
        older.settle()
        for _ in range(2):
            older.pass_time(CONTEST_SPACING)
            newcomer.settle()
        newcomer.pass_time(PROBATION - CONTEST_SPACING)
        assert newcomer.ended
        older.pass_time(restart)
    assert (older.error, store.leases[KEY].attrs) == (None, ours)


@BOTH_ORDERS
def test_writes_of_another_node_that_a_late_watch_shows_together_are_one(
    ours: LeaseAttrs, others: LeaseAttrs, start: Start, store: MemoryStore
) -> None:
    node = start(replace(LEASE, attrs=ours))
    node.pass_time(PROBATION)
    store.write(replace(LEASE, attrs=others))
    node.settle()
    for _ in range(2 * MOST_CONTESTS):
        store.write(replace(LEASE, attrs=others))
    node.settle()
    node.pass_time(CONTEST_SPACING)
    assert (node.error, store.leases[KEY].attrs) == (None, ours)


@pytest.mark.parametrize(
    ("term", "attempts"), [(TTL, 1), (TTL - 59, 1), (TTL - 60, 0), (TTL - 61, 0), (HOUR * 2, 0)]
)
def test_full_term_is_another_nodes_renewal_and_a_shorter_one_an_operators_extension(
    node: Node, store: MemoryStore, clock: Clock, term: float, attempts: int
) -> None:
    node.pass_time(PROBATION)
    store.term = term
    expires = store.write(LEASE).expires
    store.term = TTL
    node.settle()
    assert len(store.attempts) == attempts
    assert node.lease_keeper.lease.expires == (clock.time + TTL if attempts else expires)


def test_newcomer_waits_for_the_length_of_the_probation_before_it_ends(
    node: Node, store: MemoryStore
) -> None:
    store.write(replace(LEASE, attrs=OTHERS))
    node.pass_time(PROBATION - 1)
    node.pass_time(PROBATION - 1)
    assert node.error is None
    node.pass_time(1)
    assert isinstance(node.error, Fatal)
    assert "another node writes itself into our lease 10.1.5.0/24" in node.error.problem
    assert store.attempts == []


@pytest.mark.parametrize("asof", [0, 1])
def test_write_of_another_node_no_later_than_ours_is_no_contest(
    node: Node, store: MemoryStore, asof: int, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = replace(store.leases[KEY], attrs=OTHERS, asof=asof)
    for _ in range(2):
        node.lease_keeper.deliver([Added(theirs)])
        node.settle()
    assert (node.ended, len(store.attempts)) == (False, 1)
    assert "another node" not in caplog.text


def test_store_restored_from_a_backup_hears_of_our_present_attributes(
    node: Node, store: MemoryStore, clock: Clock
) -> None:
    former = store.leases[KEY]
    node.pass_time(PROBATION)
    node.lease_keeper.announce(OTHERS)
    node.settle()
    # It knows its former attributes for ours.
    store.leases[KEY] = replace(former, asof=store.index)
    node.lease_keeper.deliver([Added(former)])
    node.pass_time(CONTEST_SPACING)
    assert (node.error, store.leases[KEY].attrs) == (None, OTHERS)
    assert store.attempts[-1] == clock.time


@pytest.mark.parametrize("passed", [0.0, PROBATION])
def test_own_write_whose_answer_got_lost_is_no_contest(
    node: Node, store: MemoryStore, passed: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the uplink has another address: the watch tells of our write before it is tried again."""
    node.pass_time(passed)
    store.failures = [Retryable("no answer")]
    node.lease_keeper.announce(OTHERS)
    node.settle()
    store.write(replace(LEASE, attrs=OTHERS))
    node.settle()
    node.pass_time(ANNOUNCE_RETRY)
    assert (node.error, store.leases[KEY].attrs) == (None, OTHERS)
    assert "another node" not in caplog.text


def test_only_as_many_writes_are_taken_for_ours_as_answers_got_lost(
    node: Node, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    node.pass_time(PROBATION)
    store.failures = [Retryable("no answer")]
    node.lease_keeper.announce(OTHERS)
    node.settle()
    for _ in range(2):
        store.write(replace(LEASE, attrs=OTHERS))
    node.settle()
    assert "another node writes itself into our lease" in caplog.text


def test_an_older_echo_of_ours_does_not_undo_an_announcement(node: Node, store: MemoryStore) -> None:
    node.pass_time(PROBATION)
    node.lease_keeper.announce(OTHERS)
    node.lease_keeper.deliver([Added(replace(LEASE, expires=TTL, asof=1))])
    node.settle()
    assert (len(store.attempts), store.leases[KEY].attrs) == (1, OTHERS)


# ---- a lease that is nobody else's ----------------------------------------------------------------


def test_overwritten_attributes_are_rewritten(
    store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(store, clock, store.write(RESERVATION), contested=False)
    store.write(replace(RESERVATION, attrs=LeaseAttrs()))
    node.settle()
    assert store.leases[KEY].attrs == OURS
    store.write(replace(RESERVATION, attrs=OTHERS))
    node.settle()
    assert store.leases[KEY].attrs == OTHERS
    node.pass_time(4 * CONTEST_SPACING)
    assert store.leases[KEY].attrs == OURS
    assert node.error is None
    assert caplog.text.count("rewriting them") == 1


def test_contested_attributes_are_rewritten_with_growing_intervals_and_logged_once(
    store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = Node(store, clock, store.write(RESERVATION), contested=False)
    theirs = replace(RESERVATION, attrs=OTHERS)
    for _ in range(8):
        tries = len(store.attempts)
        node.lease_keeper.deliver(
            [Added(store.write(theirs))]
        )  # told twice, which is no reason to wait longer
        node.settle()
        for _ in range(121):
            if len(store.attempts) == tries:
                node.pass_time(1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(store.attempts)]
    assert 2 * CONTEST_SPACING <= pauses[0] <= 4 * CONTEST_SPACING + 1
    assert all(pause >= 60 for pause in pauses[-3:])
    assert all(pause <= 121 for pause in pauses)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    node.pass_time(INTERVAL_RESET + 121)
    store.write(theirs)
    node.settle()
    assert store.leases[KEY].attrs == OURS
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
    store.write(theirs)
    node.settle()
    node.pass_time(4 * CONTEST_SPACING)
    assert store.leases[KEY].attrs == OURS, "the pauses are short again"


@pytest.mark.parametrize(("quiet", "warnings"), [(INTERVAL_RESET - 1, 1), (INTERVAL_RESET, 2)])
def test_foreign_change_is_a_repetition_until_ten_minutes_have_passed_without_one(
    quiet: float, warnings: int, store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(store, clock, store.write(RESERVATION), contested=False)
    for _ in range(2):
        store.write(replace(RESERVATION, attrs=OTHERS))
        node.settle()
        node.pass_time(quiet)
    assert store.leases[KEY].attrs == OURS
    assert caplog.text.count("rewriting them") == warnings


def test_renewals_against_something_that_changes_them_back_are_logged_at_verbosity_one(
    store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(V(2))
    node = Node(store, clock, store.write(RESERVATION), contested=False)
    for _ in range(2):
        store.write(replace(RESERVATION, attrs=OTHERS))
        node.settle()
        node.pass_time(4 * CONTEST_SPACING)
    renewals = [record for record in caplog.records if record.getMessage().startswith("Lease renewed")]
    assert [record.levelno for record in renewals] == [V(0), V(1)]
