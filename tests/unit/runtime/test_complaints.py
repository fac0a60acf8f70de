"""What the log says, and how often, of what lasts, repeats or is too much."""

from __future__ import annotations

import logging

import pytest

from flanneld.errors import NoAnswer, Retryable
from flanneld.runtime.logs import FEW, PACE, BatchedWarnings, Once, Outage
from tests.clock import Clock

log = logging.getLogger(__name__)
pytestmark = pytest.mark.usefixtures("daemon_clock")


@pytest.fixture
def outage(caplog: pytest.LogCaptureFixture) -> Outage:
    caplog.set_level(logging.INFO)
    return Outage(log, "Watching", "Watching: etcd is back")


def test_a_failure_is_said_at_once_and_then_once_a_minute(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(150):
        outage.failed(Retryable("connection refused"))
        clock.time += 1
    assert caplog.messages == [
        "Watching: connection refused",
        "Watching: connection refused (for 60 s now)",
        "Watching: connection refused (for 120 s now)",
    ]


def test_reasons_that_change_are_one_outage(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outage.failed(Retryable("it broke the connection"))
    for _ in range(70):
        clock.time += 1
        outage.failed(Retryable("connection refused"))
    assert caplog.messages == [
        "Watching: it broke the connection",
        "Watching: connection refused (for 60 s now)",
    ]


def test_failure_of_another_kind_is_said_at_once_and_each_kind_once_a_minute(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        outage.failed(NoAnswer("connection refused"))
        clock.time += 1
        outage.failed(Retryable("403"))
        clock.time += 1
    assert caplog.messages == ["Watching: connection refused", "Watching: 403 (for 1 s now)"]


def test_the_end_is_said_once_and_how_long_it_took(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outage.failed(Retryable("no answer"))
    clock.time += 75
    assert outage.over()
    assert not outage.over()
    assert caplog.messages == ["Watching: no answer", "Watching: etcd is back after 75 s"]
    assert [record.filename for record in caplog.records] == ["test_complaints.py"] * 2


def test_the_next_outage_is_said_at_once(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        outage.failed(Retryable("no answer"))
        clock.time += 1
        outage.over()
    assert [message.startswith("Watching: no answer") for message in caplog.messages] == [True, False] * 2


def test_intermittent_failure_is_logged_once_a_minute(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        outage.failed(Retryable("it broke the connection"))
        clock.time += 0.5
        outage.answered()
        clock.time += 0.5
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2


def test_an_outage_is_on_from_the_first_failure_to_the_first_answer(outage: Outage) -> None:
    assert outage.problem is None
    outage.failed(Retryable("no answer"))
    outage.failed(Retryable("no answer"))
    assert outage.problem is not None
    outage.answered()
    assert outage.problem is None


def test_different_things_have_a_minute_each(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    once = Once(again=PACE)
    for what in "aba":
        once.warn(log, what, what)
    clock.time += PACE
    once.warn(log, "a", "a")
    assert caplog.messages == ["a", "b", "a"]


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> BatchedWarnings:
    caplog.set_level(logging.INFO)
    return BatchedWarnings(log, "Ignoring {key}: {reason}", "Ignoring {count} keys")


def note(complaints: BatchedWarnings, number: int, first: int = 0) -> None:
    for each in range(first, first + number):
        complaints.note(f"/{each}", "no JSON")


def test_a_few_get_a_line_each_and_each_only_once(
    complaints: BatchedWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        note(complaints, 2)
        complaints.flush()
    assert caplog.messages == ["Ignoring /0: no JSON", "Ignoring /1: no JSON"]


def test_key_of_others_is_bounded_and_escaped(
    complaints: BatchedWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    complaints.note("\u202e" + "x" * 1_000_000, "no JSON")
    complaints.flush()
    assert caplog.messages == [f"Ignoring \\u202e{'x' * 199}... and 999801 more: no JSON"]


def test_many_are_one_line_with_a_count_and_stay_one(
    complaints: BatchedWarnings, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        note(complaints, 20_000)
        complaints.flush()
        clock.time += 2 * PACE
    assert caplog.messages == ["Ignoring 20000 keys: /0: no JSON; /1: no JSON; /2: no JSON; and 19997 more"]


def test_single_warnings_are_batched_after_a_few_lines(
    complaints: BatchedWarnings, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20_000):
        note(complaints, 1, number)
        complaints.flush()
    assert len(caplog.messages) == FEW
    clock.time += PACE
    complaints.flush()
    assert len(caplog.messages) == FEW + 1
    assert caplog.messages[-1].startswith(f"Ignoring {20_000 - FEW} keys: /{FEW}: no JSON; ")


def test_another_reason_is_told_and_one_that_has_gone_is_forgotten(
    complaints: BatchedWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    complaints.note("/a", "no JSON")
    complaints.flush()
    complaints.note("/a", "no address")
    complaints.flush()
    complaints.clear("/a")
    complaints.note("/a", "no address")
    complaints.flush()
    assert caplog.messages == [
        "Ignoring /a: no JSON",
        "Ignoring /a: no address",
        "Ignoring /a: no address",
    ]


def test_warnings_about_absent_keys_are_forgotten(
    complaints: BatchedWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    note(complaints, 2)
    complaints.retain({"/1"})
    complaints.flush()
    assert caplog.messages == ["Ignoring /1: no JSON"]


def test_keys_and_reasons_are_no_formats(
    complaints: BatchedWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    complaints.note("/{key}%s", "{0}")
    complaints.flush()
    assert caplog.messages == ["Ignoring /{key}%s: {0}"]
