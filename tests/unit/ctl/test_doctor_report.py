"""The report of the doctor, and the fixes that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flanneld.ctl.checks.cluster import CLUSTER_CHECKS
from flanneld.ctl.doctor import CHECKS, DoctorReport, fixes, run_fixes
from flanneld.findings import Command, Finding, Remedy, Severity

CHECK = CHECKS[0]


def finding(remedy: Remedy, severity: Severity = Severity.PROBLEM) -> Finding:
    return Finding("problem", "evidence", "why", remedy, "about", severity)


FIRST: tuple[Command, ...] = (("ip", "link", "set", "dev", "a b", "up"),)
SECOND: tuple[Command, ...] = (("true",), ("false",))


def test_fixes_are_those_of_problems_and_each_is_run_once() -> None:
    remedies = (FIRST, "advice", SECOND, FIRST)
    found = [(CHECK, finding(each)) for each in remedies]
    hints = [(CHECK, finding((("reboot",),), Severity.HINT))]
    assert fixes([*found, *hints]) == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("chosen", "ran"),
    [
        ([(("true",),)], [("true", "")]),
        ([(("true",), ("false",), ("true",))], [("true", ""), ("false", "status 1")]),
        ([(("false",),), (("true",),)], [("false", "status 1"), ("true", "")]),
        ([(("sh", "-c", "echo no >&2; exit 2"),)], [("sh", "no")]),
        ([(("sh", "-c", "echo a warning >&2"),)], [("sh", "")]),
    ],
    ids=["fine", "the rest of a failed fix", "the next fix", "its own words", "words without failure"],
)
def test_fix_ends_at_the_first_command_that_fails(
    chosen: list[tuple[Command, ...]], ran: list[tuple[str, str]]
) -> None:
    assert [(command[0], failure) for command, failure in run_fixes(chosen)] == ran


def test_command_that_is_not_there_fails(tmp_path: Path) -> None:
    ((_, failure),) = run_fixes([((str(tmp_path / "none"),), ("true",))])
    assert failure


@pytest.mark.parametrize(
    ("findings", "more", "said"),
    [
        ([], 0, "0 problems, 0 hints"),
        ([finding("a"), finding("b", Severity.HINT), finding("c", Severity.HINT)], 0, "1 problem, 2 hints"),
        ([finding("a"), finding(FIRST)], len(CLUSTER_CHECKS), "2 problems, 0 hints"),
    ],
)
def test_report_ends_with_what_is_not_known_and_the_numbers(
    findings: list[Finding], more: int, said: str
) -> None:
    report = DoctorReport(
        [(CHECK, each) for each in findings], ("no daemon", "no store"), CLUSTER_CHECKS[:more]
    )
    assert [row[0] for row in report.tables()[-1].rows] == [
        "not known: no daemon",
        "not known: no store",
        f"{len(CHECKS) + more} checks: {said}",
    ]
    plain = report.plain()
    assert len(plain["checks"]) == len(CHECKS) + more
    assert plain["not_known"] == ["no daemon", "no store"]
    assert [each["advice"] or each["fix"] for each in plain["findings"]] == [each.remedy for each in findings]
    assert len(report.problems) == int(said.partition(" ")[0])
