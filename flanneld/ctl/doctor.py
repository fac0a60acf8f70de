"""``flannelctl doctor``: runs the checks and shows what they found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flanneld.ctl.checks import CHECKS
from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import THEMES, Check, Finding
from flanneld.ctl.tables import Table


def examine(facts: Facts) -> list[tuple[Check, Finding]]:
    """All findings, by theme (pure)."""
    return [(check, finding) for check in CHECKS for finding in check.look(facts)]


def report(findings: list[tuple[Check, Finding]], facts: Facts) -> list[Table]:
    """For people."""
    tables = [Table((), list(_rows(check, finding))) for check, finding in findings]
    problems = sum(not finding.hint for _, finding in findings)
    hints = len(findings) - problems
    said = f"{len(CHECKS)} checks: {_number(problems, 'problem')}, {_number(hints, 'hint')}"
    unknown = [(f"not known: {why}",) for why in facts.unknown]
    return [*tables, Table((), [*unknown, (said,)])]


def _rows(check: Check, finding: Finding) -> Iterator[tuple[str, str]]:
    yield "hint" if finding.hint else "PROBLEM", finding.what
    yield "check", f"{check.theme} {check.name}: {THEMES[check.theme]}"
    yield "evidence", finding.evidence
    yield "why", finding.why
    yield "fix", finding.fix


def _number(number: int, of: str) -> str:
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


def as_json(findings: list[tuple[Check, Finding]], facts: Facts) -> dict[str, Any]:
    """For programs."""
    return {
        "checks": [{"theme": each.theme, "name": each.name, "meaning": each.meaning} for each in CHECKS],
        "findings": [
            {
                "theme": check.theme,
                "check": check.name,
                "severity": "hint" if finding.hint else "problem",
                "what": finding.what,
                "evidence": finding.evidence,
                "why": finding.why,
                "fix": finding.fix,
            }
            for check, finding in findings
        ],
        "not_known": list(facts.unknown),
    }
