"""The thread of tables that would keep the kernel waiting."""

from __future__ import annotations

import threading

from flanneld.reconcile.worker import Knowledge, Worker
from flanneld.state.diff import Delta
from tests.unit.reconcile.simulated_table import SimulatedTable


def test_each_message_of_a_long_queue_is_a_sign_of_life() -> None:
    beats: list[float] = []
    worker = Worker(
        "slow", [SimulatedTable()], stop=threading.Event(), heartbeat=beats.append, converged=set()
    )
    for _ in range(3):
        worker.send(Delta(), Knowledge())
    worker.step(0.0)
    assert len(beats) == 2, "one after each but the last, whose end is the end of the step"
