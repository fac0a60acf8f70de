"""The locks against a second daemon, between real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.runtime.process import HostClaims, InstanceLock, holders

HOLD = """
import subprocess, sys, threading
from pathlib import Path
from flanneld.runtime.process import InstanceLock
from flanneld.runtime.process import HostClaims
InstanceLock(Path(sys.argv[1])).wait(threading.Event())
claims = HostClaims()
claims.take(sys.argv[2:], str.__eq__)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
sys.stdin.read()
"""

#: Abstract names are those of the network namespace, in which other tests run as well.
CLAIM = f"test {os.getpid()}"


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock, and has a child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), CLAIM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flannel" / "flanneld.lock"


def test_a_second_daemon_ends_after_its_wait(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held(path) as first:
        with pytest.raises(Fatal, match=r"another flanneld has held .* for 0\.3 s; stop it"):
            InstanceLock(path).wait(threading.Event(), 0.3)
        assert first.poll() is None
    assert len(caplog.messages) == 1
    assert "waiting up to 0.3 s" in caplog.messages[0]


def test_a_killed_daemon_holds_nothing_though_its_child_lives(path: Path) -> None:
    with held(path) as first:
        second = InstanceLock(path)
        assert not second.try_take()
        first.kill()
        first.wait()
        second.wait(threading.Event(), 5)
        assert not InstanceLock(path).try_take()
        second.close()
        assert InstanceLock(path).try_take()


def test_a_stop_ends_the_wait(path: Path) -> None:
    with held(path):
        stop = threading.Event()
        stop.set()
        with pytest.raises(Cancelled):
            InstanceLock(path).wait(stop, 30)


def test_a_lock_file_that_was_removed_locks_nobody_out(path: Path) -> None:
    with held(path):
        path.unlink()
        assert InstanceLock(path).try_take()
        assert path.exists()


def test_without_a_place_for_the_file_there_is_no_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    InstanceLock(tmp_path / "file" / "flanneld.lock").wait(threading.Event(), 0)
    assert len(caplog.messages) == 1


def test_a_look_makes_no_file(path: Path) -> None:
    assert InstanceLock(path).try_take(create=False)
    assert not path.exists()


def claimants() -> list[int]:
    return [holder.pid for holder in holders(lambda _, claim: claim == CLAIM)]


def test_killed_daemon_has_no_claims_though_its_child_lives(path: Path) -> None:
    with held(path) as first:
        second = HostClaims()
        with pytest.raises(Retryable, match=f"another flanneld, process {first.pid}, has {CLAIM}; stop it"):
            second.take([CLAIM], str.__eq__)
        assert claimants() == [first.pid]
        first.kill()
        first.wait()
        second.take([CLAIM], str.__eq__)
        assert claimants() == [os.getpid()]
        second.close()
        assert claimants() == []


def test_second_daemon_ends_after_its_wait_for_a_claim(path: Path) -> None:
    with held(path):
        second = HostClaims(within=0)
        with pytest.raises(Fatal, match=r"has had .* for 0 s; stop it"):
            second.take(["free", CLAIM], str.__eq__)
    second.take([CLAIM], str.__eq__)
    second.close()


def test_questions_do_not_fill_the_queue_of_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.SOMAXCONN", 2)
    claims = HostClaims()
    claims.take([CLAIM], str.__eq__)
    for _ in range(5):
        assert claimants() == [os.getpid()]
        claims.drain()
    claims.close()


def test_claim_that_no_socket_can_have_is_none(caplog: pytest.LogCaptureFixture) -> None:
    HostClaims().take([CLAIM, "x" * 200], str.__eq__)
    assert claimants() == []
    assert "No claims against a second daemon on this host: AF_UNIX path too long" in caplog.messages
