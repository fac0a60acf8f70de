"""How slowly an answer may come before its server counts as dead."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from flanneld.runtime.clock import Clock, replaced
from flanneld.runtime.sockets.interruptible import LEAST, PacedReader, TooSlow

#: Seconds that each read takes on the test's clock.
STEP = 5.0
#: Seconds for the head of an answer.
HEAD = 30.0


class TickingClock(Clock):
    """On which time passes only between two looks at it."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += STEP
        return self.time

    wall = cpu_time = now


@pytest.fixture
def peer() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs, replaced(TickingClock()):
        yield ours, theirs


def reader_of(ours: socket.socket) -> PacedReader:
    return PacedReader(ours, ours.makefile("rb", buffering=0), HEAD)


def read(reader: PacedReader, size: int) -> int | None:
    return reader.readinto(bytearray(size))


def test_head_that_drips_has_a_limit_for_all_of_it(peer: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = peer
    theirs.sendall(b"x" * 100)
    reader = reader_of(ours)
    for _ in range(int(HEAD / STEP)):
        assert read(reader, 1) == 1
    with pytest.raises(TimeoutError) as caught:
        read(reader, 1)
    assert not isinstance(caught.value, TooSlow)


def test_body_at_the_slowest_pace_may_take_for_ever(peer: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = peer
    reader = reader_of(ours)
    reader.expect_body()
    heard = []
    reader.expect_body(lambda: heard.append(1))
    for _ in range(500):
        theirs.sendall(b"x" * LEAST)
        assert read(reader, LEAST // 2) == read(reader, LEAST // 2) == LEAST // 2
    assert len(heard) == 1000


def test_body_below_the_slowest_pace_is_given_up(peer: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = peer
    reader = reader_of(ours)
    reader.expect_body()
    theirs.sendall(b"x" * LEAST)
    assert read(reader, LEAST // 2 - 1)
    assert read(reader, LEAST // 2)
    with pytest.raises(TooSlow, match="its answer brings less than 4 KiB in 10 s"):
        read(reader, 1)


def test_time_before_the_head_does_not_count_for_the_body(peer: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = peer
    reader = reader_of(ours)
    theirs.sendall(b"x" * 10)
    for _ in range(5):
        assert read(reader, 1) == 1
    reader.expect_body()
    assert read(reader, 1) == 1


def test_first_byte_of_a_watch_has_no_limit(
    peer: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = peer
    monkeypatch.setattr("flanneld.runtime.sockets.interruptible.LONGEST_SILENCE", 0.01)
    beats = threading.Semaphore(0)
    reader = PacedReader(ours, ours.makefile("rb", buffering=0), HEAD, beats.release)

    def answer() -> None:
        for _ in range(20):
            beats.acquire()
        theirs.sendall(b"x" * 10)

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(1 + int(HEAD / STEP)):
        assert read(reader, 1) == 1
    thread.join()
    with pytest.raises(TimeoutError):
        read(reader, 1)
