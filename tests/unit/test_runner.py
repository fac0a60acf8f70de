"""tests/run: which steps there are, what it shows, and that it reports no success that was none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab.daemon import ROOT
from tests.runner import (
    COLLECT,
    FEATURES,
    HISTORIES,
    LONG,
    NAMESPACES,
    PARTS,
    PYTEST,
    UNIT,
    Run,
    Step,
    activity,
    passed,
    plan,
    shuffles,
    summary,
)

#: Stands in for a step of tests: pytest's name is its last argument.
TESTS = ("sh", "-c", "echo '.. [100%]'", "pytest")


def done(tmp_path: Path, *lanes: list[Step], selects: bool = False) -> list[Step]:
    Run(lanes, tmp_path, selects=selects).go()
    return [step for lane in lanes for step in lane]


def shell(name: str, script: str) -> Step:
    return Step(name, ("sh", "-c", script, "pytest"))


def word_after(option: str, step: Step) -> str:
    return step.command[step.command.index(option) + 1]


def test_run_passes_if_all_steps_pass_and_one_runs_tests(tmp_path: Path) -> None:
    assert passed(done(tmp_path, [Step("lint", ("true",)), Step("tests", TESTS)]))
    assert not passed(done(tmp_path, [Step("lint", ("true",))]))
    assert not passed(done(tmp_path, [Step("collection", (*TESTS, COLLECT))]))
    assert not passed(done(tmp_path, [Step("lint", ("false",)), Step("tests", TESTS)]))


def test_failed_step_stops_no_other(tmp_path: Path) -> None:
    steps = done(tmp_path, [shell("one", "exit 1"), shell("two", ":")], [shell("three", "kill $$")])
    assert [step.verdict for step in steps] == ["FAILED", "passed", "FAILED"]


def test_step_that_was_not_run_is_a_failure_unless_it_is_optional(tmp_path: Path) -> None:
    assert not passed(done(tmp_path, [Step("namespaces", reason="no root"), Step("tests", TESTS)]))
    assert passed(done(tmp_path, [Step("image", reason="no --long", optional=True), Step("tests", TESTS)]))


def test_a_long_part_without_pytest_passes(tmp_path: Path) -> None:
    for status in (0, 1):
        steps = done(tmp_path, [Step("mutation", ("sh", "-c", f"exit {status}"))])
        assert passed(steps) is not bool(status)


def test_what_a_search_finds_is_told_with_its_command_and_fails_no_run(tmp_path: Path) -> None:
    search = shell("search", "exit 1")
    search.optional = True
    steps = done(tmp_path, [Step("tests", TESTS), search])
    assert passed(steps)
    assert "found    search" in summary(steps)
    assert "repeat: sh -c 'exit 1' pytest" in summary(steps)


def test_tests_in_the_machine_need_its_kernel(tmp_path: Path) -> None:
    for status, verdict in ((1, "not run"), (0, "passed")):
        kernel = shell("kernel", f"sleep 0.2; exit {status}")
        machine = Step("machine", TESTS, after=kernel)
        steps = done(tmp_path, [machine], [kernel], [Step("tests", TESTS)])
        assert (machine.verdict, bool(machine.reason)) == (verdict, bool(status))
        assert passed(steps) is not bool(status)


def test_step_without_a_selected_test_fails_unless_arguments_select(tmp_path: Path) -> None:
    for selects in (False, True):
        steps = done(tmp_path, [shell("none", "exit 5"), Step("tests", TESTS)], selects=selects)
        assert passed(steps) is selects
    assert not passed(done(tmp_path, [shell("none", "exit 5")], selects=True))


def test_summary_names_what_was_not_run_and_commands_that_repeat_failures(tmp_path: Path) -> None:
    tests = (
        "echo 'not run: 2 files: no Go daemon'; echo 'tried: 7 points'; echo 'repeat: pytest a.py::b'; exit 1"
    )
    lint = Step("lint", ("sh", "-c", "exit 2"))
    lanes = [lint, shell("tests", tests), Step("image", reason="add --long", optional=True)]
    lines = summary(done(tmp_path, lanes)).splitlines()
    assert [re.sub(r"  .*", "", line) for line in lines[2:5]] == ["FAILED", "FAILED", "not run"]
    assert lines[5:] == [
        "not run: 2 files: no Go daemon",
        "tried: 7 points",
        "repeat: sh -c 'exit 2'",
        "repeat: pytest a.py::b",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "begun"),
        ("test kernel: building\n\n", "test kernel: building"),
        ("bringing up nodes...\n\n..F..E. [ 12%]\n...", "12 %, 2 failed"),
        ("....", "0 %"),
    ],
)
def test_progress_shows_what_a_step_does(text: str, shown: str) -> None:
    assert activity(text) == shown


def test_plan_leaves_out_no_step_in_silence() -> None:
    names = {step.name for lane in plan([], long="all", lacking=FEATURES) for step in lane}
    short = [step for lane in plan([], lacking=FEATURES) for step in lane]
    assert {step.name for step in short} == names
    assert {step.name for step in short if step.reason} == {*LONG}
    reasons = {step.name: step.optional for lane in plan([], is_root=False) for step in lane if step.reason}
    assert reasons["tests in namespaces"] is False


def test_long_run_is_the_sum_of_its_parts() -> None:
    whole, *parts = (
        {
            (step.name, word)
            for lane in plan(["-x"], long=part, lacking=FEATURES)
            for step in lane
            for word in step.command
        }
        for part in ("all", *PARTS, *LONG)
    )
    apart = {f"--ignore={HISTORIES}", HISTORIES}
    assert whole == {each for part in parts for each in part if each[1] not in apart}
    for word in (*UNIT, *NAMESPACES, *apart):
        assert sum(("tests", word) in part for part in parts) == 1


def test_long_unit_tests_need_no_machine() -> None:
    assert len(plan([], long="unit", lacking=FEATURES)) == 2


def test_each_test_is_in_one_step() -> None:
    _, here, _, *machines = plan([], lacking=FEATURES, shared="/folder")
    steps = (here[1], *(machine[0] for machine in machines))
    assert [word_after("--needs-kernel", step) for step in steps] == ["without", "only", "only"]
    assert {(word_after("--shared", step), word_after("--claims", step)) for step in steps[1:]} == {
        ("/folder", "/run/shared/claims")
    }
    assert {word_after("--lacks", step) for step in steps} == {",".join(FEATURES)}
    assert len(plan([], lacking=["own-clock"])) == 4
    (_, everywhere, *rest) = plan([])
    assert word_after("--needs-kernel", everywhere[1]) == "with"
    assert not rest
    assert {folder.name for folder in (ROOT / "tests").iterdir() if list(folder.rglob("test_*.py"))} == {
        Path(word).name
        for lane in plan([], long="all")
        for step in lane
        for word in step.command
        if word.startswith("tests/")
    }


def test_fast_plan_runs_lints_and_leaves_out_what_exists() -> None:
    (steps,) = plan([], fast=True)
    assert [step.name for step in steps[:-1]] == [step.name for step in plan([])[0][:4]]
    left_out = [word.removeprefix("--ignore=") for word in steps[-1].command if word.startswith("--ignore=")]
    assert left_out
    assert all((ROOT / path).exists() for path in left_out)


def test_shuffles_are_as_many_runs_of_the_same_tests() -> None:
    (steps,) = shuffles([], 10, FEATURES)
    assert len(steps) == 10
    (command,) = {step.command for step in steps[3:]}
    assert command[:3] == PYTEST
    tests = command[command.index("--dist") :]  # busy ones have other processes
    assert all(step.command[-len(tests) :] == tests for step in steps[:3])
