"""Order of the tests: files that take long first, dealt out to all workers, and the others as they come."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

#: By place, "host" or "machine", the seconds of files that take longest.
DURATIONS = Path(__file__).with_name("durations.json")
#: Seconds of a file that is worth the record, and of one that comes first.
SHORTEST, LONG = 1.0, 5.0
Test = TypeVar("Test")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def recorded(place: str = "host") -> dict[str, float]:
    """Return the seconds that files took when they were recorded."""
    durations: dict[str, float] = json.loads(DURATIONS.read_text()).get(place, {})
    return durations


def durations_of(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Return the seconds of each file's tests, with their fixtures."""
    durations: dict[str, float] = {}
    for report in reports:
        file = file_of(report.nodeid)
        durations[file] = durations.get(file, 0.0) + report.duration
    return durations


def record(place: str, durations: Mapping[str, float]) -> None:
    """Write how long files took. Those that did not run keep what they have."""
    known = json.loads(DURATIONS.read_text())
    kept = {**recorded(place), **durations}
    known[place] = {file: round(took, 1) for file, took in kept.items() if took >= SHORTEST}
    DURATIONS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def together(tests: Sequence[str], shared: Mapping[str, str]) -> list[str]:
    """Return the tests so that those of a file that share something follow each other."""
    groups: dict[tuple[str, str], list[str]] = {}
    for test in tests:
        groups.setdefault((file_of(test), shared.get(test, "")), []).append(test)
    return [test for group in groups.values() for test in group]


def dealt(tests: Sequence[str], workers: int, seconds: Mapping[str, float]) -> list[str]:
    """Return the tests so that each worker's share begins with files that take long.

    ``--dist worksteal`` gives each worker as many tests, all neighbours; an idle one takes another's last.
    """
    counts = Counter(map(file_of, tests))
    slow = sorted((file for file in counts if seconds.get(file, 0) >= LONG), key=lambda file: -seconds[file])
    shares: list[list[str]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    for file in slow:
        lightest = loads.index(min(loads))
        shares[lightest].append(file)
        loads[lightest] += seconds[file]
    by_file: dict[str, list[str]] = {file: [] for file in slow}
    others: list[str] = []
    for test in tests:
        by_file.get(file_of(test), others).append(test)
    order: list[str] = []
    for number, files in enumerate(shares, 1):
        order += [test for file in files for test in by_file[file]]
        room = max(len(tests) * number // workers - len(order), 0)
        order += others[:room]
        del others[:room]
    return order + others


def claimed(tests: Iterable[Test], folder: Path, claim_of: Callable[[Test], str]) -> Iterator[Test]:
    """Yield the tests of each claim that no other process with this folder has made."""
    known: dict[str, bool] = {}
    for test in tests:
        claim = claim_of(test)
        if claim not in known:
            try:
                # Of two machines that create a file at once both succeed, but one that makes a folder.
                (folder / claim.replace("/", "+")).mkdir(parents=True)
                known[claim] = True
            except FileExistsError:
                known[claim] = False
        if known[claim]:
            yield test
