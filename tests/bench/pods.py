"""Measure a pod's ADD by both ways of docs/containers.md: ``python -m tests.bench.pods``.

A runtime makes a pod by flannel's plug-in, which needs an interpreter, and one by the configuration that the
daemon keeps, in turns. The medians are those of docs/performance.md: ``--page`` puts them into its data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

from tests.bench import page
from tests.bench.process import MachineLoad, cpu_seconds_of_children
from tests.lab import Lab
from tests.lab.forks import exact
from tests.lab.lab import NETWORK
from tests.netns.cni_runtime import Runtime, documented, kept_conf, kept_conf_flags

#: The section of the page.
SECTION = "A pod's ADD"
PLUGIN, KEPT = WAYS = ("flannel's plug-in", "the daemon's file")
#: Milliseconds from the network namespace to the last plug-in's answer, and of CPU for all of it.
Sample = tuple[float, float]


def measure(rounds: int) -> dict[str, list[Sample]]:
    """Make and delete ``rounds`` pods of each way by turns, after one that does not count."""
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    with Lab() as lab, exact():
        lab.etcd.put_config({"Network": NETWORK, "Backend": {"Type": "vxlan"}})
        (node,) = lab.add_nodes(1)
        node.start("-ip-masq", *kept_conf_flags(node))
        node.wait_ready()
        runtime, confs = Runtime(node), {PLUGIN: documented(), KEPT: kept_conf(node)}
        for number in range(rounds + 1):
            for way in WAYS:
                runtime.use(confs[way])
                begin, cpu = time.perf_counter(), cpu_seconds_of_children()
                runtime.add(number)
                samples[way].append(
                    (1000 * (time.perf_counter() - begin), 1000 * (cpu_seconds_of_children() - cpu))
                )
                runtime.delete(number)
    return {way: found[1:] for way, found in samples.items()}


def table(samples: dict[str, list[Sample]], run: str) -> page.Table:
    """Return the page's table with the medians of ``samples``; ``run`` says where they are from."""
    rows = []
    for index, what in enumerate(
        ("from the network namespace to the last plug-in's answer, ms", "CPU for that, ms")
    ):
        old, new = (statistics.median(each[index] for each in samples[way]) for way in WAYS)
        rows.append([what, f"{old:.0f}", f"{new:.0f}", f"{new / old:.2f}"])
    return {"section": SECTION, "from": run, "columns": ["", *WAYS, "Ratio"], "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pods", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="pods of each way; default 50")
    parser.add_argument("--page", action="store_true", help="write the table into docs/performance.json")
    chosen = parser.parse_args(argv)
    load = MachineLoad()
    samples = measure(chosen.rounds)
    busy = f"{os.cpu_count()} CPUs, {load.busy():.0%} busy with this and all else"
    run = f"{time.strftime('%Y-%m-%d')}, {busy}: tests.bench.pods --rounds {chosen.rounds}"
    found = table(samples, run)
    for row in page.cells(found):
        print(" | ".join(row))
    if chosen.page:
        others = [each for each in page.load() if each["section"] != SECTION]
        page.DATA.write_text(page.written([*others, found]))


if __name__ == "__main__":
    main()
