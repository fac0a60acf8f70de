"""The ring of what was logged lately."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.compat.glog import V
from flanneld.runtime.logs import LENGTH, LIMIT, LONGEST_FILE, Events

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


def test_history_has_lines_with_their_time(events: Events) -> None:
    log.warning("Restored %s", "route 10.5.1.0/24")
    (event,) = events.recent()
    assert event[1:] == ("W", "test_logs", "Restored route 10.5.1.0/24")
    assert event[0] > 1e9


def test_only_the_last_ones_are_remembered(events: Events) -> None:
    for number in range(LIMIT + 5):
        log.info("%d", number)
    texts = [text for *_, text in events.recent()]
    assert texts == [str(number) for number in range(5, LIMIT + 5)]


def test_history_leaves_verbose_lines_out(events: Events) -> None:
    log.log(V(1), "a retry")
    assert events.recent() == []


def test_a_long_line_is_cut(events: Events) -> None:
    log.info("x" * 10 * LENGTH)
    assert len(events.recent()[0][3]) == LENGTH


def test_a_wrong_format_string_harms_nobody(events: Events) -> None:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "%d", ("no number",), None)
    events.handle(record)
    assert events.recent() == []


def texts(events: Events) -> list[str]:
    return [text for *_, text in events.recent()]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A file with what an earlier run remembered."""
    path = tmp_path / "flanneld.events"
    earlier = Events()
    log.addHandler(earlier)
    log.setLevel(1)
    try:
        log.info("before the file")
        earlier.keep(path)
        log.warning("Restored route 10.5.3.0/24 after a change by process 812")
    finally:
        log.removeHandler(earlier)
        earlier.close()
    return path


def test_history_outlives_a_restart_in_order(history: Path, events: Events) -> None:
    log.info("started")
    events.keep(history)
    log.info("later")
    restored = "Restored route 10.5.3.0/24 after a change by process 812"
    assert texts(events) == ["before the file", restored, "started", "later"]


def test_history_outlives_a_kill(history: Path, events: Events) -> None:
    events.keep(history)
    log.info("the last words")
    again = Events()
    again.keep(history)  # nobody closed the file before
    assert texts(again)[-1] == "the last words"


@pytest.mark.parametrize("garbage", [b"{", b"[1]", b"\xff", b"[[], 1, 2, 3]", b"null", b"[" * 100_000, b""])
def test_garbage_in_the_file_is_passed_over(garbage: bytes, history: Path, events: Events) -> None:
    history.write_bytes(garbage + b"\n" + history.read_bytes())
    events.keep(history)
    assert texts(events)[0] == "before the file"


def test_file_that_has_room_is_added_to(tmp_path: Path, events: Events) -> None:
    path = tmp_path / "events"
    events.keep(path)
    file = path.stat().st_ino
    log.info("a line more")
    assert path.stat().st_ino == file
    assert b"a line more" in path.read_bytes()


def test_file_is_bounded(tmp_path: Path, events: Events) -> None:
    path = tmp_path / "events"
    events.keep(path)
    for number in range(3 * LONGEST_FILE // LENGTH):
        log.info("%0400d", number)
    assert path.stat().st_size <= LONGEST_FILE + 2 * LENGTH
    again = Events()
    again.keep(path)
    assert len(again.recent()) == LIMIT
    assert again.recent()[-1] == events.recent()[-1]


def test_file_is_appended_to_while_it_is_short(history: Path, events: Events) -> None:
    events.keep(history)
    inode = history.stat().st_ino
    log.info("one line more")
    assert history.read_bytes().endswith(b'"one line more"]\n')
    assert history.stat().st_ino == inode


def test_place_that_cannot_be_written_harms_nobody(tmp_path: Path, events: Events) -> None:
    events.keep(tmp_path / "absent" / "events")
    log.info("goes on")
    assert "goes on" in texts(events)


def test_device_in_the_place_is_not_written(events: Events, tmp_path: Path) -> None:
    path = tmp_path / "events"
    os.mkfifo(path)
    events.keep(path)  # a FIFO would make an open wait for a reader
    assert path.is_file()
