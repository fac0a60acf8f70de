"""Simulated clusters on the command line, by ``python -m tests.unit.simulation``.

``record FOLDER`` writes log and end state of each store's clusters. ``compare BEFORE AFTER`` says what
differs between two such folders, line by line. The seeds decide everything: where the code behaves as
before, two folders are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from difflib import unified_diff
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.unit.simulation.cluster import STORES, Cluster, ours
from tests.unit.simulation.test_cluster import troubled

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


def story(store: str, seed: int, scratch: Path) -> Iterator[str]:
    """Trouble a cluster. Return its log, then its end state."""
    world, cluster = troubled(seed, store, scratch, deeds=15, nodes=5)
    return chain(world.lines, end_state(cluster))


def end_state(cluster: Cluster) -> Iterator[str]:
    """Yield what the stores and the nodes hold, and what of it is wrong."""
    yield from (f"problem: {each}" for each in cluster.problems())
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
        print("\n".join(story(given.store, given.seed, Path(scratch))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
