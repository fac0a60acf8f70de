"""Recordings of simulated clusters, which show a change of behaviour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.simulation.__main__ import compare, record


def test_clusters_of_two_recordings_are_compared_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = (tmp_path / name for name in ("before", "after"))
    for folder in (before, after):
        record(folder, seeds=1)
    assert compare(before, after) == 0
    changed = after / "v3-000.txt"
    changed.write_text(changed.read_text().replace("route 10.", "route 11.", 1))
    (after / "v2-000.txt").unlink()
    assert compare(before, after) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "0 of 4 clusters differ"
    assert [line[0] for line in said if "route 11." in line] == ["+"]
    assert said[-1] == "2 of 4 clusters differ"
