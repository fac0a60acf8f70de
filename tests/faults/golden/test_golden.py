"""What operators and programs see of some hosts is as it was recorded.

A change of a file is a commit that says why. ``python -m tests.faults.golden`` records them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.faults.golden.hosts import HOSTS, kept_worlds
from tests.faults.world import Kind, World
from tests.lab import wait_for
from tests.lab.kept import Kept

FILES = Path(__file__).with_name("hosts")
#: Seconds until a host shows what it is: a daemon may take a moment to notice.
PATIENCE = 10.0


@pytest.fixture(scope="module")
def worlds() -> Iterator[Kept[Kind, World]]:
    kept = kept_worlds()
    yield kept
    kept.close()


@pytest.mark.parametrize("name", HOSTS)
def test_host_is_seen_as_recorded(
    worlds: Kept[Kind, World], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))
    with HOSTS[name](worlds) as pages:
        assert sorted(pages) == sorted(path.name for path in (FILES / name).iterdir())
        differences = [difference(FILES / name / file, read) for file, read in pages.items()]
    assert not any(differences), "\n".join(differences)


def difference(file: Path, read: Callable[[], str]) -> str:
    """Wait until what is read is as in the file. Return what is not, as a unified diff."""
    golden, last = file.read_text(), ""

    def is_as_recorded() -> bool:
        nonlocal last
        last = read()
        return last == golden

    try:
        wait_for(is_as_recorded, PATIENCE)
    except AssertionError:
        lines = unified_diff(golden.splitlines(), last.splitlines(), str(file), "now", lineterm="", n=1)
        return "\n".join(lines)
    return ""


def wait_until_settled(read: Callable[[], str]) -> str:
    """Read until three answers in a row are equal."""
    answers = [read()]

    def is_settled() -> bool:
        answers.append(read())
        return len(set(answers[-3:])) == 1 and len(answers) >= 3

    wait_for(is_settled, PATIENCE, "an answer that does not change")
    return answers[-1]
