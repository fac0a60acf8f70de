"""The tables of seeing.md say what the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from flanneld.ctl.checks.cluster import RULES
from flanneld.ctl.doctor import CHECKS
from flanneld.ctl.findings import THEMES
from flanneld.ctl.main import COMMANDS
from flanneld.diagnostics.metrics import METRICS
from flanneld.reconcile.counters import BOUNDS

PAGE = (Path(__file__).parent / "seeing.md").read_text()


def checks() -> str:
    rows = [f"| {check.theme} | {THEMES[check.theme]} | {check.name} | {check.meaning} |" for check in CHECKS]
    return "\n".join(["| | Theme | Check | All is well if |", "|---|---|---|---|", *rows])


def metrics() -> str:
    rows = []
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.type} | {labels} | {metric.meaning} |")
    return "\n".join(["| Metric | Type | Labels | Meaning |", "|---|---|---|---|", *rows])


def rules() -> str:
    rows = [f"| {rule.name} | {rule.meaning} | {rule.severity} |" for rule in RULES]
    return "\n".join(["| Rule | All is well if | Otherwise |", "|---|---|---|", *rows])


@pytest.mark.parametrize("table", [checks(), metrics(), rules()], ids=["checks", "metrics", "rules"])
def test_the_page_has_this_table(table: str) -> None:
    assert table in PAGE, f"docs/seeing.md must hold:\n{table}"


def test_report_that_is_shown_has_the_number_of_checks() -> None:
    assert f"\n    {len(CHECKS)} checks: " in PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_is_shown(command: str) -> None:
    assert f"    flannelctl {command} " in PAGE


def test_the_number_of_checks_in_the_example_is_right() -> None:
    assert f"    {len(CHECKS)} checks: 1 problem, 0 hints\n" in PAGE


def test_metrics_are_named_as_prometheus_wants_it() -> None:
    for metric in METRICS:
        assert metric.name.startswith("flannel_")
        assert metric.name.endswith("_total") == (metric.type == "counter")


def test_the_page_tells_the_bounds_of_the_buckets() -> None:
    milliseconds = enumerated([f"{1000 * bound:g}" for bound in BOUNDS if bound < 1])
    seconds = enumerated([f"{bound:g}" for bound in BOUNDS if bound >= 1])
    told = f"The buckets of all histograms end at {milliseconds} milliseconds and {seconds} seconds."
    assert told in " ".join(PAGE.split())


def enumerated(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
