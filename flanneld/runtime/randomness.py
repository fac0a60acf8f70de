"""Random numbers of the daemon. A simulator can replace their source by a seeded one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")

#: The kernel's generator: hosts cloned from one image must draw different numbers.
_source: random.Random = random.SystemRandom()


def fraction() -> float:
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
def replaced(source: random.Random) -> Iterator[None]:
    """Run the block with another source."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before
