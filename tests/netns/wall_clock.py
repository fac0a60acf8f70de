"""A wall clock that jumps for one daemon while it runs, or a host that was suspended. Other clocks go on.

``faketime`` will not do: its version in Debian 12 breaks sleeping until a point on the monotonic clock.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class WallClock:
    """Right at first. ``directory`` must be one from which code may be run."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "ahead"
        self._library = directory / "wall_clock.so"
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([*compiler, "-o", self._library, SOURCE, "-ldl"], check=True)
        self.put(0)

    @property
    def environment(self) -> dict[str, str]:
        """For whoever goes by this clock."""
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK": str(self._file)}

    def put(self, seconds: int, slept: int = 0) -> None:
        """Let it be so far ahead of the right time from now on, and the host have slept so long."""
        self._file.touch()
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("=qq", seconds, slept))
