"""The log and the ring of what was logged lately."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.compat.glog import V
from flanneld.runtime.logs import LENGTH, LIMIT, LONGEST_FILE, Events, LogWriter
from tests.lab.wait import wait_for

# ---- the ring of events --------------------------------------------------------------------------


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


# ---- a log that nobody reads holds nobody up -----------------------------------------------------


SIZE = 4 * 4096
#: poll and ppoll of x86-64, ppoll of all newer architectures (asm-generic/unistd.h).
POLLS = ("7", "271", "73")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A small pipe. One that has room for a page can be written to, and so it has more than one."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SIZE)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read(reader: int) -> str:
    return os.read(reader, 1 << 20).decode()


def test_lines_arrive_as_they_are(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log_writer = LogWriter(writer)
    for line in ("one", "two\n    below", "\udcff"):
        log_writer.write(line)
    assert read(reader) == "one\ntwo\n    below\n\\udcff\n"


def test_unread_lines_are_lost_and_counted(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log_writer = LogWriter(writer, time_limit=0.01)
    log_writer.write("x" * (SIZE - 1))
    for line in ("one", "two", "three"):
        log_writer.write(line)
    assert read(reader) == "x" * (SIZE - 1) + "\n"
    log_writer.write("four")
    log_writer.write("five")
    assert read(reader) == "... 3 lines of the log are lost: there was no room\nfour\nfive\n"


def test_a_line_of_which_the_end_is_lost_ends_before_the_next(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log_writer = LogWriter(writer, time_limit=0.01)
    log_writer.write("x" * 2 * SIZE)
    assert read(reader) == "x" * SIZE
    log_writer.write("next")
    assert read(reader) == "\n... 1 line of the log is lost: there was no room\nnext\n"


def test_a_reader_that_only_is_slow_loses_nothing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.write(writer, bytes(SIZE))
    child = os.fork()
    if not child:
        LogWriter(writer, time_limit=60).write("here")
        os._exit(0)
    try:
        wait_for(lambda: is_asleep(child), what="the writer to wait for room")
        assert os.read(reader, SIZE) == bytes(SIZE)
    finally:
        assert os.waitpid(child, 0)[1] == 0
    assert read(reader) == "here\n"


def is_asleep(pid: int) -> bool:
    """Return True if a process waits in poll(2), as /proc/PID/syscall tells."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in POLLS


def test_without_a_reader_there_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        LogWriter(writer).write("lost")
    os.close(writer)


def test_a_daemon_whose_log_nobody_reads_starts_and_ends(pipe: tuple[int, int], tmp_path: Path) -> None:
    _, writer = pipe
    os.write(writer, bytes(SIZE))
    subnet_file = tmp_path / "subnet.env"
    socket = tmp_path / "flanneld.sock"
    command = ["--etcd-endpoints=http://127.0.0.1:9", f"--subnet-file={subnet_file}"]
    with subprocess.Popen([sys.executable, "-m", "flanneld", *command], stderr=writer) as daemon:
        try:
            deadline = time.monotonic() + 120
            while not socket.exists():  # It waits for etcd then, and has said so.
                assert time.monotonic() < deadline
                time.sleep(0.01)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(60) == 0
        finally:
            daemon.kill()


def test_a_full_disk_is_a_reader_without_room(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    kept = os.dup(writer)
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), writer)
    log_writer = LogWriter(writer)
    log_writer.write("one")
    os.dup2(kept, writer)
    os.close(kept)
    log_writer.write("two")
    assert read(reader) == "... 1 line of the log is lost: there was no room\ntwo\n"
