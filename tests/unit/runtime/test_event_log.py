"""The ring of what was logged lately."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from flanneld.compat.glog import V
from flanneld.runtime.event_log import LENGTH, LIMIT, Events

log = logging.getLogger("tests.events")


@pytest.fixture
def events() -> Iterator[Events]:
    events = Events()
    log.addHandler(events)
    log.setLevel(1)
    try:
        yield events
    finally:
        log.removeHandler(events)


def test_what_is_logged_is_remembered_with_its_time(events: Events) -> None:
    log.warning("Restored %s", "route 10.5.1.0/24")
    (event,) = events.recent()
    assert event[1:] == ("W", "test_event_log", "Restored route 10.5.1.0/24")
    assert event[0] > 1e9


def test_only_the_last_ones_are_remembered(events: Events) -> None:
    for number in range(LIMIT + 5):
        log.info("%d", number)
    texts = [text for *_, text in events.recent()]
    assert texts == [str(number) for number in range(5, LIMIT + 5)]


def test_what_only_verbose_logs_show_is_no_event(events: Events) -> None:
    log.log(V(1), "a retry")
    assert events.recent() == []


def test_a_long_line_is_cut(events: Events) -> None:
    log.info("x" * 10 * LENGTH)
    assert len(events.recent()[0][3]) == LENGTH


def test_a_wrong_format_string_harms_nobody(events: Events) -> None:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "%d", ("no number",), None)
    events.handle(record)
    assert events.recent() == []
