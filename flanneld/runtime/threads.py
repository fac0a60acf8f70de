"""Threads for work that belongs to a task: the supervisor starts the tasks themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from flanneld.errors import Cancelled

Item = TypeVar("Item")


def start(name: str, run: Callable[[], None]) -> None:
    """Run something in a thread that does not keep the process from exiting."""
    threading.Thread(target=run, name=name, daemon=True).start()


def run_together(runs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
    """Run all at once, the first one in this thread. The first failure cancels the rest, and is raised."""
    failures: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as failure:
            failures.append(failure)
            cancel()

    first, *others = runs
    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in others]
    for thread in threads:
        thread.start()
    run(first)
    for thread in threads:
        thread.join()
    raise next((each for each in failures if not isinstance(each, Cancelled)), Cancelled())


class Mailbox(Generic[Item]):
    """Queue from one thread to another one, which waits for a limited time."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()

    def put(self, item: Item) -> None:
        """Hand an item over. From any thread."""
        self._items.put(item)

    def get(self, timeout: float) -> Item | None:
        """Return the next item; None if there is none in time."""
        try:
            return self._items.get(timeout=timeout)
        except Empty:
            return None
