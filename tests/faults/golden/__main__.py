"""Record the golden hosts anew, as root: ``python -m tests.faults.golden [HOST ...]``."""

from __future__ import annotations

import sys

from tests.faults.golden.hosts import HOSTS, kept_worlds
from tests.faults.golden.test_golden import FILES, wait_until_settled


def record(names: list[str]) -> None:
    worlds = kept_worlds()
    try:
        for name in names:
            folder = FILES / name
            with HOSTS[name](worlds) as pages:
                folder.mkdir(parents=True, exist_ok=True)
                for file in folder.iterdir():
                    file.unlink()
                for file_name, read in pages.items():
                    (folder / file_name).write_text(wait_until_settled(read))
            print(f"recorded {name}")
    finally:
        worlds.close()


if __name__ == "__main__":
    record(sys.argv[1:] or list(HOSTS))
