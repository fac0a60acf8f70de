"""Reader of a stream in a thread of its own, for libraries without a timeout per item."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class _Failed(Struct, frozen=True):
    error: BaseException


class Reader(Generic[T]):
    """Thread that reads ``items`` until that raises. Closing the underlying connection ends it."""

    def __init__(self, name: str, items: Iterable[T]) -> None:
        self._read: SimpleQueue[T | _Failed] = SimpleQueue()
        threading.Thread(target=self._run, args=(items,), name=name, daemon=True).start()

    def next(self, timeout: float) -> T | None:
        """Return the next item, or None after ``timeout`` seconds. Raises what reading raised."""
        try:
            item = self._read.get(timeout=timeout)
        except Empty:
            return None
        if isinstance(item, _Failed):
            raise item.error
        return item

    def _run(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                self._read.put(item)
        except BaseException as error:
            self._read.put(_Failed(error))
        else:
            self._read.put(_Failed(EOFError()))
