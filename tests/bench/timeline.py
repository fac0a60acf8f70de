"""Measure a start step by step, and draw it: ``python -m tests.bench.timeline``.

The steps end with lines of the daemon's log, whose times are its own. Of several starts the fastest is kept,
as other work on the machine can only delay one. ``--draw`` draws what was measured before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.lab import Lab
from tests.lab.daemon import ROOT
from tests.lab.forks import exact

DATA = ROOT / "docs" / "start.json"
PICTURE = ROOT / "docs" / "start.svg"
ROUNDS = 20


class Step(NamedTuple):
    """A part of the start: the first words of the log line that ends it, and what happens until then."""

    end: str
    what: str


STEPS = (
    Step("Installing signal handlers", "Python, its modules, the flags"),
    Step("Created subnet manager", "the client of the store"),
    Step("Found network config", "load: the network config"),
    Step("VXLAN config", "elect: the external interface"),
    Step("Our subnet is", "join: the backend and the lease"),
    Step("Made address", "the device and its address"),
    Step("Made our rules", "masquerading, by iptables"),
    Step("Wrote subnet file", "subnet.env, READY=1"),
    Step("In sync with", "all leases, the routes to the peers"),
)


def measure() -> dict[str, float]:
    """Return the milliseconds from exec to the end of each step, with vxlan, etcd's v3 API and one peer."""
    found = []
    with Lab(api="v3") as lab, exact():
        lab.cluster({"Type": "vxlan"}, nodes=1)
        for _ in range(ROUNDS):
            (node,) = lab.add_nodes(1)
            begin = 1000 * time.time()
            node.start("--ip-masq", "--logging-format=json")
            node.wait_for_log("In sync with")
            found.append(_ends(node.log(), begin))
            node.kill()
            lab.etcd.delete_lease(node.subnet())
    return min(found, key=lambda each: each[STEPS[-1].end])


def _ends(log: str, begin: float) -> dict[str, float]:
    lines = [json.loads(line) for line in log.splitlines()]
    times = {step.end: [each["ts"] for each in lines if each["msg"].startswith(step.end)] for step in STEPS}
    return {name: round(found[0] - begin, 1) for name, found in times.items()}


# ---- the picture ----------------------------------------------------------------------------------

_WIDTH, _LEFT, _TOP, _ROW, _PLOT = 760, 20, 60, 26, 470
_STYLE = """
  svg { --page: #fff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --ours: #54aeff; }
  @media (prefers-color-scheme: dark) {
    svg { --page: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --ours: #1f6feb; }
  }
  text { font: 12px sans-serif; fill: var(--ink); }
  .note { font-size: 11px; fill: var(--soft); }
  .title { font-weight: bold; font-size: 13px; }
  .page { fill: var(--page); }
  .step { fill: var(--ours); }
  line { stroke: var(--line); }
"""


def draw(ends: Mapping[str, float]) -> str:
    """Return an SVG with a bar for each step of a start, from left to right in time."""
    height = _TOP + _ROW * len(STEPS) + 34
    last = ends[STEPS[-1].end]
    scale = _PLOT / last
    told = "; ".join(f"{step.what}: until {ends[step.end]:.0f} ms" for step in STEPS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-labelledby="title desc">',
        '<title id="title">A start in time</title>',
        f'<desc id="desc">{told}.</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="26">A start in time: vxlan, etcd v3, -ip-masq, one peer</text>',
    ]
    bottom = _TOP + _ROW * len(STEPS)
    for tick in range(0, int(last) + 1, 20):
        across = _LEFT + tick * scale
        parts.append(f'<line x1="{across:.1f}" y1="{_TOP - 12}" x2="{across:.1f}" y2="{bottom}"/>')
        parts.append(
            f'<text class="note" x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">{tick}</text>'
        )
    parts.append(f'<text class="note" x="{_LEFT + _PLOT + 12}" y="{bottom + 18}">ms after exec</text>')
    begin = 0.0
    for row, step in enumerate(STEPS):
        end, up = ends[step.end], _TOP + _ROW * row
        left, width = _LEFT + begin * scale, max((end - begin) * scale, 2)
        parts.append(f'<rect class="step" x="{left:.1f}" y="{up}" width="{width:.1f}" height="16" rx="2"/>')
        parts.append(f'<text x="{_LEFT + _PLOT + 12}" y="{up + 12}">{end - begin:.0f} ms  {step.what}</text>')
        begin = end
    return "\n".join([*parts, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, unless told only to draw, and write the data and the picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.timeline", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured before")
    if not parser.parse_args(argv).draw:
        DATA.write_text(json.dumps(measure(), indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
