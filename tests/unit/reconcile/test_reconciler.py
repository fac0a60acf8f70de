"""The reconciliation loop over tables, on a clock of its own."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flanneld.reconcile.counters import TOLD
from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.reconcile.worker import KERNEL_CONTEST
from flanneld.runtime import clock
from flanneld.state.desired import AT_ONCE, Delta
from flanneld.state.permits import Knowledge, Permits
from flanneld.state.resources import LINKS, Key, Resource
from flanneld.state.table import Claim, Put, Report, Scope, Seen
from tests.unit.reconcile.simulated_table import SimulatedTable, Thing

A, B, C = Thing("a"), Thing("b"), Thing("c")


class Time:
    """A clock that the reconciler's steps move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def run(
        self,
        reconciler: Reconciler,
        seconds: float,
        between: Callable[[], None] = lambda: None,
        longest: float = 0.05,
    ) -> None:
        """Step as a thread does, at least every ``longest`` seconds; ``between`` runs before each step."""
        end = self.now + seconds
        while self.now < end:
            between()
            wakeup = reconciler.step(self.now)
            self.now = min(end, max(self.now + 0.001, min(wakeup, self.now + longest)))


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(clock, "now", lambda: made.now)
    monkeypatch.setattr(clock, "cpu_time", lambda: 0.0)
    return made


def reconciler_of(*tables: SimulatedTable, desired: tuple[Thing, ...] = (A, B)) -> Reconciler:
    things = [replace(each, table=table.name) for table in tables for each in desired]
    return Reconciler(tables, desired_by_table(things), lambda: False)


def in_table(thing: Thing, table: SimulatedTable) -> Key:
    return replace(thing, table=table.name).key


def test_first_step_makes_what_is_wanted_and_second_writes_nothing(time: Time) -> None:
    table = SimulatedTable()
    reconciler = reconciler_of(table)
    assert reconciler.step(time.now) == time.now + 30
    assert table.writes == [A, B]
    time.now += 30
    reconciler.step(time.now)
    assert table.writes == [A, B]
    assert table.reads == 2


def test_a_table_without_audit_is_read_at_the_start_only(time: Time) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table)
    assert reconciler.step(time.now) == math.inf
    time.run(reconciler, 100)
    assert table.reads == 1


def test_drift_is_repaired_with_what_was_found(time: Time) -> None:
    table = SimulatedTable()
    table.hold(Thing("a", 7), Claim.OURS)
    reconciler_of(table).step(time.now)
    assert [(put.want, put.was) for put in table.put_given] == [(A, Thing("a", 7)), (B, None)]


def test_foreign_resources_stay_and_those_of_an_earlier_run_go(time: Time) -> None:
    table = SimulatedTable()
    table.hold(C, Claim.FOREIGN)
    table.hold(Thing("left"), Claim.LEFT)
    table.hold(Thing("ours"), Claim.OURS)
    reconciler_of(table).step(time.now)
    assert {seen.resource for seen in table.held.values()} == {A, B, C}


def test_a_failed_read_changes_nothing_and_is_said_once(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    table = SimulatedTable()
    table.hold(Thing("left"), Claim.LEFT)
    table.unreadable = "no answer"
    reconciler = reconciler_of(table)
    time.run(reconciler, 100)
    assert table.writes == []
    assert [each for each in caplog.messages if "no answer" in each] == [
        "The things are not in place: no answer"
    ]
    table.unreadable = ""
    with caplog.at_level(logging.INFO):
        time.run(reconciler, 31)
    assert table.writes == [A, B, Thing("left")]
    assert "The things are in place" in caplog.messages


def test_one_refusal_does_not_stop_the_rest_and_is_tried_again(time: Time) -> None:
    table = SimulatedTable(audit=None)
    table.refused = {A.key}
    reconciler = reconciler_of(table)
    assert reconciler.step(time.now) == time.now + 1
    assert table.writes == [B]
    (state,) = reconciler.states()
    assert (state.settled, [str(each) for each in state.failed]) == (False, ["thing a=0: refused"])
    assert [each.errno for each in state.failed] == [0], "the system had no part in it"
    table.refused = set()
    time.run(reconciler, 1.5)
    assert table.writes == [B, A]
    assert reconciler.states()[0].settled


def test_pauses_between_tries_grow_up_to_half_a_minute(time: Time) -> None:
    table = SimulatedTable(audit=None)
    table.refused = {A.key, B.key}
    reconciler = reconciler_of(table)
    wakeups = []
    for _ in range(7):
        wakeup = reconciler.step(time.now)
        wakeups.append(wakeup - time.now)
        time.now = wakeup
    assert wakeups == pytest.approx([1, 2, 4, 8, 16, 30, 30])


def test_removed_object_is_restored_at_once_and_the_remover_named(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    table.change(None, A.key, by="iptables (pid 7)")
    time.run(reconciler, 0.02)
    assert A.key in table.held
    assert "Restored thing a=0, 5 ms after a change by iptables (pid 7)" in caplog.messages
    assert reconciler.states()[0].repairs == {"iptables (pid 7)": 1}


def test_a_repair_that_had_to_wait_tells_the_time_since_the_first_news(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    table.change(None, A.key)
    table.unreadable = "busy"
    time.run(reconciler, 0.5)
    table.change(None, A.key)
    table.unreadable = ""
    time.run(reconciler, 2)
    assert "Restored thing a=0, 1.0 s after a change by somebody" in caplog.messages


def test_a_burst_of_news_is_one_repair(time: Time) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    for key in (A.key, B.key):
        table.change(None, key)
    time.run(reconciler, 0.1)
    assert table.reads == 2


def test_a_fight_is_waged_ever_more_slowly_and_named_once(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table, desired=(A,))
    repaired_at: list[float] = []

    def oppose() -> None:
        if A.key in table.held:
            repaired_at.append(time.now)
            table.change(None, A.key)

    time.run(reconciler, 50, oppose)
    pauses = [after - before for before, after in itertools.pairwise(repaired_at[1:])]
    assert len(pauses) < 12
    assert all(pause >= 0.2 * 2 ** max(0, number - 4) for number, pause in enumerate(pauses[:8], start=1))
    assert sum("keeps changing the things: backing off" in each for each in caplog.messages) == 1
    assert reconciler.states()[0].contested


def test_entry_that_a_program_deletes_five_times_a_second_is_missing_for_less_than_a_twentieth(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    things = desired_by_table([A])
    reconciler = Reconciler([table], things, lambda: False, contest=KERNEL_CONTEST)
    reconciler.step(time.now)
    missing, last, deletions = 0.0, time.now, 0

    def oppose() -> None:
        nonlocal missing, last, deletions
        missing += 0.0 if A.key in table.held else time.now - last
        last = time.now
        if time.now >= 1000 + 0.2 * (deletions + 1):
            deletions += 1
            table.change(None, A.key, is_named=True)
            assert reconciler.states()[0].contested == (deletions > 2)

    time.run(reconciler, 20, oppose, longest=0.001)
    assert missing < 0.05 * 20
    assert deletions > 90
    assert sum("keeps changing the things: repairing each change" in each for each in caplog.messages) == 1


def test_write_undone_before_its_read_counts_as_a_repair(time: Time) -> None:
    table = SimulatedTable(audit=None)
    table.undone_at_once = True
    reconciler = reconciler_of(table, desired=(A,))
    time.run(reconciler, 50)
    assert len(table.writes) < 13
    (state,) = reconciler.states()
    assert state.contested
    assert not state.settled


def test_a_fight_over_one_table_does_not_slow_another_down(time: Time) -> None:
    fought, other = SimulatedTable("fought", audit=None), SimulatedTable("other", audit=None)
    reconciler = reconciler_of(fought, other)
    time.run(reconciler, 20, lambda: fought.change(None, in_table(A, fought)))
    other.change(None, in_table(A, other))
    reconciler.step(time.now)
    time.run(reconciler, 0.02)
    assert in_table(A, other) in other.held


def test_a_table_waits_for_those_that_it_needs(time: Time) -> None:
    first = SimulatedTable("first", audit=None)
    second = SimulatedTable("second", audit=None, needs=frozenset({"first"}))
    first.unreadable = "not yet"
    reconciler = reconciler_of(first, second)
    time.run(reconciler, 5)
    assert second.reads == 0
    first.unreadable = ""
    time.run(reconciler, 5)
    assert in_table(A, second) in second.held
    first.unreadable = "away again"
    second.change(None, in_table(A, second))
    time.run(reconciler, 1)
    assert in_table(A, second) in second.held, "losing what it needed withdraws nothing"


def test_every_table_is_closed_whatever_becomes_of_the_others(
    time: Time, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = SimulatedTable("first"), SimulatedTable("second")

    def fail(*, remove: bool) -> None:
        raise OSError(5, f"cannot close, remove={remove}")

    monkeypatch.setattr(first, "close", fail)
    reconciler = reconciler_of(first, second)
    reconciler.step(time.now)
    reconciler.close(remove=[second.name])
    assert second.closed == [True]
    reconciler.close()
    assert second.closed == [True, False]
    assert [each for each in caplog.messages if "Cannot close first" in each]


def test_tables_are_put_right_in_their_order_and_swept_in_the_reverse_one(time: Time) -> None:
    tables = [SimulatedTable(name) for name in ("first", "second", "third")]
    journal: list[str] = []
    for table in tables:
        table.journal = journal
        table.hold(Thing("left", table=table.name), Claim.LEFT)
    reconciler_of(*tables, desired=(A,)).step(time.now)
    assert journal == [
        *("put first", "put second", "put third"),
        *("drop third", "drop second", "drop first"),
    ]


def test_objects_on_a_recreated_device_are_read_again_at_once(time: Time) -> None:
    base = SimulatedTable("base")
    above = SimulatedTable("above", needs=frozenset({"base"}))
    reconciler = reconciler_of(base, above)
    reconciler.step(time.now)
    base.change(None, in_table(A, base))
    above.held.clear()  # gone with it, and no news of that
    time.run(reconciler, 0.02)
    assert in_table(A, above) in above.held


# ---- news -----------------------------------------------------------------------------------------


def test_news_is_written_without_a_reading(time: Time) -> None:
    table = SimulatedTable()
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    report = reconciler.change(Delta((Put(C),), (A,)), time.now)
    assert (report.made, report.removed) == ([C], [A])
    assert (table.reads, set(table.held)) == (1, {B.key, C.key})


def test_news_before_the_first_reading_waits_for_it(time: Time) -> None:
    table = SimulatedTable()
    table.unreadable = "not yet"
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    assert reconciler.change(Delta((Put(C),)), time.now).made == []


def test_news_of_what_may_be_taken_asks_for_a_reading_and_is_no_refusal_yet(time: Time) -> None:
    table = SimulatedTable()
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    table.taken = {C.key}
    reconciler.change(Delta((Put(C),)), time.now)
    assert reconciler.states()[0].failed == ()
    time.run(reconciler, 0.02)
    assert table.reads == 2


def test_news_that_is_refused_is_tried_again_and_told_until_it_is_made(time: Time) -> None:
    table = SimulatedTable()
    desired = {A.key: A}
    reconciler = Reconciler([table], {table.name: desired}, lambda: False)
    reconciler.step(time.now)
    desired[B.key] = B
    table.refused = {B.key}
    reconciler.change(Delta((Put(B),)), time.now)
    assert [failure.resource for failure in reconciler.states()[0].failed] == [B]
    assert not reconciler.states()[0].settled
    table.refused = set()
    time.run(reconciler, 1.5)
    assert B.key in table.held
    assert reconciler.states()[0].failed == ()


def test_news_that_cannot_be_written_is_a_problem_of_this_table(time: Time) -> None:
    table = SimulatedTable()
    desired = {A.key: A}
    reconciler = Reconciler([table], {table.name: desired}, lambda: False)
    reconciler.step(time.now)
    table.deaf = desired[B.key] = B
    assert reconciler.change(Delta((Put(B),)), time.now).made == []
    assert reconciler.states()[0].problem == "cannot write"
    table.deaf = None
    time.run(reconciler, 1.5)
    assert B.key in table.held
    assert reconciler.states()[0].problem == ""


def test_news_that_makes_what_was_refused_ends_the_refusal(time: Time) -> None:
    table = SimulatedTable()
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    table.refused = {A.key, C.key}
    reconciler.change(Delta((Put(A), Put(C))), time.now)
    table.refused = set()
    reconciler.change(Delta((Put(A),)), time.now)
    assert [failure.resource for failure in reconciler.states()[0].failed] == [C]


def test_what_others_put_there_is_removed_with_a_word_and_counts_in_a_fight(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table, desired=(A,))
    reconciler.step(time.now)
    assert "Removed thing c=0" not in caplog.text
    table.change(C, C.key, by="ip (pid 7)")
    time.run(reconciler, 0.1)
    assert "Removed thing c=0 after a change by somebody" not in caplog.text
    assert "Removed thing c=0" in caplog.text

    def oppose() -> None:
        if C.key not in table.held:
            table.change(C, C.key)

    time.run(reconciler, 60, oppose)
    assert reconciler.states()[0].contested


def test_a_fight_is_told_of_after_one_two_four_and_more_repairs(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table, desired=(A,))
    time.run(reconciler, 600, lambda: table.change(None, A.key) if A.key in table.held else None)
    told = [each for each in caplog.messages if each.startswith("Still repairing the things")]
    assert [each.split(": ")[1].split(" so far")[0] for each in told[:4]] == [
        "1 object",
        "2 objects",
        "4 objects",
        "8 objects",
    ]


def test_one_who_changed_one_object_is_not_blamed_for_another(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    reconciler = reconciler_of(table)
    reconciler.step(time.now)
    del table.held[B.key]
    table.change(None, A.key, by="ip (pid 7)", is_named=True)
    time.run(reconciler, 0.1)
    told = [each for each in caplog.messages if each.startswith("Restored")]
    assert told == [
        "Restored thing a=0, 5 ms after a change by ip (pid 7)",
        "Restored thing b=0, 5 ms after a change",
    ]


def test_of_many_repairs_a_few_are_named_and_the_rest_counted(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    table = SimulatedTable(audit=None)
    things = tuple(Thing(str(number)) for number in range(40))
    reconciler = reconciler_of(table, desired=things)
    reconciler.step(time.now)
    table.held.clear()
    table.change(None, ())
    time.run(reconciler, 0.1)
    told = [each for each in caplog.messages if each.startswith("Restored")]
    assert told[-1] == f"Restored {40 - len(told) + 1} more"


def test_news_does_not_cut_the_pause_after_a_failure_short(time: Time) -> None:
    table = SimulatedTable()
    table.unreadable = "no answer"
    reconciler = reconciler_of(table)
    time.run(reconciler, 100)
    reads = table.reads
    table.change(None, A.key)
    time.run(reconciler, 1)
    assert table.reads == reads


def test_a_repair_that_is_refused_is_no_longer_settled(time: Time) -> None:
    table = SimulatedTable(audit=None)
    reports: list[Report] = []
    reconciler = Reconciler(
        [table], {table.name: {A.key: A}}, lambda: False, after=lambda report: reports.append(report)
    )
    reconciler.step(time.now)
    assert reconciler.states()[0].settled
    assert [each.made for each in reports] == [[A]]
    table.refused = {A.key}
    table.change(None, A.key)
    time.run(reconciler, 0.1)
    assert not reconciler.states()[0].settled


def test_a_table_that_others_may_have_changed_is_not_settled_until_it_is_read(time: Time) -> None:
    reconciler = reconciler_of(SimulatedTable())
    reconciler.step(time.now)
    reconciler.hear(time.now)
    assert not reconciler.states()[0].settled
    time.run(reconciler, 0.1)
    assert reconciler.states()[0].settled


def test_a_refusal_does_not_slow_the_repair_of_something_else_down(time: Time) -> None:
    table = SimulatedTable()
    table.refused = {B.key}
    reconciler = reconciler_of(table)
    time.run(reconciler, 40)
    table.change(None, A.key)
    time.run(reconciler, 0.05)
    assert A.key in table.held


def test_a_change_has_the_name_of_whoever_changed_the_device_that_went(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    link, route = SimulatedTable(LINKS), SimulatedTable("routes", needs=frozenset({LINKS}))
    reconciler = reconciler_of(link, route, desired=(A,))
    reconciler.step(time.now)
    link.held.clear()
    route.held.clear()
    reconciler.hear(time.now, None, in_table(A, link), "ip (pid 7)")
    time.run(reconciler, 0.02)
    assert "Restored thing a=0, 5 ms after a change by ip (pid 7)" in caplog.messages


def test_a_table_is_listened_to_while_it_has_something_to_hear(time: Time) -> None:
    deaf, hearing = SimulatedTable("deaf"), SimulatedTable("hearing")
    hearing.descriptor = 5
    assert reconciler_of(deaf, hearing).sources() == [5]
    del time


class Watched(SimulatedTable):
    """A table that has to be asked whether it works."""

    works = True
    next_look = 0.0
    looks = 0

    def look(self) -> bool:
        self.looks += 1
        self.next_look += 2.0
        return not self.works


def test_polled_table_is_read_if_its_check_fails(time: Time) -> None:
    table = Watched(audit=None)
    table.next_look = time.now + 2.0
    reconciler = reconciler_of(table)
    assert reconciler.step(time.now) == time.now + 2.0
    time.run(reconciler, 7)
    assert (table.looks, table.reads) == (3, 1)
    table.works = False
    time.run(reconciler, 2)
    assert table.reads == 2


def test_a_table_of_another_package_that_breaks_is_a_problem_of_this_table(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    """The simulated table is not one of flanneld's."""
    table, other = SimulatedTable("broken"), SimulatedTable("other")
    table.broken = RuntimeError("jammed")
    reconciler = reconciler_of(table, other)
    time.run(reconciler, 10)
    assert in_table(A, other) in other.held
    assert reconciler.states()[0].problem == "jammed"
    assert [each for each in caplog.messages if "not in place" in each] == [
        "The broken are not in place: jammed"
    ]
    assert any(each.message == "SimulatedTable failed" and each.exc_info for each in caplog.records)
    table.broken = None
    time.run(reconciler, 31)
    assert reconciler.states()[0].settled


# ---- what may be written ----------------------------------------------------------------------------


def test_object_without_a_permit_stays(time: Time) -> None:
    table = SimulatedTable()
    table.hold(Thing("a", 7), Claim.OURS)
    table.hold(Thing("left"), Claim.LEFT)
    things = desired_by_table([A])
    reconciler = Reconciler(
        [table], things, lambda: False, permits=Permits(lambda: Knowledge(cached="a file"))
    )
    time.run(reconciler, 65)
    assert table.writes == []


THINGS = st.builds(Thing, st.sampled_from("abcdef"), st.integers(0, 2))
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), THINGS),
        st.tuples(st.just("remove"), THINGS),
        st.tuples(st.just("refuse"), THINGS),
        st.tuples(st.just("blind"), st.booleans()),
        st.tuples(st.just("wait"), st.floats(0.001, 40)),
    ),
    max_size=25,
)


@given(desired=st.lists(THINGS, unique_by=lambda thing: thing.key), deeds=DEEDS)
def test_any_history_ends_in_the_desired_state(desired: list[Thing], deeds: list[tuple[str, object]]) -> None:
    time = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", lambda: time.now)
        patch.setattr(clock, "cpu_time", lambda: 0.0)
        table = SimulatedTable()
        table.hold(Thing("foreign"), Claim.FOREIGN)
        reconciler = reconciler_of(table, desired=tuple(desired))
        for deed, subject in deeds:
            match deed, subject:
                case "change", Thing():
                    table.change(subject, subject.key)
                case "remove", Thing():
                    table.change(None, subject.key)
                case "refuse", Thing():
                    table.refused ^= {subject.key}
                case "blind", bool():
                    table.unreadable = "blind" if subject else ""
                case _, float():
                    time.run(reconciler, subject, longest=1)
        table.refused, table.unreadable = set(), ""
        time.run(reconciler, 65, longest=1)
    assert {seen.resource for seen in table.held.values()} == {*desired, Thing("foreign")}
    writes = len(table.writes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", lambda: time.now)
        patch.setattr(clock, "cpu_time", lambda: 0.0)
        time.run(reconciler, 65, longest=1)
    assert len(table.writes) == writes


# ---- tables that take several steps ---------------------------------------------------------------

MANY = tuple(Thing(f"many{number}") for number in range(3 * AT_ONCE))


def step_until_read(reconciler: Reconciler, time: Time, steps: int = 20) -> None:
    for _ in range(steps):
        if reconciler.step(time.now) > time.now:
            return
    raise AssertionError


@pytest.fixture
def large(time: Time) -> tuple[SimulatedTable, Reconciler, dict[Key, Resource]]:
    """A table whose audit has begun."""
    table = SimulatedTable()
    desired = desired_by_table(MANY)
    reconciler = Reconciler([table], desired, lambda: False)
    reconciler.converge(time.now)
    time.now += 31
    assert reconciler.step(time.now) == time.now
    table.writes.clear()
    return table, reconciler, desired[table.name]


def test_changes_during_an_audit_are_written_at_once_and_are_no_repairs(
    time: Time,
    large: tuple[SimulatedTable, Reconciler, dict[Key, Resource]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, reconciler, desired = large
    gone, changed = MANY[-1], Thing(MANY[-2].name, 7)
    del desired[gone.key]
    desired[A.key], desired[changed.key] = A, changed
    reconciler.change(Delta((Put(A), Put(changed, MANY[-2])), (gone,)), time.now)
    assert table.writes == [A, changed, gone]
    step_until_read(reconciler, time)
    assert table.writes == [A, changed, gone]
    assert caplog.messages == []
    assert reconciler.work.heals == {}
    assert reconciler.states()[0].settled


def test_removal_of_what_an_earlier_run_left_is_no_repair(
    time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    table = SimulatedTable()
    reconciler = reconciler_of(table)
    table.held = {A.key: Seen(A), B.key: Seen(B), C.key: Seen(C, Claim.LEFT)}
    reconciler.step(time.now)
    assert caplog.messages == ["Removed thing c=0"]
    assert reconciler.work.heals == {}
    table.held[C.key] = Seen(C)
    reconciler.hear(time.now)
    time.run(reconciler, 1)
    assert reconciler.work.heals == {("remote", TOLD): 1}


def test_table_in_trouble_says_why(time: Time) -> None:
    table = SimulatedTable()
    reconciler = reconciler_of(table)

    def trouble() -> str:
        return reconciler.states()[0].trouble

    assert trouble() == "the things are not in place"
    table.unreadable = "jammed"
    reconciler.step(time.now)
    assert "jammed" in trouble()
    table.unreadable, table.refused = "", {B.key}
    time.run(reconciler, 5)
    assert trouble() == reconciler.states()[0].failed[0].reason
    table.refused = set()
    time.run(reconciler, 40)
    assert trouble() == ""


def test_drift_is_repaired_although_events_came_during_the_audit(
    time: Time, large: tuple[SimulatedTable, Reconciler, dict[Key, Resource]]
) -> None:
    table, reconciler, desired = large
    step_until_read(reconciler, time)
    del table.held[MANY[5].key]
    table.hold(B, Claim.OURS)
    time.now += 31
    reads = table.reads
    assert reconciler.step(time.now) == time.now
    desired[A.key] = A
    reconciler.change(Delta((Put(A),)), time.now)
    step_until_read(reconciler, time)
    assert table.writes == [A, MANY[5], B]
    assert table.reads == reads + 2, "a list that was read in parts is no proof"


class Shifting(SimulatedTable):
    """A table whose lists lack one object each, if something is written meanwhile."""

    def read(self, scope: Scope) -> Iterator[Seen]:
        skipped = MANY[-10 - self.reads]  # after the first part
        written = len(self.writes)
        for seen in super().read(scope):
            if seen.resource != skipped or len(self.writes) == written:
                yield seen


@pytest.mark.parametrize("is_drift", [False, True])
def test_lists_that_lack_objects_because_of_events_are_no_drift(time: Time, *, is_drift: bool) -> None:
    table = Shifting()
    desired = desired_by_table(MANY)
    reconciler = Reconciler([table], desired, lambda: False)
    reconciler.converge(time.now)
    table.writes.clear()
    if is_drift:
        del table.held[MANY[-1].key]
    time.now += 31
    reads = table.reads
    for number in range(100):
        if reconciler.step(time.now) > time.now:
            break
        event = Thing(f"event{number}")
        desired[table.name][event.key] = event
        reconciler.change(Delta((Put(event),)), time.now)
    repaired = [thing for thing in table.writes if thing in MANY]
    assert repaired == ([MANY[-1]] if is_drift else [])
    assert table.reads - reads == (3 if is_drift else 2)


def test_drift_heard_of_during_an_audit_is_repaired_with_its_origin(
    time: Time,
    large: tuple[SimulatedTable, Reconciler, dict[Key, Resource]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, reconciler, _ = large
    time.now += 0.1
    key = MANY[5].key
    table.change(None, key)
    reconciler.hear(time.now, table.name, key, "ip")
    step_until_read(reconciler, time)
    time.run(reconciler, 1)
    assert table.writes == [MANY[5]]
    assert caplog.messages == ["Restored thing many5=0, 7 ms after a change by ip"]
    assert reconciler.work.heals == {("remote", TOLD): 1}


def test_a_table_that_changed_while_it_was_read_is_read_again(time: Time) -> None:
    table = SimulatedTable()
    reconciler = reconciler_of(table)
    table.interruptions = 2
    reconciler.step(time.now)
    assert (table.reads, table.writes) == (3, [A, B])
    table.interruptions = 1000
    time.now += 31
    reconciler.step(time.now)
    assert "the table changed" in reconciler.states()[0].problem
    assert table.writes == [A, B]
