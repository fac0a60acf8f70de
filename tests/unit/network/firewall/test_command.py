"""Commands that work, fail, hang or are not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from flanneld.network.firewall.driver import IptablesFailed, IptablesRunner, Unavailable
from flanneld.runtime.command import CommandHung
from tests.lab import wait_for

Stub = Callable[[str], None]
PROGRAM = "flannel-test-restore"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Makes a shell script the program that is found."""

    def make(script: str) -> None:
        path = tmp_path / PROGRAM
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


def test_a_command_gets_its_input_and_gives_its_output(stub: Stub) -> None:
    stub('echo "$0 $1"; cat')
    output = IptablesRunner(threading.Event()).run((PROGRAM, "--noflush"), "*nat\nCOMMIT\n")
    assert output.endswith(f"{PROGRAM} --noflush\n*nat\nCOMMIT\n")


def test_each_command_is_a_sign_of_life_whatever_its_end(stub: Stub) -> None:
    stub("cat >/dev/null; exit $1")
    beats: list[str] = []
    commands = IptablesRunner(threading.Event(), ran=lambda: beats.append("alive"))
    commands.run((PROGRAM, "0"))
    assert beats == ["alive"]
    with pytest.raises(IptablesFailed):
        commands.run((PROGRAM, "3"))
    assert beats == ["alive", "alive"]


def test_a_failure_tells_all_there_is_to_know(stub: Stub) -> None:
    stub("cat >/dev/null; echo 'line 2 failed' >&2; exit 3")
    with pytest.raises(
        IptablesFailed, match=f"{PROGRAM} --noflush ended with status 3: line 2 failed"
    ) as caught:
        IptablesRunner(threading.Event()).run((PROGRAM, "--noflush"), "*nat\n")
    failure = caught.value
    assert (failure.argv, failure.stdin) == ((PROGRAM, "--noflush"), "*nat\n")
    assert (failure.status, failure.stderr) == (3, "line 2 failed\n")


def test_a_failure_in_silence_says_so(stub: Stub) -> None:
    stub("exit 1")
    with pytest.raises(IptablesFailed, match="it says nothing"):
        IptablesRunner(threading.Event()).run((PROGRAM,))


def test_a_command_that_does_not_read_its_input_is_no_trouble(stub: Stub) -> None:
    stub("exit 0")
    assert IptablesRunner(threading.Event()).run((PROGRAM,), "x" * 1_000_000) == ""


def test_a_command_that_hangs_is_killed_with_what_it_started(stub: Stub, tmp_path: Path) -> None:
    stub(f"sleep 1000 & echo $! >{tmp_path}/child; wait")
    with pytest.raises(CommandHung, match=r"did not end within 0\.3 s"):
        IptablesRunner(threading.Event(), limit=0.3).run((PROGRAM,), "x" * 1_000_000)
    wait_for(lambda: not lives(int((tmp_path / "child").read_text())), 5, "the child to be gone")


def test_a_stop_ends_the_command_that_runs_and_every_later_one(stub: Stub, tmp_path: Path) -> None:
    stub(f"touch {tmp_path}/begun; sleep 1000")
    stop, ended = threading.Event(), threading.Event()
    commands = IptablesRunner(stop)

    def run() -> None:
        with suppress(CommandHung):
            commands.run((PROGRAM,))
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    wait_for((tmp_path / "begun").exists, 5, "the command to run")
    stop.set()
    assert ended.wait(60)
    thread.join()
    with pytest.raises(CommandHung):
        commands.run((PROGRAM,))


@pytest.mark.usefixtures("stub")
def test_a_program_that_is_not_there_names_the_package() -> None:
    with pytest.raises(Unavailable, match=f"{PROGRAM} is not installed; install the Debian package iptables"):
        IptablesRunner(threading.Event()).run((PROGRAM,))


def test_a_program_that_cannot_start_is_named(stub: Stub, tmp_path: Path) -> None:
    stub("")
    (tmp_path / PROGRAM).write_text("#!/no/such/interpreter\n")
    with pytest.raises(Unavailable, match=f"{tmp_path}/{PROGRAM} does not start"):
        IptablesRunner(threading.Event()).run((PROGRAM,))


def lives(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
