"""Simulated clusters on the command line, by ``python -m tests.unit.simulation``.

``search`` troubles clusters with new seeds, or with those given, and says how to repeat one that is not well.
``log STORE SEED`` tells the story of one. ``record FOLDER`` writes log and end state of clusters, and
``compare BEFORE AFTER`` says what differs between two such folders, line by line. The seeds decide
everything: where the code behaves as before, two folders are equal.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.report import REPEAT, TRIED
from tests.unit.simulation.cluster import STORES, Cluster, ours
from tests.unit.simulation.test_cluster import troubled

PROBLEM = "problem: "
#: Deeds and nodes of each cluster.
SIZE = {"deeds": 15, "nodes": 5}
#: Seeds that are chosen for a search are below this, so that they can be typed.
_MOST = 10**9
#: Lines shown of the differences of one cluster.
_SHOWN = 30


def record(folder: Path, seeds: int) -> None:
    """Write a file for each of ``seeds`` clusters of each store."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        for store in STORES:
            for seed in range(seeds):
                lines = story(store, seed, Path(scratch))
                (folder / f"{store}-{seed:03}.txt").write_text("".join(f"{line}\n" for line in lines))


def search(stores: Sequence[str], seeds: range, seconds: float, scratch: Path) -> int:
    """Trouble clusters of each store with each seed, for some CPU time. Return how many are not well."""
    end, tried, bad = time.process_time() + seconds, 0, 0
    for seed, store in ((seed, store) for seed in seeds for store in stores):
        if time.process_time() > end:
            break
        tried += 1
        try:
            problems = troubled(seed, store, scratch, **SIZE)[1].problems()
        except Exception as failure:  # of the product: its traceback is in the story
            problems = [repr(failure)]
        if problems:
            bad += 1
            print(f"{store} {seed}: {'; '.join(problems)}")
            print(f"{REPEAT}.venv/bin/python -m tests.unit.simulation log {store} {seed}", flush=True)
    print(f"{TRIED}{tried} simulated clusters, of {', '.join(stores)}, from seed {seeds.start}")
    return bad


def story(store: str, seed: int, scratch: Path) -> Iterator[str]:
    """Trouble a cluster. Return its log, then its end state."""
    world, cluster = troubled(seed, store, scratch, **SIZE)
    return chain(world.lines, end_state(cluster))


def end_state(cluster: Cluster) -> Iterator[str]:
    """Yield what the stores and the nodes hold, and what of it is wrong."""
    yield from (f"{PROBLEM}{each}" for each in cluster.problems())
    for etcd in cluster.etcds:
        yield from (f"etcd {etcd.api}: {key} {value}" for key, value in sorted(etcd.leases().items()))
    for name, node in sorted(cluster.kube.nodes.items()) if cluster.kube else ():
        yield f"kubernetes: {name} {json.dumps(node, sort_keys=True)}"
    for host in cluster.hosts.values():
        subnets = ", ".join(map(str, host.subnet_env))
        yield f"{host.name}: lease {host.process.lease if host.process else None}, subnet.env {subnets}"
        yield f"{host.name}: {plain(host.state)}"
        yield from sorted(f"{host.name}: {each}" for each in ours(host).values())


def plain(value: object) -> str:
    """Return a record as JSON, which names no class."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=str, order="sorted"))


def compare(before: Path, after: Path) -> int:
    """Print the differences. Return how many clusters differ; one that is in one folder only does."""
    names = sorted({path.name for folder in (before, after) for path in folder.glob("*.txt")})
    different = 0
    for name in names:
        old, new = (_lines(folder / name) for folder in (before, after))
        if old == new:
            continue
        different += 1
        difference = list(unified_diff(old, new, str(before / name), str(after / name), lineterm="", n=1))
        print("\n".join(difference[:_SHOWN]))
        if len(difference) > _SHOWN:
            print(f"... and {len(difference) - _SHOWN} more lines")
    print(f"{different} of {len(names)} clusters differ")
    return different


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unit.simulation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    log = commands.add_parser("log", help="print the story of one cluster")
    log.add_argument("store", choices=STORES)
    log.add_argument("seed", type=int)
    searching = commands.add_parser("search", help="look for clusters that are not well after troubles")
    searching.add_argument("--store", choices=STORES, action="append", help="(default: each)")
    searching.add_argument(
        "--first", type=int, default=random.SystemRandom().randrange(_MOST), help="first seed"
    )
    searching.add_argument("--seeds", type=int, default=_MOST, help="seeds at most, one after the other")
    searching.add_argument(
        "--seconds", type=float, default=math.inf, help="CPU time after which none is begun"
    )
    recording = commands.add_parser("record", help="write the stories of many clusters")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--seeds", type=int, default=40, help="clusters of each store (default: 40)")
    comparing = commands.add_parser("compare", help="compare two folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return 1 if compare(given.before, given.after) else 0
    if given.command == "record":
        record(given.folder, given.seeds)
        return 0
    with TemporaryDirectory() as scratch:
        if given.command == "search":
            seeds = range(given.first, given.first + given.seeds)
            return 1 if search(given.store or STORES, seeds, given.seconds, Path(scratch)) else 0
        lines = list(story(given.store, given.seed, Path(scratch)))
    print("\n".join(lines))
    return 1 if any(line.startswith(PROBLEM) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
