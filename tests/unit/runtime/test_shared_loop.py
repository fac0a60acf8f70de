"""A thread that steps several machines: turns, news, failures and ends."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from flanneld.runtime.shared_loop import SharedLoop, SharedSteps
from tests.lab.wait import wait_for


class Machine:
    """Counts its steps, each of which wants to be the last."""

    def __init__(self, loop: SharedLoop, failure: Exception | None = None) -> None:
        self.steps = 0
        self.threads: set[int] = set()
        self.stop = threading.Event()
        self.news = os.eventfd(0, os.EFD_NONBLOCK)
        self.raised: list[BaseException] = []
        self._failure = failure
        self.member: SharedSteps = loop.member(
            self.step, lambda: [self.news], stop=self.stop, heartbeat=lambda _: None
        )
        self.task = threading.Thread(target=self.run)
        self.task.start()

    def step(self, _now: float) -> float:
        if self._failure and self.steps:
            raise self._failure
        with suppress(BlockingIOError):
            os.eventfd_read(self.news)
        self.steps += 1
        self.threads.add(threading.get_ident())
        return math.inf

    def tell(self) -> None:
        os.eventfd_write(self.news, 1)

    def run(self) -> None:
        try:
            self.member.run()
        except Exception as failure:
            self.raised.append(failure)

    def end(self) -> None:
        self.stop.set()
        self.member.cancel()
        self.task.join(30)
        assert not self.task.is_alive()
        os.close(self.news)


@pytest.fixture
def loop() -> Iterator[SharedLoop]:
    loop = SharedLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield loop
    loop.close()
    thread.join(30)
    assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    wait_for(condition, what="a step")


def test_members_are_stepped_in_one_thread_when_they_have_news(loop: SharedLoop) -> None:
    one, other = Machine(loop), Machine(loop)
    until(lambda: one.steps == other.steps == 1)
    one.tell()
    until(lambda: one.steps == 2)
    other.member.cancel()
    until(lambda: other.steps == 2)
    assert one.threads == other.threads
    assert len(one.threads) == 1
    one.end()
    other.end()


def test_failure_of_a_member_is_its_tasks_and_the_others_go_on(loop: SharedLoop) -> None:
    bad, good = Machine(loop, ValueError("odd")), Machine(loop)
    until(lambda: bad.steps == good.steps == 1)
    bad.member.cancel()
    until(lambda: bool(bad.raised))
    assert str(bad.raised[0]) == "odd"
    good.tell()
    until(lambda: good.steps == 2)
    good.end()
    bad.end()


def test_members_end_with_the_loop() -> None:
    loop = SharedLoop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    machine = Machine(loop)
    until(lambda: machine.steps == 1)
    loop.close()
    machine.task.join(30)
    thread.join(30)
    assert not machine.task.is_alive()
    assert not thread.is_alive()
    os.close(machine.news)
