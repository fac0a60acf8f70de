"""Threads within a task. The supervisor starts the tasks themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from flanneld.errors import Cancelled


def run_together(runs: Sequence[Callable[[], None]], cancel: Callable[[], None]) -> None:
    """Run all functions at once, the first in this thread.

    The first failure cancels the rest and is raised.
    """
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
