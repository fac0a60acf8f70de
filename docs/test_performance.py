"""The tables of performance.md are those of performance.json, whose ratios are those of its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.test_docs import tables
from tests.bench import page
from tests.bench.figures import GOALS, Figure, Subject

DATA = page.load()
RATIOS = [row for table in DATA for row in table["rows"] if "peer" in table]
NAMES = [f"{row['what']}, {row['peers']}" for row in RATIOS]


def test_the_page_has_the_tables_of_the_data_and_no_other() -> None:
    shown = "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in page.cells(table)) for table in DATA)
    found = list(tables(Path(__file__).parent / "performance.md"))
    assert found == [page.cells(table) for table in DATA], f"docs/performance.md must hold:\n{shown}"


def test_the_data_is_as_the_bench_writes_it() -> None:
    assert page.DATA.read_text() == page.written(DATA)
    assert all(table["from"] for table in DATA)


def half(value: float) -> float:
    """Return half a unit of the last digit that is shown."""
    return 0.5 * 10.0 ** -len(f"{value}".partition(".")[2])


@pytest.mark.parametrize("row", [row for row in RATIOS if "ours" in row], ids=lambda row: row["what"])
def test_ratio_is_that_of_the_figures_beside_it(row: dict[str, Any]) -> None:
    ours, theirs, by = row["ours"], row["theirs"], row["ratio"]
    least = (ours - half(ours)) / (theirs + half(theirs))
    most = (ours + half(ours)) / (theirs - half(theirs))
    assert least - 0.005 <= by <= most + 0.005


@pytest.mark.parametrize("row", RATIOS, ids=NAMES)
def test_goal_of_a_row_is_that_of_the_bench(row: dict[str, Any]) -> None:
    if "subject" in row:
        backend, figure = row["subject"]
        goal = GOALS.get(Subject(backend, row["peers"], Figure(figure)))
        assert row.get("goal") == (goal.limit if goal and not goal.absolute else None)
