"""What a process and its children cost, read from outside: CPU time and memory (proc(5))."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_CHILDREN_TIME = slice(13, 15)  # cutime and cstime, counted behind the command's name
#: Fields of the first line of /proc/stat in which a CPU does nothing: idle and iowait.
_IDLE = slice(4, 6)
_GUEST = 9  # from here on the fields are counted in earlier ones already


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its living descendants and those they have reaped.

    What a process used itself is exact (clock_getcpuclockid(3)); reaped children count in ticks of 10 ms.
    """
    seconds = 0.0
    for each in _tree(pid):
        with suppress(OSError):  # ended meanwhile
            seconds += own_time(each) + _reaped_time(each)
    return seconds


def cpu_seconds_of_children() -> float:
    """CPU time of this process's own children that have ended and been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rss_mib(pid: int) -> tuple[float, float]:
    """Resident memory of a process and its descendants in MiB: now, and each one's peak."""
    now = peak = 0
    for each in _tree(pid):
        with suppress(OSError):  # ended meanwhile
            fields = _status(each)
            now += fields.get("VmRSS", 0)
            peak += fields.get("VmHWM", 0)
    return now / 1024, peak / 1024


class MachineLoad:
    """How busy all CPUs are in total since this was made."""

    def __init__(self) -> None:
        self._idle, self._total = self._read()

    def busy(self) -> float:
        """0 when nothing ran, 1 when no CPU ever idled."""
        idle, total = self._read()
        return 1 - (idle - self._idle) / max(total - self._total, 1)

    @staticmethod
    def _read() -> tuple[int, int]:
        with Path("/proc/stat").open() as file:
            fields = file.readline().split()
        return sum(map(int, fields[_IDLE])), sum(map(int, fields[1:_GUEST]))


def own_time(pid: int) -> float:
    """CPU seconds of all threads of one process, exactly. Raises ``OSError`` if there is no such process."""
    # The kernel's encoding of "CPU clock of that process, by the scheduler's account".
    return time.clock_gettime((~pid << 3) | 2)


def _reaped_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[_CHILDREN_TIME])) * _TICK


def _tree(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with suppress(OSError):  # ended meanwhile
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in lines)
        if name.startswith("Vm")
    }
