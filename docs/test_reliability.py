"""The table of faults in reliability.md says what tests/faults has."""

from __future__ import annotations

from pathlib import Path

from tests.faults.table import FAULTS, THEMES

PAGE = (Path(__file__).parent / "reliability.md").read_text()


def table() -> str:
    rows = ["| Faults of | Number | Lose packets | Problem | Hint |", "|---|---|---|---|---|"]
    for name, faults in [*THEMES.items(), ("**all**", FAULTS)]:
        problems = sum(fault.severity == "problem" for fault in faults.values())
        cutting = sum(fault.cuts is not False for fault in faults.values())
        rows.append(f"| {name} | {len(faults)} | {cutting} | {problems} | {len(faults) - problems} |")
    return "\n".join(rows)


def test_the_page_counts_the_faults_that_the_doctor_names() -> None:
    assert table() in PAGE, f"docs/reliability.md must hold:\n{table()}"
