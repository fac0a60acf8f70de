"""The tables of docs/performance.md as data, docs/performance.json, and what a run changes in them.

A table of ratios has ``peer``, the daemon that it is next to, and a row for each figure: ``what`` it is, the
number of ``peers``, both medians as ``ours`` and ``theirs`` in ``unit`` as far as the page shows them, their
``ratio`` and its ``goal``. ``subject`` is the backend and the figure by which ``python -m tests.bench`` knows
the row. Any other table has ``columns``, and the cells of its ``rows``. ``from`` says where the figures of a
table are from, or those of a row that a later run has changed.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from tests.bench.figures import Samples, Subject
from tests.lab.daemon import ROOT

DATA = ROOT / "docs" / "performance.json"
Table = dict[str, Any]
Row = dict[str, Any]


def load() -> list[Table]:
    found: list[Table] = json.loads(DATA.read_text())["tables"]
    return found


def written(tables: list[Table]) -> str:
    """Return the tables as JSON with a row on each line."""
    texts = []
    for table in tables:
        head = json.dumps({name: value for name, value in table.items() if name != "rows"}, indent=1)
        rows = ",\n ".join(map(json.dumps, table["rows"]))
        texts.append(f'{head.removesuffix("}").rstrip()},\n "rows": [\n {rows}\n]}}')
    return f'{{"tables": [\n{",".join(texts)}\n]}}\n'


def cells(table: Table) -> list[list[str]]:
    """Return a table as the page shows it, the head first."""
    if "columns" in table:
        return [table["columns"], *table["rows"]]
    return [["What", "Peers", f"Ratio to {table['peer']}", "Goal", ""], *map(_cells, table["rows"])]


def _cells(row: Row) -> list[str]:
    goal = row.get("goal")
    verdict = "" if goal is None else "met" if row["ratio"] <= goal else "missed"
    what, note = row["what"], row.get("note")
    if "ours" in row:
        note = f"{row['ours']:,} {row['unit']} and {row['theirs']:,} {row['unit']}"
    shown = f"{what}: {note}" if note else what
    return [shown, f"{row['peers']:,}", ratio(row), "" if goal is None else str(goal), verdict]


def ratio(row: Row) -> str:
    """Return the ratio of a row as the page shows it."""
    return f"{row['ratio']:.2f}" if row["ratio"] >= 0.1 else f"{row['ratio']:.3f}"


def merged(tables: list[Table], samples: dict[Subject, Samples], peer: str, run: str) -> list[Table]:
    """Return the tables with the figures of a run next to ``peer``; ``run`` says when and on which machine.

    A row that the run has no ratio for stays as it is.
    """

    def changed(table: Table) -> Table:
        return {**table, "rows": [_with(row, samples, run) for row in table["rows"]]}

    return [changed(table) if table.get("peer") == peer else table for table in tables]


def _with(row: Row, samples: dict[Subject, Samples], run: str) -> Row:
    backend, figure = row.get("subject", ("", ""))
    found = {(each.backend, each.peers, each.figure.value): each for each in samples}
    subject = found.get((backend, row["peers"], figure))
    measured = samples[subject] if subject else Samples()
    by = measured.ratio()
    if by is None:
        return row
    values = {"ours": _rounded(measured.ours), "theirs": _rounded(measured.peer)} if "ours" in row else {}
    return {**row, **values, "ratio": float(f"{by:.2f}" if by >= 0.1 else f"{by:.3f}"), "from": run}


def _rounded(values: list[float]) -> float:
    """Return the median with three digits, without a point if it has none behind it."""
    median = float(f"{statistics.median(values):.3g}")
    return int(median) if median >= 100 else median
