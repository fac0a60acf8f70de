"""Measure time and memory over the number of peers, and draw them: ``python -m tests.bench.scale``.

Each number of peers is one life of the daemon on etcd's v3 API with vxlan. The samples go to a JSON file, the
plot is drawn from that file alone: ``--draw`` draws without measuring.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.bench.bed import make_bed
from tests.bench.process import cpu_seconds, rss_mib
from tests.bench.rtnl import KernelState
from tests.bench.trial import BULK_DEADLINE, SETTLE
from tests.lab import Node, own_command, wait_for
from tests.lab.daemon import ROOT

DATA = ROOT / "docs" / "performance-scale.json"
PLOT = ROOT / "docs" / "performance-scale.svg"
#: All subnets of /24 in 10.0.0.0/8, less the first and those for the node itself.
PEERS = (1, 100, 500, 1000, 5000, 15_000, 65_434)

Sample = dict[str, float]


def measure(peers: int, rounds: int) -> list[Sample]:
    """Return one sample for each life: seconds until all routes, CPU seconds until then, MiB at rest."""
    samples = []
    with make_bed("vxlan", peers, api="v3") as bed:
        for _ in range(rounds):
            with bed.node() as node, KernelState(node.namespace, "vxlan", peers) as kernel:
                begin = time.monotonic()
                bed.start(node, own_command())
                _wait(node, kernel)
                wall, cpu = time.monotonic() - begin, cpu_seconds(node.pid)
                time.sleep(SETTLE)
                samples.append({"seconds": wall, "cpu": cpu, "rss": rss_mib(node.pid)[0]})
                node.stop()
    return samples


def _wait(node: Node, kernel: KernelState) -> None:
    def complete() -> bool:
        assert node.running, f"the daemon ended; its log:\n{node.log()[-2000:]}"
        return not kernel.missing()

    wait_for(complete, BULK_DEADLINE, "the objects of all peers")


# ---- the plot -------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 420, 70, 60, 40, 180
#: Name in the data, text in the legend, colour.
_LINES = (
    ("seconds", "exec to all routes, s", "#1f77b4"),
    ("cpu", "CPU until then, s", "#ff7f0e"),
    ("rss", "resident memory, MiB", "#2ca02c"),
)


def draw(found: dict[str, list[Sample]]) -> str:
    """Return an SVG with logarithmic axes: the median of each figure over the number of peers."""
    peers = sorted(map(int, found))
    medians = {
        name: [statistics.median(each[name] for each in found[str(number)]) for number in peers]
        for name, _, _ in _LINES
    }
    values = [value for line in medians.values() for value in line]
    x_range = math.log10(peers[0]), math.log10(peers[-1])
    y_range = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(number: float) -> float:
        return _LEFT + _share(number, x_range) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - _share(value, y_range) * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, "vxlan on etcd v3: a start over the number of peers", size=14),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 15, "peers", anchor="middle"),
    ]
    for number in peers:
        parts += [
            _rule(x(number), _TOP, x(number), _HEIGHT - _BOTTOM),
            _text(x(number), _HEIGHT - _BOTTOM + 18, f"{number:,}", anchor="middle"),
        ]
    for power in range(y_range[0], y_range[1] + 1):
        value = 10.0**power
        parts += [
            _rule(_LEFT, y(value), _WIDTH - _RIGHT, y(value)),
            _text(_LEFT - 8, y(value) + 4, f"{value:g}", anchor="end"),
        ]
    for row, (name, title, colour) in enumerate(_LINES):
        points = [(x(number), y(value)) for number, value in zip(peers, medians[name], strict=True)]
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>' for across, up in points]
        parts.append(_text(_WIDTH - _RIGHT + 12, _TOP + 20 + 20 * row, title, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _share(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return (math.log10(value) - low) / ((high - low) or 1)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(
    across: float, up: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "black"
) -> str:
    place = f'x="{across:.1f}" y="{up:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{text}</text>'


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what ``--peers`` names, keep the other numbers' samples, and draw all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--peers", default=",".join(map(str, PEERS)), help="numbers of peers")
    parser.add_argument("--rounds", type=int, default=3, help="lives for each number; default 3")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    chosen = parser.parse_args(argv)
    found: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    for number in () if chosen.draw else map(int, chosen.peers.split(",")):
        found[str(number)] = measure(number, chosen.rounds)
        print(number, found[str(number)], file=sys.stderr, flush=True)
        DATA.write_text(json.dumps(found, indent=1) + "\n")
    PLOT.write_text(draw(found))


if __name__ == "__main__":
    main()
