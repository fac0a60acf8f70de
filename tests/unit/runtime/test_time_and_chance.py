"""Clock, chance, waits and threads of the daemon: what they give, and that a simulator can replace them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.errors import Cancelled, Retryable
from flanneld.runtime import clock, supervisor, waits
from flanneld.runtime.clock import (
    choice,
    randint,
    random_bytes,
    random_fraction,
    randrange,
    replaced_chance,
    shuffle,
)
from flanneld.runtime.supervisor import EventQueue, StepLoop, Wakeup
from flanneld.runtime.waits import Backoff
from tests.clock import Clock
from tests.lab.wait import wait_for

DEADLINE = 30.0


def test_clock_is_that_of_the_kernel_unless_it_is_replaced(clock: Clock) -> None:
    from flanneld.runtime import clock as daemon_clock

    now = daemon_clock.now
    assert abs(now() - time.clock_gettime(time.CLOCK_BOOTTIME)) < DEADLINE
    assert abs(daemon_clock.wall() - time.time()) < DEADLINE
    with daemon_clock.replaced(clock):
        assert (now(), daemon_clock.wall()) == (clock.time, clock.time)
    assert now() != clock.time


def test_utc_text_is_that_of_rfc_3339() -> None:
    assert clock.utc_text(1_600_000_000.9) == "2020-09-13T12:26:40Z"


def test_chance_is_that_of_its_source() -> None:
    def draw() -> list[object]:
        items = list(range(10))
        shuffle(items)
        backoff = Backoff()
        return [
            random_fraction(),
            randrange(1000),
            randint(5, 6),
            random_bytes(6),
            choice("abc"),
            items,
            backoff.pause(),
        ]

    with replaced_chance(random.Random(1)):
        first = draw()
    with replaced_chance(random.Random(1)):
        assert draw() == first
    assert draw() != first


def test_pause_ends_with_its_time_or_with_the_stop() -> None:
    stop = threading.Event()
    assert not waits.pause(stop, 0.001)
    stop.set()
    assert waits.pause(stop)


def test_attempts_end_with_success_time_or_stop() -> None:
    results = iter([False, False, True])
    assert waits.until(lambda: next(results), within=DEADLINE, every=0.001)
    assert not waits.until(lambda: False, within=0.01, every=0.001)
    stop = threading.Event()
    stop.set()
    assert not waits.until(lambda: False, within=DEADLINE, every=DEADLINE, stop=stop)


def test_descriptor_is_readable_once_something_was_written() -> None:
    reader, writer = os.pipe()
    assert not waits.readable(reader, 0.001)
    os.write(writer, b"x")
    assert waits.readable(reader, DEADLINE)
    os.close(reader)
    os.close(writer)


def test_first_failure_cancels_all_and_is_raised() -> None:
    cancelled = threading.Event()

    def wait() -> None:
        assert cancelled.wait(DEADLINE)
        raise Cancelled

    def fail() -> None:
        raise Retryable("no answer")

    with pytest.raises(Retryable, match="no answer"):
        supervisor.run_together([wait, fail], cancelled.set)


def test_step_loop_steps_when_it_is_time_or_woken_until_it_is_stopped() -> None:
    stop, steps = threading.Event(), []
    promises: set[float] = set()

    def step(now: float) -> float:
        steps.append(now)
        return now if len(steps) < 3 else now + 1000

    loop = StepLoop(step, stop=stop, heartbeat=promises.add)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    wait_for(lambda: len(steps) == 3, DEADLINE, "the steps that were due")
    loop.cancel()
    wait_for(lambda: len(steps) == 4, DEADLINE, "the step after it was woken")
    stop.set()
    loop.cancel()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert promises == {120.0}


@pytest.mark.parametrize("kind", [EventQueue, Wakeup])
def test_descriptor_of_a_queue_is_closed_with_it(kind: type[EventQueue[int] | Wakeup]) -> None:
    """A network that fails is served again and again, each time with a queue of its own."""
    number = kind().fileno()
    assert not Path(f"/proc/self/fd/{number}").exists()


def test_stream_reader_returns_what_came_before_a_failure_and_raises_it_each_time_then() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2, 3)
        raise OSError("gone")

    reader = waits.StreamReader("three items", items())
    for thread in threading.enumerate():
        if thread.name == "three items":
            thread.join(60)
    assert reader.read(60, 2) == [1, 2]
    assert reader.read(60, 2) == [3]
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            reader.read(60, 2)


def test_stream_reader_returns_nothing_in_a_silence() -> None:
    silence = threading.Event()
    reader = waits.StreamReader("silence", (silence.wait() for _ in range(1)))
    assert reader.read(0.01, 2) == []
    silence.set()
    assert reader.read(60, 2) == [True]
