"""What the log says of few and of many things that make no sense."""

from __future__ import annotations

import logging

import pytest

from flanneld.runtime.complaints import FEW, BatchedWarnings
from tests.clock import Clock

log = logging.getLogger(__name__)
MINUTE = 60.0
pytestmark = pytest.mark.usefixtures("daemon_clock")


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


def test_many_are_one_line_with_a_count_and_stay_one(
    complaints: BatchedWarnings, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        note(complaints, 20_000)
        complaints.flush()
        clock.time += 2 * MINUTE
    assert caplog.messages == ["Ignoring 20000 keys: /0: no JSON; /1: no JSON; /2: no JSON; and 19997 more"]


def test_single_warnings_are_batched_after_a_few_lines(
    complaints: BatchedWarnings, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20_000):
        note(complaints, 1, number)
        complaints.flush()
    assert len(caplog.messages) == FEW
    clock.time += MINUTE
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
