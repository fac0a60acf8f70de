"""The supervisor, with real threads and, in a process of its own, real signals."""

from __future__ import annotations

import errno
import logging
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from flanneld.errors import Fatal
from flanneld.runtime.supervisor import Supervisor
from tests.clock import Clock
from tests.lab.wait import wait_for as wait_until

DEADLINE = 60.0


class Cancelled(Exception):
    pass


def wait_for(event: threading.Event) -> Callable[[], None]:
    def run() -> None:
        event.wait(DEADLINE)

    return run


def wait_for_stop(supervisor: Supervisor) -> None:
    assert supervisor.stop.wait(DEADLINE)


def fail(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_a_failing_task_stops_the_daemon_and_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, error = Supervisor(), ValueError("broken")
    supervisor.start("reconciler", fail(error))
    wait_for_stop(supervisor)
    supervisor.shutdown()
    assert supervisor.failure is error
    (record,) = caplog.records
    assert record.getMessage() == "stopping: reconciler failed: broken"
    assert "Traceback" in caplog.text


def test_the_first_failure_wins(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, first = Supervisor(), ValueError("first")

    def second() -> None:
        supervisor.stop.wait()
        raise ValueError("second")

    supervisor.start("late", second)
    supervisor.start("early", fail(first))
    wait_for_stop(supervisor)
    assert supervisor.shutdown(DEADLINE) == []
    assert supervisor.failure is first
    assert caplog.text.count("Traceback") == 1


def test_a_failure_while_stopping_does_not_make_a_clean_stop_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor = Supervisor()

    def run() -> None:
        supervisor.stop.wait()
        raise ValueError("socket closed under me")

    supervisor.start("watcher", run)
    supervisor.request_stop("enough")
    assert supervisor.shutdown(DEADLINE) == []
    assert supervisor.failure is None
    assert "watcher failed while stopping: ValueError: socket closed under me" in caplog.text


def test_a_task_that_exits_the_interpreter_is_a_failure_too() -> None:
    supervisor = Supervisor()
    supervisor.start("plugin", fail(SystemExit(0)))
    wait_for_stop(supervisor)
    assert isinstance(supervisor.failure, SystemExit)


def test_a_task_that_returns_too_early_is_a_failure() -> None:
    supervisor = Supervisor()
    supervisor.start("keeper", lambda: None)
    wait_for_stop(supervisor)
    assert isinstance(supervisor.failure, Fatal)
    assert "keeper ended without being asked to" in str(supervisor.failure)


def test_a_task_may_return_after_it_asked_for_a_stop() -> None:
    supervisor = Supervisor()
    supervisor.start("keeper", lambda: supervisor.request_stop("the lease was revoked"))
    assert supervisor.stop.wait(DEADLINE)
    assert supervisor.shutdown(DEADLINE) == []
    assert supervisor.failure is None


def test_a_cancelled_task_is_quiet_while_stopping(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, cancelled = Supervisor(quiet=(Cancelled,)), threading.Event()

    def run() -> None:
        cancelled.wait()
        raise Cancelled

    supervisor.start("watcher", run, cancelled.set)
    assert supervisor.shutdown(DEADLINE) == []
    assert supervisor.failure is None
    assert caplog.records == []


def test_a_task_that_is_cancelled_before_the_stop_is_a_failure_with_its_cause() -> None:
    supervisor, cause = Supervisor(quiet=(Cancelled,)), Cancelled()
    supervisor.start("watcher", fail(cause))
    wait_for_stop(supervisor)
    assert isinstance(supervisor.failure, Fatal)
    assert supervisor.failure.__cause__ is cause


def test_only_the_first_reason_to_stop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    supervisor = Supervisor()
    supervisor.request_stop("one")
    supervisor.request_stop("two")
    assert supervisor.stop.is_set()
    assert caplog.messages == ["stopping: one"]


def test_a_task_is_not_started_once_the_daemon_stops() -> None:
    supervisor, ran = Supervisor(), threading.Event()
    supervisor.request_stop("enough")
    supervisor.start("late", ran.set)
    assert supervisor.shutdown() == []
    assert not ran.is_set()


def test_a_task_runs_under_its_name() -> None:
    supervisor, names = Supervisor(), []

    def run() -> None:
        names.append(threading.current_thread().name)
        supervisor.request_stop("enough")

    supervisor.start("keeper", run)
    wait_for_stop(supervisor)
    assert names == ["keeper"]


def test_a_late_heartbeat_is_overdue_until_the_next_one(clock: Clock) -> None:
    supervisor = Supervisor(clock=clock)
    supervisor.heartbeat("reconciler", 5)
    supervisor.heartbeat("keeper", 60)
    clock.time += 5
    assert supervisor.overdue() == []
    clock.time += 7
    assert supervisor.overdue() == ["reconciler has not reported for 12 s (promised 5 s)"]
    supervisor.heartbeat("reconciler", 5)
    assert supervisor.overdue() == []


def test_a_promise_can_be_taken_back(clock: Clock) -> None:
    supervisor = Supervisor(clock=clock)
    supervisor.heartbeat("firewall", 5)
    supervisor.heartbeat("firewall", math.inf)
    clock.time += 1e9
    assert supervisor.overdue() == []


def test_waiting_ticks_until_the_stop() -> None:
    supervisor, ticks = Supervisor(), []

    def tick() -> None:
        ticks.append("often")
        if len(ticks) == 6:
            supervisor.request_stop("enough")

    supervisor.wait((lambda: ticks.append("seldom"), 0.0025), (tick, 0.001))
    assert ticks == ["often", "seldom", "often", "often", "seldom", "often"]


def test_waiting_ends_when_a_task_fails() -> None:
    supervisor = Supervisor()
    supervisor.start("reconciler", fail(ValueError("broken")))
    supervisor.wait()
    assert isinstance(supervisor.failure, ValueError)


def test_shutdown_names_what_hangs_and_takes_no_longer_than_it_may() -> None:
    supervisor, released = Supervisor(), threading.Event()
    names = [f"task {number}" for number in range(100)]
    for name in names:
        supervisor.start(name, wait_for(released))
    begun = time.monotonic()
    assert supervisor.shutdown(within=0.2) == names
    # For all of them together, and not for each.
    assert 0.2 <= time.monotonic() - begun < len(names) * 0.2 / 2
    released.set()
    assert supervisor.shutdown(DEADLINE) == []


def test_task_that_has_ended_is_not_cancelled() -> None:
    supervisor, cancelled = Supervisor(), list[str]()
    supervisor.start("brief", lambda: None, lambda: cancelled.append("brief"), may_end=True)
    wait_until(lambda: "brief" not in (thread.name for thread in threading.enumerate()))
    supervisor.start("long", wait_for(supervisor.stop), lambda: cancelled.append("long"))
    assert supervisor.shutdown(DEADLINE) == []
    assert "brief" not in cancelled


def test_a_cancellation_that_fails_or_blocks_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor, released = Supervisor(), threading.Event()
    failed, blocked, cancelled = threading.Event(), threading.Event(), threading.Event()

    def fail_at_the_end() -> None:
        failed.set()
        raise ValueError("no such socket")

    def block() -> None:
        blocked.set()
        released.wait()

    # Each thread lives until it is cancelled: a dead one needs no cancellation.
    supervisor.start("bad", wait_for(failed), fail_at_the_end)
    supervisor.start("slow", wait_for(blocked), block)
    supervisor.start("good", wait_for(cancelled), cancelled.set)
    # Longer than this the blocked one holds nobody up, if it does at all.
    assert supervisor.shutdown(within=DEADLINE / 2) == []
    released.set()
    wait_until(lambda: "cannot cancel bad" in caplog.text, what="the log of what failed")


PROGRAM = """
import logging, signal, sys, threading
from flanneld.runtime.supervisor import Supervisor

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
supervisor = Supervisor()
supervisor.handle_signals()
"""
WAIT = """
print("up", flush=True)
supervisor.wait()
print("stopped", flush=True)
threading.Event().wait()
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    """The process; killed when it takes too long, which ends its output."""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(DEADLINE, process.kill)
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if lines[-1] == last:
            return lines
    pytest.fail(f"ended without {last!r}: {lines}")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_and_the_second_one_kills(
    first: signal.Signals, second: signal.Signals
) -> None:
    with running(PROGRAM + WAIT) as process:
        lines_until(process, "up")
        for harmless in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(harmless)
        process.send_signal(first)
        said = f"shutdownHandler sent cancel signal... stopping: got {first.name}"
        assert lines_until(process, "stopped") == [said, "stopped"]
        process.send_signal(second)
        assert process.wait(DEADLINE) == -second


def test_a_task_that_hangs_does_not_keep_the_process_from_exiting() -> None:
    hang = 'supervisor.start("stuck", threading.Event().wait)\nprint(supervisor.shutdown(0.05), flush=True)'
    with running(PROGRAM + hang) as process:
        lines_until(process, "['stuck']")
        assert process.wait(DEADLINE) == 0


@pytest.mark.parametrize(
    "lock",
    ["supervisor.stop._cond", "supervisor._lock", "threading._active_limbo_lock", "logging._lock"],
)
def test_a_signal_does_no_harm_while_the_main_thread_holds(lock: str) -> None:
    interrupted = f"with {lock}:\n    signal.raise_signal(signal.SIGTERM)\n"
    with running(PROGRAM + interrupted + WAIT) as process:
        assert lines_until(process, "stopped")[-1] == "stopped"


def test_a_task_that_lacks_descriptors_ends_the_daemon_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()

    def run() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    supervisor.start("watcher", run)
    assert supervisor.stop.wait(DEADLINE)
    supervisor.shutdown(DEADLINE)
    (record,) = caplog.records
    assert record.exc_info is None
    assert record.getMessage().startswith("stopping: watcher failed: out of file descriptors; ")
