"""Networks that several tests use, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
N = TypeVar("N")


class Kept(Generic[K, N]):
    """One network of each kind, as long as tests leave it healthy: building one takes seconds.

    ``build`` makes one, and gives to the stack what has to be closed with it.
    """

    def __init__(self, build: Callable[[K, ExitStack], N]) -> None:
        self._build = build
        self._kept: dict[K, tuple[N, ExitStack]] = {}

    @contextmanager
    def get(self, kind: K) -> Iterator[N]:
        """Lend the network of a kind. It is built anew for the next test if this one fails."""
        if kind not in self._kept:
            with ExitStack() as stack:
                self._kept[kind] = self._build(kind, stack), stack.pop_all()
        network, closing = self._kept[kind]
        try:
            yield network
        except BaseException:
            self._kept.pop(kind)
            closing.close()
            raise

    def close(self) -> None:
        for _, closing in self._kept.values():
            closing.close()
