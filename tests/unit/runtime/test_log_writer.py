"""A log that nobody reads holds nobody up."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.runtime.logs import LogWriter
from tests.lab.wait import wait_for

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
