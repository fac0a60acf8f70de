"""What ``flannelctl`` waits for when it asks the daemon."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flanneld.ctl.source import ask
from flanneld.runtime.clock import replaced
from tests.clock import Clock


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen(0)
        yield server


class Racing(Clock):
    """A clock by which twenty seconds pass between two looks."""

    def now(self) -> float:
        self.time += 20.0
        return self.time


@pytest.mark.usefixtures("listening")
def test_daemon_that_takes_the_question_and_is_silent_times_out(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        ask(tmp_path / "s", 0.01)


@pytest.mark.usefixtures("listening")
def test_answer_that_is_not_whole_within_half_a_minute_times_out(tmp_path: Path) -> None:
    with replaced(Racing()), pytest.raises(TimeoutError, match=r"^no whole answer within 30 s$"):
        ask(tmp_path / "s", 0.01)


@pytest.mark.usefixtures("listening")
def test_daemon_with_more_readers_than_it_takes_is_told_as_busy(tmp_path: Path) -> None:
    with ExitStack() as others:
        for _ in range(8):
            other = others.enter_context(socket.socket(socket.AF_UNIX))
            other.setblocking(False)
            if other.connect_ex(str(tmp_path / "s")):
                break
        with pytest.raises(BlockingIOError) as caught:
            ask(tmp_path / "s", 0.01)
    assert caught.value.errno == errno.EAGAIN
