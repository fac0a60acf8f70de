"""Real commands: what they get and give, and how those end that do not end by themselves."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from flanneld.runtime.command import CommandHung, CommandRunner, Finished, NotStarted, TooMuchOutput
from tests.lab import wait_for


def runner(longest_output: int = 1 << 20) -> CommandRunner:
    return CommandRunner(threading.Event(), longest_output)


def lives(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_command_gets_input_and_environment_and_gives_both_streams_and_its_status() -> None:
    script = 'cat; echo "$SUBNET"; echo wrong >&2; exit 3'
    done = runner().run(("sh", "-c", script), {"SUBNET": "10.5.7.0/24"}, "input\n")
    assert done == Finished(3, "input\n10.5.7.0/24\n", "wrong\n")


def test_a_text_is_run_by_the_shell_in_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "node1")
    assert runner().run('echo "$NODE_NAME" | tr a-z A-Z') == Finished(0, "NODE1\n", "")


def test_a_signal_that_ends_a_command_is_its_status() -> None:
    assert runner().run("kill -KILL $$").status == -9


def test_input_and_output_larger_than_a_pipe_pass_at_once() -> None:
    text = "0123456789" * 50_000
    assert runner().run(("cat",), stdin=text).output == text


def test_a_command_that_closes_its_streams_is_waited_for() -> None:
    assert runner().run("exec >&- 2>&- <&-; sleep 0.3; exit 4").status == 4


def test_a_command_without_end_is_killed_with_all_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(CommandHung, match=r"^sh -c sleep 1000 .* did not end within 0\.5 s; try it by hand$"):
        runner().run(f"sleep 1000 & echo $! >{tmp_path}/child; wait", timeout=0.5)
    assert time.monotonic() - began < 500, "a busy machine is no command without end"
    wait_for(lambda: not lives(int((tmp_path / "child").read_text())), 20, "the child to be gone")


def test_a_child_that_holds_the_streams_is_killed_at_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(CommandHung):
        runner().run(f"sleep 1000 & echo $! >{tmp_path}/child", timeout=0.5)
    wait_for(lambda: not lives(int((tmp_path / "child").read_text())), 5, "the child to be gone")


def test_output_without_end_is_given_up() -> None:
    with pytest.raises(TooMuchOutput, match=r"^yes writes more than 1 MiB; see what it writes$"):
        runner().run(("yes",), timeout=60)


def test_a_program_that_is_not_installed_is_named() -> None:
    with pytest.raises(NotStarted, match=r"^no-such-program is not installed; install it$"):
        runner().run(("no-such-program",))


def test_a_command_at_exit_outlives_the_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(CommandHung):
        CommandRunner(stop).run(f"touch {tmp_path}/begun; sleep 1")
    assert CommandRunner(stop).run("sleep 0.2; echo done", at_exit=True).output == "done\n"


def test_a_clean_environment_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLANNELD_ETCD_PASSWORD", "secret")
    found = CommandRunner(threading.Event()).run(("env",), {"SUBNET": "10.1.5.0/24"}, clean=True)
    assert found.output == "SUBNET=10.1.5.0/24\n"


def test_merged_streams_keep_their_order() -> None:
    found = CommandRunner(threading.Event()).run("echo a; echo b >&2; echo c", merged=True)
    assert (found.output, found.errors) == ("a\nb\nc\n", "")


def test_a_name_stands_for_a_command_whose_text_may_hold_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    runner = CommandRunner(threading.Event(), longest_output=10)
    with pytest.raises(CommandHung, match="the command did not end") as hung:
        runner.run("sleep 60 # secret", timeout=0.1, name="the command")
    with pytest.raises(TooMuchOutput, match="the command writes more") as wordy:
        runner.run("echo 01234567890123 # secret", name="the command")
    assert "secret" not in f"{hung.value} {wordy.value} {caplog.text}"
