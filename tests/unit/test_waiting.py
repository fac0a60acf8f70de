"""A start that has to wait for its store."""

from __future__ import annotations

import threading

from flanneld.errors import Retryable
from flanneld.notify import Notifier
from flanneld.readiness import Readiness


class Stop(threading.Event):
    """Lets nobody wait, and remembers for how long they wanted to."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return self.is_set()


def test_the_store_is_asked_ever_more_rarely_and_not_by_all_nodes_at_once() -> None:
    stop = Stop()
    left = iter(range(40))

    def attempt() -> str:
        if next(left, None) is None:
            return "the config"
        raise Retryable("etcd does not answer", "wait")

    assert Readiness(stop, Notifier()).ask("the network config", attempt) == "the config"
    assert len(stop.pauses) == 40
    assert 0.4 <= stop.pauses[0] <= 0.8
    assert all(2.5 <= pause <= 5.0 for pause in stop.pauses[-20:])
    assert len(set(stop.pauses)) == 40
