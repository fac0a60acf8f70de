"""Order of the tests: files that take long first, dealt out to all workers, and the others as they come."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

#: Seconds by file, of those that take longest.
DURATIONS = Path(__file__).with_name("durations.json")
#: Seconds of a file that is worth the record, and of one that comes first.
SHORTEST, LONG = 1.0, 5.0


def file_of(test: str) -> str:
    return test.partition("::")[0]


def recorded() -> dict[str, float]:
    """Return the seconds that files took when they were recorded."""
    durations: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return durations


def record(reports: Iterable[pytest.TestReport]) -> None:
    """Write how long each file's tests took, with their fixtures. Files that did not run keep theirs."""
    durations: dict[str, float] = {}
    for report in reports:
        file = file_of(report.nodeid)
        durations[file] = durations.get(file, 0.0) + report.duration
    kept = {file: round(took, 1) for file, took in {**recorded(), **durations}.items() if took >= SHORTEST}
    DURATIONS.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


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


def part(tests: Sequence[str], number: int, parts: int) -> list[str]:
    """Return one of several parts of about as many tests, whole files as far as they are small."""
    parts_of: list[list[str]] = [[] for _ in range(parts)]
    for file, _ in Counter(map(file_of, tests)).most_common():
        min(parts_of, key=len).extend(test for test in tests if file_of(test) == file)
    return parts_of[number - 1]
