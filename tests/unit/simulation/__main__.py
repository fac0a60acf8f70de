"""Print the log of one troubled cluster: ``python -m tests.unit.simulation STORE SEED DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.simulation.test_cluster import troubled

if __name__ == "__main__":
    store, seed, directory = sys.argv[1:]
    world, _ = troubled(int(seed), store, Path(directory), deeds=15, nodes=5)
    print("\n".join(world.lines))
