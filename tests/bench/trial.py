"""One life of a daemon on a fresh node, from its start to its end, and what was measured in it."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tests.bench import rtnl
from tests.bench.bed import Bed
from tests.bench.cluster import Leases, Peer, open_leases
from tests.bench.figures import Figure, Measure, percentile
from tests.bench.process import cpu_seconds, rss_mib
from tests.bench.rtnl import KernelState, Notifications
from tests.lab import Node

Figures = dict[Figure, float]

START_DEADLINE = 60.0
#: An implementation that never says READY=1 is not waited for any longer once subnet.env is there.
READY_PATIENCE = 1.0
BULK_DEADLINE = 900.0
EVENT_DEADLINE = 5.0
STOP_DEADLINE = 20.0
#: What a daemon may still have to tidy up after a start before its memory and its idling are measured.
SETTLE = 3.0
#: Looking at the kernel must cost little: pauses of 10 ms, or so many times as long as a look took.
LEAST_PAUSE = 0.01
PAUSES_PER_LOOK = 5
WARM_UP = 5
SPACING = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """How long the long measurements last."""

    idle_seconds: float = 60
    events: int = 200


def live(bed: Bed, command: Sequence[str], wanted: Collection[Measure], settings: Settings) -> Figures:
    """Start, measure and stop a daemon. Raises ``AssertionError`` if it ends or misses something."""
    with bed.node() as node:
        figures = _bulk(bed, node, command) if bed.peers else _start(node, command)
        if Measure.RSS in wanted or Measure.IDLE in wanted:
            time.sleep(SETTLE)
        if Measure.RSS in wanted:
            figures[Figure.RSS], figures[Figure.PEAK] = rss_mib(node.pid)
        if Measure.IDLE in wanted:
            figures[Figure.IDLE] = _idle(node, settings.idle_seconds)
        if Measure.LATENCY in wanted:
            figures |= _latency(bed, node, settings.events)
        assert node.running, f"the daemon ended; its log:\n{node.log()}"
        figures[Figure.STOP] = node.stop(STOP_DEADLINE).seconds * 1000
    return figures


def _start(node: Node, command: Sequence[str]) -> Figures:
    """Start with the service manager's socket open."""
    path = node.directory / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        begin = time.monotonic()
        node.start(command=command, environment={"NOTIFY_SOCKET": str(path)})
        figures = {Figure.ENV: _wait_for_subnet_file(node, begin, receiver)}
    return figures


def _bulk(bed: Bed, node: Node, command: Sequence[str]) -> Figures:
    return {}


def _idle(node: Node, seconds: float) -> float:
    """CPU seconds in 60 s, scaled from ``seconds`` of doing nothing."""
    before = cpu_seconds(node.pid)
    time.sleep(seconds)
    return (cpu_seconds(node.pid) - before) * 60 / seconds
