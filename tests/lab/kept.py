"""Networks that several tests use, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
N = TypeVar("N")


#: Networks of other kinds cost CPU time for as long as they stand. Tests of one kind follow each other.
MOST = 2


class Kept(Generic[K, N]):
    """The networks of the last kinds, as long as tests leave them healthy: building one takes seconds.

    ``build`` makes one, and gives to the stack what has to be closed with it.
    """

    def __init__(self, build: Callable[[K, ExitStack], N]) -> None:
        self._build = build
        self._kept: dict[K, tuple[N, ExitStack]] = {}

    @contextmanager
    def get(self, kind: K) -> Iterator[N]:
        """Lend the network of a kind. It is built anew for the next test if this one fails."""
        if kind not in self._kept:
            while len(self._kept) >= MOST:
                self._kept.pop(next(iter(self._kept)))[1].close()
            with ExitStack() as stack:
                self._kept[kind] = self._build(kind, stack), stack.pop_all()
        # The one that was lent last comes last.
        network, closing = self._kept[kind] = self._kept.pop(kind)
        try:
            yield network
        except BaseException:
            self._kept.pop(kind)
            closing.close()
            raise

    def close(self) -> None:
        for _, closing in self._kept.values():
            closing.close()
