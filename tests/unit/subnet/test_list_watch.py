"""List and watch over a source in memory: new sources, cuts by other threads, pauses, and the log."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network

import pytest

from flanneld.errors import Cancelled, NoAnswer, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Snapshot
from flanneld.subnet.list_watch import Contact, ListWatch, PossibleGap, RelistNeeded, Watches
from tests.clock import Clock
from tests.lab.wait import wait_for
from tests.local_etcd import DEADLINE

PACE = 1.0


class Memory:
    """A store in memory. Each call of a source waits in ``stuck`` until it is cancelled, or goes on."""

    def __init__(self, pace: float = PACE) -> None:
        self.sources: list[MemorySource] = []
        self.changes: list[Event] = []
        self.failures: list[Exception] = []
        self.stuck = ""
        self.has_position = True
        self.on_start: Callable[[], None] = lambda: None
        self.watch: ListWatch[int] = ListWatch(self.open, "it", back="it is back", pace=pace)

    def open(self, contact: Contact) -> MemorySource:
        self.sources.append(MemorySource(self, contact))
        return self.sources[-1]

    def step(self, now: float) -> tuple[list[Event], float]:
        told: list[Event] = []
        due = self.watch.step(now, told.extend)
        return told, due


class MemorySource:
    def __init__(self, store: Memory, contact: Contact) -> None:
        self._store = store
        self._contact = contact
        self._cancelled = threading.Event()
        self.is_stuck = threading.Event()
        self.is_closed = False
        self.resumes_from: int | None = None

    def start(self, resume: int | None) -> tuple[list[Event], int | None]:
        self.resumes_from = resume
        self._wait("start")
        self._store.on_start()
        self._contact()
        return [Snapshot(())], len(self._store.changes) if self._store.has_position else None

    def changes(self, after: int) -> tuple[list[Event], int]:
        self._wait("changes")
        return self._store.changes[after:], len(self._store.changes)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self.is_closed = True

    def _wait(self, call: str) -> None:
        if self._store.stuck == call:
            self.is_stuck.set()
            self._cancelled.wait(DEADLINE)
        if self._cancelled.is_set():
            raise Cancelled
        if self._store.failures:
            raise self._store.failures.pop(0)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(Memory(pace=0.05))
    yield running
    running.end()


class Running:
    """The watch of a store in a thread, which other threads disturb."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.told: list[Event] = []
        self.ended: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.memory.watch.close()
        if self._thread.ident:
            self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.memory.watch.run(self.told.extend, lambda: None)
        except BaseException as error:
            self.ended.append(error)


def added(number: int) -> Added:
    return Added(Lease(LeaseAttrs(), IPv4Network(f"10.1.{number}.0/24")))


def test_store_is_listed_once_and_then_followed(memory: Memory) -> None:
    assert memory.step(0.0)[0] == [Snapshot(())]
    memory.changes += [added(1), added(2)]
    assert memory.step(0.1)[0] == [added(1), added(2)], "in one piece"
    assert memory.step(0.2) == ([], 0.2 + PACE), "a silence is not repeated at once"
    assert len(memory.sources) == 1


@pytest.mark.parametrize("reason", [RelistNeeded("lost"), PossibleGap("perhaps"), NoAnswer("gone")])
def test_source_is_over_with_its_first_error(memory: Memory, daemon_clock: Clock, reason: Exception) -> None:
    began = daemon_clock.time
    memory.step(began)
    memory.failures = [reason]
    daemon_clock.time += PACE / 4
    told, due = memory.step(daemon_clock.time)
    assert (told, memory.watch.at, memory.sources[0].is_closed) == ([], None, True)
    assert due == PACE + (daemon_clock.time if isinstance(reason, NoAnswer) else began)
    assert memory.step(due)[0] == [Snapshot(())]
    assert len(memory.sources) == 2


def test_relist_is_a_pause_after_the_beginning_of_the_last_list(memory: Memory) -> None:
    memory.step(0.0)
    memory.watch.reread()
    assert memory.step(0.2) == ([], PACE)
    assert memory.step(PACE)[0] == [Snapshot(())]


def test_reconnect_ends_a_pause(memory: Memory, daemon_clock: Clock) -> None:
    memory.failures = [NoAnswer("gone")]
    _, due = memory.step(daemon_clock.time - PACE)
    assert due > daemon_clock.time
    memory.watch.reconnect()
    assert memory.step(daemon_clock.time)[0] == [Snapshot(())]


def test_failure_that_is_cured_ends_its_pause(memory: Memory, daemon_clock: Clock) -> None:
    is_cured: list[bool] = []
    failure = Retryable("denied")
    failure.is_cured = lambda: bool(is_cured)
    memory.watch = ListWatch(memory.open, "it", back="it is back", pace=0.0, pause=lambda _: 1000.0)
    memory.failures = [failure]
    _, due = memory.step(daemon_clock.time)
    assert daemon_clock.time < due < daemon_clock.time + PACE, "the watch looks whether it is cured"
    daemon_clock.time = due
    assert memory.step(due)[0] == []
    is_cured.append(True)
    assert memory.step(due)[0] == [Snapshot(())]


def test_contact_ends_an_outage_and_a_failure_soon_after_is_the_same(
    memory: Memory, daemon_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        memory.failures = [NoAnswer("gone")]
        memory.step(daemon_clock.time)
        assert memory.watch.problem is not None
        daemon_clock.time += PACE
        memory.step(daemon_clock.time)
        assert memory.watch.problem is None, "the watch has begun"
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Watching it: gone", f"Watching it: it is back after {PACE:.0f} s"]


def test_relists_are_told_for_ever_though_their_reasons_name_versions(
    memory: Memory, daemon_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for version in range(10_050):  # more than the memory of complaints
        memory.failures.append(RelistNeeded(f"too old resource version: {version}"))
        memory.step(daemon_clock.time)
        daemon_clock.time += PACE
    assert caplog.messages[-1] == "Relisting it: too old resource version: 10049"


@pytest.mark.parametrize("stuck", ["start", "changes"])
@pytest.mark.parametrize("way", ["reread", "reconnect"])
def test_another_thread_gets_a_new_list(
    running: Running, stuck: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = running.memory
    memory.stuck = stuck
    running.start()
    wait_for(lambda: memory.sources and memory.sources[0].is_stuck.is_set())
    before = len(running.told)
    memory.stuck = ""
    getattr(memory.watch, way)()
    wait_for(lambda: len(running.told) > before)
    assert len(memory.sources) == 2
    assert memory.sources[0].is_closed
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == (["Relisting it: requested by the removal guard"] if way == "reread" else [])


def test_list_that_began_before_the_request_for_one_does_not_count(memory: Memory) -> None:
    memory.on_start = memory.watch.reread
    assert memory.step(0.0)[0] == []
    memory.on_start = lambda: None
    assert memory.step(PACE)[0] == [Snapshot(())]


def test_list_over_a_connection_that_was_given_up_counts(memory: Memory) -> None:
    memory.on_start = memory.watch.reconnect
    assert memory.step(0.0)[0] == [Snapshot(())]
    memory.on_start = lambda: None
    assert memory.step(0.1)[0] == []
    assert memory.step(PACE)[0] == [Snapshot(())]


@pytest.mark.parametrize(
    "ways", [["reconnect"], ["reread"], ["reconnect", "reread"], ["reread", "reconnect"]]
)
@pytest.mark.parametrize("is_paused", [False, True])
def test_store_may_resume_unless_a_list_was_requested(
    memory: Memory, daemon_clock: Clock, ways: list[str], is_paused: bool
) -> None:
    memory.changes.append(added(1))
    memory.step(daemon_clock.time)
    if is_paused:
        memory.failures = [NoAnswer("gone")]
        memory.step(daemon_clock.time)
    for way in ways:
        getattr(memory.watch, way)()
    for _ in range(2):
        daemon_clock.time += PACE
        memory.step(daemon_clock.time)
    assert [source.resumes_from for source in memory.sources] == [None, None if "reread" in ways else 1]


def test_request_for_a_list_before_there_is_a_source_is_met_by_the_first(memory: Memory) -> None:
    memory.watch.reread()
    assert memory.step(0.0)[0] == [Snapshot(())]
    memory.changes.append(added(1))
    assert memory.step(0.1)[0] == [added(1)]


@pytest.mark.parametrize("stuck", ["start", "changes", "pause"])
def test_close_ends_the_watch_from_any_state_and_for_good(running: Running, stuck: str) -> None:
    memory = running.memory
    memory.stuck = stuck
    memory.failures = [NoAnswer("gone")] * 10_000 if stuck == "pause" else []
    running.start()
    wait_for(lambda: memory.watch.problem or (memory.sources and memory.sources[0].is_stuck.is_set()))
    running.end()
    assert [type(error) for error in running.ended] == [Cancelled]
    assert all(source.is_closed for source in memory.sources)
    for _ in range(2):
        with pytest.raises(Cancelled):
            memory.watch.step(math.inf, running.told.extend)


def test_closed_store_starts_no_watch(memory: Memory) -> None:
    watches = Watches()
    watches.close()
    with pytest.raises(Cancelled):
        watches.run(memory.watch, lambda _: None, lambda: None)
    assert memory.sources == []


def test_list_without_a_position_is_repeated_by_the_same_source(memory: Memory) -> None:
    memory.has_position = False
    assert memory.step(0.0) == ([Snapshot(())], PACE)
    memory.has_position = True
    assert memory.step(PACE)[0] == [Snapshot(())]
    memory.changes.append(added(1))
    assert memory.step(PACE)[0] == [added(1)]
    assert len(memory.sources) == 1
