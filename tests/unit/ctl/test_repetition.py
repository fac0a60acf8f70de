"""``--wait`` and ``--watch`` of ``flannelctl``: what is asked again, and when it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl import output
from flanneld.ctl.main import FINE, NO_DAEMON, USAGE, parse, run
from flanneld.options import UsageError
from tests.lab import wait_for
from tests.unit.ctl.test_main import daemon

DEADLINE = 60.0
HEALTHY = json.dumps(
    {"version": "1", "pid": 1, "started": 0.0, "health": {"missing": [], "late": [], "conditions": []}}
).encode()


def test_good_answer_ends_the_wait() -> None:
    numbers = count()
    assert output.until_good(lambda: next(numbers), lambda number: number == 2, DEADLINE) == 2


def test_without_a_wait_one_question_is_asked() -> None:
    numbers = count()
    assert output.until_good(lambda: next(numbers), lambda number: number == 2, 0.0) == 0


def test_wait_ends_with_the_last_bad_answer_and_pauses_between_two_questions() -> None:
    numbers = count(1)
    assert output.until_good(lambda: next(numbers), lambda _: False, 0.01) <= 3


def test_only_changes_are_shown() -> None:
    answers: Iterator[str] = iter("aabbba")
    shown = output.changes(lambda: next(answers), lambda answer: answer, 0.001)
    assert list(islice(shown, 3)) == ["a", "b", "a"]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "written"), [(StringIO(), ""), (Terminal(), "\r\x1b[Kport\r\x1b[K")])
def test_progress_is_shown_on_a_terminal_only(out: StringIO, written: str) -> None:
    with output.progress(out) as tell:
        tell("port")
    assert out.getvalue() == written


def test_status_waits_until_a_daemon_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", f"--subnet-file={tmp_path / 'subnet.env'}", "--output=json"]
    assert run([*words, "--wait=0.1"], {}) == NO_DAEMON
    statuses: list[int] = []
    waiting = threading.Thread(target=lambda: statuses.append(run([*words, f"--wait={DEADLINE:.0f}"], {})))
    waiting.start()
    with daemon(tmp_path, HEALTHY):
        waiting.join(DEADLINE)
    assert statuses == [FINE]
    assert '"daemon"' in capsys.readouterr().out


@contextmanager
def flannelctl(folder: Path, *words: str) -> Iterator[Callable[[int], list[Any]]]:
    """Run a command until the block ends; its value waits for a number of answers."""
    # A shell has its background processes ignore SIGINT, and theirs inherit it.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from flanneld.ctl.main import main; main()"
    given = [*words, f"--subnet-file={folder / 'subnet.env'}", "--output=json"]
    said = folder / "said"

    def answers(number: int) -> list[Any]:
        wait_for(lambda: len(said.read_bytes().splitlines()) >= number, DEADLINE, f"answer {number}")
        return [json.loads(line) for line in said.read_text().splitlines()]

    with said.open("wb") as out:
        running = subprocess.Popen([sys.executable, "-c", code, *given], stdout=out)
        try:
            yield answers
        finally:
            running.send_signal(2)
            running.wait(DEADLINE)


def test_watch_says_what_changes_until_it_is_interrupted(tmp_path: Path) -> None:
    with flannelctl(tmp_path, "--watch", "0.05", "status") as answers:
        answers(1)
        with daemon(tmp_path, HEALTHY):
            found = answers(2)
    assert [each["origin"] for each in found[:2]] == ["host", "daemon"]


def test_follower_of_the_log_is_told_each_new_line_once(tmp_path: Path) -> None:
    file = tmp_path / "flanneld.events"

    def log(number: float, text: str) -> None:
        with file.open("a") as lines:
            lines.write(f"{json.dumps([number, 'I', 'main', text])}\n")

    log(1, "Restored route 10.5.2.0/24")
    with flannelctl(tmp_path, "logs", "10.5.2.0/24", "--follow", "--watch=0.05") as answers:
        answers(1)
        log(2, "Restored route 10.5.3.0/24")
        log(3, "Removed route 10.5.2.0/24")
        answers(2)
        log(3.5, "Removed route 10.5.2.0/24")  # again within the second that is shown
        found = answers(3)
    texts = [[event["text"] for event in answer["events"]] for answer in found]
    assert texts == [["Restored route 10.5.2.0/24"], *[["Removed route 10.5.2.0/24"]] * 2]


@pytest.mark.parametrize(
    "words", ["--watch status", "status --watch", "--watch=2 status", "status --watch 2"]
)
def test_watch_may_stand_at_both_places_with_and_without_a_span(words: str) -> None:
    arguments, flags = parse(["--socket=/s", *words.split()])
    assert (arguments.command, arguments.watch, arguments.socket, flags) == ("status", 2.0, "/s", [])


def test_first_word_that_is_no_flag_is_named() -> None:
    with pytest.raises(UsageError, match='unrecognized argument: "stray";'):
        parse(["status", "stray", "--etcd-prefix=/x"])


@pytest.mark.parametrize("option", ["--wait=soon", "--wait=0", "--watch=-1", "--watch=1e9"])
def test_span_that_is_no_number_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", option], {}) == USAGE
    assert "is no number of seconds" in capsys.readouterr().err
