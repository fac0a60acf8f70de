"""The end of a session of tests: its order, what was not run and why, and how to repeat what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.daemon import ROOT
from tests.report import command_for
from tests.vm.machine import INSIDE

#: A folder with the hooks of all tests.
CONFTEST = "from tests.conftest import *\n"
TESTS = """
import pytest

def test_passes(record_property): record_property('points', 3)
def test_fails(): assert False
@pytest.mark.long
def test_takes_long(): pass
@pytest.mark.needs_kernel("ipip")
@pytest.mark.long
def test_takes_long_elsewhere(): pass
@pytest.fixture
def broken(): assert False
def test_has_a_broken_fixture(broken): pass
"""


#: What the collector will not look at any more.
NOTE_FROZEN = """
import gc
print(gc.get_freeze_count(), file=open('begun', 'w'))  # Python 3.12 begins with some
def pytest_runtest_teardown(): print(gc.get_freeze_count(), file=open('before', 'w'))
def pytest_unconfigure(): print(gc.get_freeze_count(), file=open('frozen', 'a'))
"""


def session(folder: Path, *arguments: str, more: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST + more)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c/dev/null", "--rootdir=.", ".", *arguments]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_session_names_what_was_not_run_and_how_to_repeat_what_failed(tmp_path: Path, workers: str) -> None:
    done = session(tmp_path, workers, "--needs-kernel=without", "--randomly-seed=7")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "not run: 1 tests marked long; add --long" in lines
    assert sorted(line for line in lines if line.startswith("repeat: ")) == [
        "repeat: .venv/bin/python -m pytest test_it.py::test_fails",
        "repeat: .venv/bin/python -m pytest test_it.py::test_has_a_broken_fixture",
    ]
    ends = next(number for number, line in enumerate(lines) if "FAILURES" in line or "ERRORS" in line)
    assert sum(line.startswith("repeat: ") for line in lines[:ends]) == 2, (
        "a run that is broken off tells none"
    )
    assert "tried: 3 points" in lines
    assert "order: --randomly-seed=7" in lines


def test_worker_leaves_no_garbage_to_collect_after_its_last_word(tmp_path: Path) -> None:
    session(tmp_path, "-n1", more=NOTE_FROZEN)
    worker, controller = sorted(
        (int(line) for line in (tmp_path / "frozen").read_text().split()), reverse=True
    )
    begun, before = (int((tmp_path / name).read_text()) for name in ("begun", "before"))
    assert worker > before > controller == begun


def test_command_that_repeats_a_test_of_the_machine_runs_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSIDE, "1")
    assert command_for("tests/a.py::test_b[a b]") == (
        ".venv/bin/python -m tests.vm.machine .venv/bin/python -m pytest 'tests/a.py::test_b[a b]'"
    )
