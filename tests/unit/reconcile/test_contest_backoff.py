"""How long to wait before the next repair, and what the status of a table says."""

from __future__ import annotations

import re
from ipaddress import IPv4Network

import pytest

from flanneld.errors import Fatal, Retryable
from flanneld.reconcile.upkeep import ContestBackoff, TableState, demand_all
from flanneld.runtime import clock
from flanneld.state.resources import Route
from flanneld.state.table import Failure
from tests.unit.reconcile.simulated_table import Thing


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    time = [1000.0]
    monkeypatch.setattr(clock, "now", lambda: time[0])
    return time


@pytest.mark.usefixtures("at")
def test_the_first_repair_need_not_wait() -> None:
    assert ContestBackoff().earliest() <= 1000


def test_each_repair_after_the_first_few_doubles_the_pause_up_to_a_limit(at: list[float]) -> None:
    contest_backoff = ContestBackoff(memory=60, first=0.2, last=1, few=3)
    pauses = []
    for _ in range(7):
        contest_backoff.spend()
        pauses.append(contest_backoff.earliest() - at[0])
    assert pauses == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.8, 1, 1])


def test_a_firewall_may_be_reloaded_three_times_a_minute(at: list[float]) -> None:
    """Each reload flushes twice; the last of all repairs is still within a second, and nobody cries fight."""
    contest_backoff = ContestBackoff()
    assert not any(contest_backoff.spend() for _ in range(5))
    assert contest_backoff.earliest() - at[0] < 1
    assert not contest_backoff.spend()
    assert not contest_backoff.is_tried()


def test_old_repairs_do_not_count(at: list[float]) -> None:
    contest_backoff = ContestBackoff(memory=60, first=0.1)
    contest_backoff.spend()
    at[0] += 61
    assert contest_backoff.earliest() <= at[0]


@pytest.mark.usefixtures("at")
def test_a_fight_is_noticed_once() -> None:
    contest_backoff = ContestBackoff(many=3)
    assert [contest_backoff.spend() for _ in range(5)] == [False, False, True, False, False]


def test_table_stays_contested_while_repairs_go_on(at: list[float]) -> None:
    contest_backoff = ContestBackoff(memory=60, many=3)
    for _ in range(3):
        assert not contest_backoff.is_tried()
        contest_backoff.spend()
    assert contest_backoff.is_tried()
    at[0] += 61
    assert not contest_backoff.is_tried()


def test_a_fight_goes_on_through_its_own_pauses(at: list[float]) -> None:
    contest_backoff = ContestBackoff(memory=60, last=30, many=3)
    begins = []
    for _ in range(20):
        begins.append(contest_backoff.spend())
        at[0] = contest_backoff.earliest()
    assert begins.count(True) == 1
    assert contest_backoff.is_tried()


@pytest.mark.usefixtures("at")
def test_eight_repairs_within_a_minute_are_a_fight_unless_told_otherwise() -> None:
    contest_backoff = ContestBackoff()
    assert [contest_backoff.spend() for _ in range(9)] == [False] * 7 + [True, False]


def test_second_repair_of_one_entry_within_seconds_is_a_fight(at: list[float]) -> None:
    for seconds, entry, is_fight in (
        (9.0, "a", True),
        (10.0, "a", False),
        (1000.0, "a", False),
        (1.0, "b", False),
    ):
        at[0] = 1000.0
        contest_backoff = ContestBackoff(again=10)
        assert not contest_backoff.spend([("routes", "a")])
        at[0] += seconds
        assert contest_backoff.spend([("routes", entry)]) == is_fight
        assert contest_backoff.is_tried() == is_fight


@pytest.mark.usefixtures("at")
def test_repairs_of_one_entry_are_no_fight_unless_a_time_between_them_is_set() -> None:
    contest_backoff = ContestBackoff()
    assert not any(contest_backoff.spend([("routes", "a")]) for _ in range(2))


def test_repairs_are_forgotten_one_by_one_while_there_is_no_fight(at: list[float]) -> None:
    contest_backoff = ContestBackoff(memory=60, first=0.2, few=3, many=8)
    for seconds, repairs in ((0, 4), (50, 3)):
        at[0] = 1000 + seconds
        assert not any(contest_backoff.spend() for _ in range(repairs))
    assert contest_backoff.earliest() == pytest.approx(at[0] + 0.2 * 2**4)
    at[0] = 1065
    assert contest_backoff.earliest() == pytest.approx(1050 + 0.2)
    assert not contest_backoff.spend()
    assert contest_backoff.earliest() == pytest.approx(1065 + 0.4)


def test_repair_counts_only_those_of_the_last_minute_before_it(at: list[float]) -> None:
    contest_backoff = ContestBackoff(memory=60, many=8)
    for seconds, repairs in ((0, 4), (50, 3), (65, 1)):
        at[0] = 1000 + seconds
        assert not any(contest_backoff.spend() for _ in range(repairs))


def test_first_repair_after_a_fight_that_has_ended_is_no_fight(at: list[float]) -> None:
    contest_backoff = ContestBackoff()
    for _ in range(20):
        contest_backoff.spend()
    assert contest_backoff.earliest() == at[0] + 30
    at[0] += 60.5
    assert contest_backoff.earliest() == 0.0
    contest_backoff.spend()
    assert not contest_backoff.is_tried()


# ---- the status of a table -----------------------------------------------------------------------

ROUTE, SWITCH = Route(IPv4Network("10.5.2.0/24"), "eth0"), Thing("port 7")


def status(
    *failed: Failure, problem: str = "", vital: bool = False, settled: bool = True, contested: bool = False
) -> TableState:
    return TableState("things", "the things", "kernel", vital, settled, contested, failed, problem, {})


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (status(Failure(ROUTE, "busy")), Fatal, f"the kernel refuses {ROUTE}: busy; run with CAP_NET_ADMIN"),
        (status(Failure(ROUTE, "busy", "stop it")), Fatal, f"the kernel refuses {ROUTE}: busy; stop it"),
        (status(Failure(SWITCH, "busy", "stop it"), vital=True), Retryable, "busy; stop it"),
        (status(problem="no answer", vital=True), Retryable, "cannot read the things: no answer"),
    ],
)
def test_start_ends_for_what_the_kernel_refuses_and_waits_for_what_is_vital(
    state: TableState, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        demand_all([status(), state])


def test_start_goes_on_without_what_is_not_vital() -> None:
    demand_all([status(), status(vital=True), status(Failure(SWITCH, "busy")), status(problem="no answer")])


@pytest.mark.parametrize(
    ("state", "trouble"),
    [
        (status(), ""),
        (status(settled=False), "the things are not in place"),
        (status(contested=True), "another program keeps changing the things; see flannelctl logs"),
        (status(Failure(ROUTE, "busy"), Failure(SWITCH, "off"), contested=True), "busy; off"),
        (status(Failure(ROUTE, "busy"), problem="no answer"), "no answer"),
    ],
)
def test_trouble_of_a_table_is_its_most_telling_reason(state: TableState, trouble: str) -> None:
    assert state.trouble == trouble
