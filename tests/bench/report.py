"""The results as a table for people and as JSON for machines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tests.bench.figures import GOALS, Figure, Samples, Subject

_ROW = "{:<26}{:>26}{:>26}{:>8}  {}"


@dataclass(slots=True)
class Results:
    """All samples, in the order in which they were first taken, and what kept the machine busy meanwhile."""

    samples: dict[Subject, Samples] = field(default_factory=dict)
    busy: list[float] = field(default_factory=list)

    def table(self) -> str:
        """One block for each backend and number of peers; median (min..max) of the rounds."""
        blocks = [
            "\n".join(
                [
                    _ROW.format(f"{backend}, {peers} peers", "ours", "peer", "ratio", "goal").rstrip(),
                    *(_row(subject, self.samples[subject]) for subject in subjects),
                ]
            )
            for (backend, peers), subjects in _grouped(self.samples)
        ]
        return "\n\n".join([*blocks, self.noise()])

    def noise(self) -> str:
        """How much of the machine others used just before each life of a daemon."""
        if not self.busy:
            return "nothing was measured"
        return (
            f"others kept the CPUs {statistics.median(self.busy):.0%} busy"
            f" ({min(self.busy):.0%}..{max(self.busy):.0%}), looked at before each start"
        )

    def json(self) -> str:
        """``{"figures": [...], "busy": [...]}``, with every sample."""
        rows = [_record(subject, samples) for subject, samples in self.samples.items()]
        return json.dumps({"figures": rows, "busy": self.busy}, indent=1) + "\n"


def _grouped(samples: Iterable[Subject]) -> Iterator[tuple[tuple[str, int], list[Subject]]]:
    order = list(Figure)
    for key, subjects in groupby(samples, key=lambda subject: (subject.backend, subject.peers)):
        yield key, sorted(subjects, key=lambda subject: order.index(subject.figure))


def _row(subject: Subject, samples: Samples) -> str:
    ratio = samples.ratio()
    goal = GOALS.get(subject)
    judged = f"{goal} {goal.verdict(samples)}" if goal else ""
    shown = "" if ratio is None else f"{ratio:.3f}"
    return _ROW.format(subject.figure, _spread(samples.ours), _spread(samples.peer), shown, judged).rstrip()


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    shown = _number(statistics.median(values))
    return f"{shown} ({_number(min(values))}..{_number(max(values))})" if len(values) > 1 else shown


def _number(value: float) -> str:
    """Three significant digits or more, never an exponent."""
    digits = 3 - len(f"{value:.0f}") if value >= 1 else 3
    return f"{value:.{max(digits, 0)}f}"


def _record(subject: Subject, samples: Samples) -> dict[str, Any]:
    goal = GOALS.get(subject)
    return {
        "backend": subject.backend,
        "peers": subject.peers,
        "figure": subject.figure.value,
        "ours": samples.ours,
        "peer": samples.peer,
        "ratio": samples.ratio(),
        "goal": str(goal) if goal else None,
        "verdict": (goal.verdict(samples) or None) if goal else None,
    }
