"""How long to wait before the next repair."""

from __future__ import annotations

import pytest

from flanneld.network.firewall.contest_backoff import Patience
from flanneld.runtime import clock


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    time = [1000.0]
    monkeypatch.setattr(clock, "now", lambda: time[0])
    return time


@pytest.mark.usefixtures("at")
def test_the_first_repair_need_not_wait() -> None:
    assert Patience().earliest() <= 1000


def test_each_repair_after_the_first_few_doubles_the_pause_up_to_a_limit(at: list[float]) -> None:
    patience = Patience(memory=60, first=0.2, last=1, few=3)
    pauses = []
    for _ in range(7):
        patience.spend()
        pauses.append(patience.earliest() - at[0])
    assert pauses == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.8, 1, 1])


def test_a_firewall_may_be_reloaded_three_times_a_minute(at: list[float]) -> None:
    """Each reload flushes twice; the last of all repairs is still within a second, and nobody cries fight."""
    patience = Patience()
    assert not any(patience.spend() for _ in range(5))
    assert patience.earliest() - at[0] < 1
    assert not patience.spend()
    assert not patience.is_tried()


def test_what_is_long_ago_does_not_count(at: list[float]) -> None:
    patience = Patience(memory=60, first=0.1)
    patience.spend()
    at[0] += 61
    assert patience.earliest() <= at[0]


@pytest.mark.usefixtures("at")
def test_a_fight_is_noticed_once() -> None:
    patience = Patience(many=3)
    assert [patience.spend() for _ in range(5)] == [False, False, True, False, False]


def test_it_is_tried_as_long_as_repairs_go_on(at: list[float]) -> None:
    patience = Patience(memory=60, many=3)
    for _ in range(3):
        assert not patience.is_tried()
        patience.spend()
    assert patience.is_tried()
    at[0] += 61
    assert not patience.is_tried()
