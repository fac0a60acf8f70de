"""Time and chance: the daemon's clocks and random numbers. A simulator can replace both."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """The kernel's clocks, in seconds. Setting the time of day does not affect ``now``."""

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def suspended(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)

    def cpu_time(self) -> float:
        return time.thread_time()


_clock = Clock()


def now() -> float:
    """Return seconds since boot, including suspend: leases expire while a host sleeps."""
    return _clock.now()


def suspended() -> float:
    """Return the seconds since boot in which this host was suspended."""
    return _clock.suspended()


def wall() -> float:
    """Return seconds since the epoch, for people and for other programs."""
    return _clock.wall()


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for values that other hosts read."""
    return int(_clock.wall() * 1e9)


def boot_id() -> str:
    """Return the kernel's identity of this boot, at which ``now`` begins; empty if it cannot be read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def utc_text(seconds: float) -> str:
    """Return a time since the epoch in RFC 3339 format, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def go_text(seconds: float) -> str:
    """Return a time since the epoch as Go prints it, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S +0000 UTC", time.gmtime(seconds))


def go_duration(seconds: float) -> str:
    """Return a time span as Go prints it, such as 23h0m0s; in whole seconds, and 0s for a negative one."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


@contextmanager
def replaced(clock: Clock) -> Iterator[None]:
    """Run the block with another clock."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


def cpu_time() -> float:
    """Return the CPU time of this thread in seconds."""
    return _clock.cpu_time()


Item = TypeVar("Item")

#: The kernel's generator: hosts cloned from one image must draw different numbers.
_source: random.Random = random.SystemRandom()


def random_fraction() -> float:
    """Return a number in [0, 1)."""
    return _source.random()


def randrange(stop: int) -> int:
    """Return an integer from 0 to ``stop`` - 1."""
    return _source.randrange(stop)


def randint(lowest: int, highest: int) -> int:
    """Return an integer from ``lowest`` to ``highest``, both included."""
    return _source.randint(lowest, highest)


def random_bytes(count: int) -> bytes:
    """Return random bytes, for example for a MAC."""
    return _source.randbytes(count)


def choice(items: Sequence[Item]) -> Item:
    """Return one of the items."""
    return _source.choice(items)


def shuffle(items: list[Item]) -> None:
    """Put the items in random order."""
    _source.shuffle(items)


@contextmanager
def replaced_chance(source: random.Random) -> Iterator[None]:
    """Run the block with another source."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
