"""One life of a daemon on a fresh node, from its start to its end, and what was measured in it."""

from __future__ import annotations

import os
import select
import signal
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tests.bench.bed import Bed
from tests.bench.cluster import OF_NODES, Peer, V3Leases
from tests.bench.crowd import answering
from tests.bench.figures import Figure, Measure, percentile
from tests.bench.process import cpu_seconds, cpu_seconds_of_children, rss_mib
from tests.bench.rtnl import ADDED, REMOVED, KernelState, Notifications, objects
from tests.lab import EtcdError, Node
from tests.netns.test_seeing import flannelctl

Figures = dict[Figure, float]

# Seconds after which something is broken and not slow.
START_DEADLINE = 60.0
BULK_DEADLINE = 900.0
EVENT_DEADLINE = 5.0
BURST_DEADLINE = 60.0
STOP_DEADLINE = 20.0

#: A daemon that never says READY=1 is not waited for any longer once its subnet.env is there.
READY_PATIENCE = 1.0
#: What a daemon may still have to tidy up after a start before its memory and its idling are measured.
SETTLE = 3.0
#: A daemon that is told to stop in its first moments may never do so, as v0.12.0 in Go.
BEFORE_STOP = 0.5
#: Looking at the kernel must cost little: pauses of 10 ms, or of so many times what a look took.
LEAST_PAUSE = 0.01
PAUSES_PER_LOOK = 3

#: Each command of flannelctl is run so often in one life.
RUNS = 3
#: The kernel takes 1,024 neighbours on a link, and all peers are on one (net.ipv4.neigh.default.gc_thresh3).
MOST_NEIGHBOURS = 1000
COMMANDS = {Figure.PEERS: ("peers",), Figure.DOCTOR: ("doctor",), Figure.CLUSTER: ("doctor", "--cluster")}

#: Events that come before those that count, and the pause between two.
WARM_UP = 10
SPACING = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """How long the long measurements last."""

    idle_seconds: float = 60
    events: int = 200
    burst: int = 200
    flow_seconds: float = 3


def live(bed: Bed, command: Sequence[str], wanted: Collection[Measure], settings: Settings) -> Figures:
    """Start, measure and stop a daemon. Raises ``AssertionError`` if it ends or misses something."""
    with bed.node() as node:
        figures = _bulk(bed, node, command) if bed.peers else _start(bed, node, command)
        if Measure.RSS in wanted or Measure.IDLE in wanted:
            time.sleep(SETTLE)
        if Measure.RSS in wanted:
            figures[Figure.RSS], figures[Figure.PEAK] = rss_mib(node.pid)
        if Measure.IDLE in wanted:
            figures[Figure.IDLE] = _idle(node, settings.idle_seconds)
        if Measure.DOCTOR in wanted:
            figures |= _commands(bed, node)
        if not {Measure.LATENCY, Measure.AMONG}.isdisjoint(wanted):
            figures |= _latency(bed, node, settings.events)
        if Measure.BURST in wanted:
            figures |= _burst(bed, node, settings.burst)
        if Measure.RESTART in wanted:
            figures |= _restart(bed, node, command)
        if Measure.DRAIN in wanted:
            figures[Figure.DRAIN] = _drain(bed, node)
        time.sleep(BEFORE_STOP)
        _check(node)
        figures[Figure.STOP] = _stop(node)
        if Measure.DRAIN in wanted:
            _put_back(bed)
    return figures


def _start(bed: Bed, node: Node, command: Sequence[str]) -> Figures:
    """Start and wait until the service manager is told READY=1, too."""
    begin = time.monotonic()
    bed.start(node, command)
    figures = _wait_for_start(node, begin, ready=True)
    figures[Figure.START_CPU] = cpu_seconds(node.pid) * 1000
    return figures


def _bulk(bed: Bed, node: Node, command: Sequence[str]) -> Figures:
    """Start and wait until the kernel holds everything that leads to all the peers."""
    with KernelState(node.namespace, bed.backend, bed.peers, dual=bed.dual) as kernel:
        begin = time.monotonic()
        bed.start(node, command)
        figures = _wait_for_start(node, begin, ready=False)
        figures[Figure.BULK] = _wait_for_peers(node, kernel) - begin
    figures[Figure.BULK_CPU] = cpu_seconds(node.pid)
    return figures


def _wait_for_start(node: Node, begin: float, *, ready: bool) -> Figures:
    """When subnet.env appeared and, if asked for, when READY=1 came; in ms."""
    figures: Figures = {}
    while Figure.ENV not in figures or (ready and Figure.READY not in figures):
        time.sleep(0.001)
        elapsed = (time.monotonic() - begin) * 1000
        if ready and node.service_manager.ready():
            figures.setdefault(Figure.READY, elapsed)
        if node.subnet_file.exists():
            figures.setdefault(Figure.ENV, elapsed)
        if elapsed > figures.get(Figure.ENV, elapsed) + READY_PATIENCE * 1000:
            break
        _check(node)
        assert elapsed < START_DEADLINE * 1000, f"no subnet.env; the daemon's log:\n{node.log()}"
    return figures


def _wait_for_peers(node: Node, kernel: KernelState) -> float:
    """The moment at which the first look began that found nothing missing."""
    end = time.monotonic() + BULK_DEADLINE
    while True:
        look = time.monotonic()
        missing = kernel.missing()
        if not missing:
            return look
        _check(node)
        assert look < end, f"{missing} are missing after {BULK_DEADLINE:g} s; the log:\n{node.log()[-2000:]}"
        time.sleep(max(LEAST_PAUSE, PAUSES_PER_LOOK * (time.monotonic() - look)))


def _idle(node: Node, seconds: float) -> float:
    """CPU seconds in 60 s, scaled from doing nothing for ``seconds``."""
    before = cpu_seconds(node.pid)
    time.sleep(seconds)
    return (cpu_seconds(node.pid) - before) * 60 / seconds


def _latency(bed: Bed, node: Node, events: int) -> Figures:
    """Peers come and go one by one; from just before the request to etcd until the kernel's word."""
    first = bed.peers + OF_NODES
    some = [Peer(first + number) for number in range(WARM_UP + events)]
    with bed.writer() as leases, Notifications(node.namespace) as kernel:

        def time_all(request_for: Callable[[Peer], bytes], kinds: tuple[int, int]) -> list[float]:
            times = []
            for peer in some:
                request, expected = request_for(peer), objects(peer, bed.backend)
                begin = time.monotonic()
                leases.send(request)
                times.append((kernel.wait(kinds, expected, EVENT_DEADLINE) - begin) * 1000)
                leases.finish()
                time.sleep(SPACING)
            return times[WARM_UP:]

        try:
            added = time_all(leases.addition, ADDED)
            removed = time_all(leases.removal, REMOVED)
        except AssertionError:
            # An event that a daemon has missed must not spoil the lives after this one.
            for peer in some:
                with suppress(EtcdError):
                    leases.send(leases.removal(peer))
                    leases.finish()
            raise
    return {
        Figure.ADD: percentile(added, 50),
        Figure.ADD_P99: percentile(added, 99),
        Figure.REMOVE: percentile(removed, 50),
        Figure.REMOVE_P99: percentile(removed, 99),
    }


def _commands(bed: Bed, node: Node) -> Figures:
    """Seconds that the commands take, whose answers need all peers; their nodes answer ICMP echoes."""
    with answering(bed.lab, node):
        runs = {
            figure: [_command(node, words) for _ in range(RUNS)]
            for figure, words in COMMANDS.items()
            if figure is not Figure.CLUSTER or bed.peers <= MOST_NEIGHBOURS
        }
    figures = {figure: statistics.median(wall for wall, _ in times) for figure, times in runs.items()}
    return figures | {Figure.DOCTOR_CPU: statistics.median(cpu for _, cpu in runs[Figure.DOCTOR])}


def _command(node: Node, words: Sequence[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of one command of flannelctl."""
    begin, before = time.monotonic(), cpu_seconds_of_children()
    done = flannelctl(node, *words)
    wall, cpu = time.monotonic() - begin, cpu_seconds_of_children() - before
    assert done.returncode == 0, f"flannelctl {' '.join(words)}: {done.stderr}{done.stdout[-2000:]}"
    return wall, cpu


def _burst(bed: Bed, node: Node, number: int) -> Figures:
    """Peers come, then go, one by one as fast as etcd takes them; until the kernel's last word."""
    peers = [Peer(bed.peers + each) for each in range(number)]
    everything = {each for peer in peers for each in objects(peer, bed.backend)}
    with bed.writer() as leases, Notifications(node.namespace) as kernel:

        def time_all(request_for: Callable[[Peer], bytes], kinds: tuple[int, int]) -> float:
            begin = time.monotonic()
            for peer in peers:
                leases.send(request_for(peer))
                leases.finish()
            return (kernel.wait(kinds, everything, BURST_DEADLINE) - begin) * 1000

        before = cpu_seconds(node.pid)
        added = time_all(leases.addition, ADDED)
        removed = time_all(leases.removal, REMOVED)
        spent = cpu_seconds(node.pid) - before
    return {
        Figure.BURST: added,
        Figure.BURST_GONE: removed,
        Figure.BURST_CPU: spent / (2 * number) * 1000,
    }


def _restart(bed: Bed, node: Node, command: Sequence[str]) -> Figures:
    """Start again over what the first life left, while two nodes' containers ping each other."""
    with bed.node() as other:
        with KernelState(other.namespace, bed.backend, bed.peers, dual=bed.dual) as kernel:
            bed.start(other, command)
            other.wait_ready(START_DEADLINE)
            _wait_for_peers(other, kernel)
        node.wait_for_route(other.subnet())
        with (
            node.container().ping(other.container()) as there,
            other.container().ping(node.container()) as back,
        ):
            for ping in (there, back):
                ping.wait_for_replies()
            _stop(node)
            begin = time.monotonic()
            bed.start(node, command)
            while not node.service_manager.ready():
                time.sleep(0.001)
                _check(node)
                assert time.monotonic() < begin + START_DEADLINE, f"not ready; the log:\n{node.log()[-2000:]}"
            ready = (time.monotonic() - begin) * 1000
            time.sleep(SETTLE)
            for ping in (there, back):
                ping.wait_for_replies()
            lost = there.lost() + back.lost()
        other.daemon.end(signal.SIGKILL, STOP_DEADLINE)
    return {Figure.RESTART: ready, Figure.LOST: lost}


def _drain(bed: Bed, node: Node) -> float:
    """Seconds from one transaction that removes all peers until the kernel has dropped the last of them."""
    everything = {each for number in range(bed.peers) for each in objects(Peer(number), bed.backend)}
    with bed.writer() as leases, Notifications(node.namespace) as kernel:
        assert isinstance(leases, V3Leases), "v2 of etcd has no such transaction"
        request = leases.removal_of_all(bed.peers)
        begin = time.monotonic()
        leases.send(request)
        seconds = kernel.wait(REMOVED, everything, BULK_DEADLINE) - begin
        leases.finish()
    return seconds


def _put_back(bed: Bed) -> None:
    """Write the leases that ``_drain`` has removed, for the next life."""
    with bed.writer() as leases:
        assert isinstance(leases, V3Leases)
        leases.put_back(bed.peers)


def _stop(node: Node) -> float:
    """Milliseconds from SIGTERM to the end, exactly: ``Popen.wait`` looks at intervals of up to 50 ms."""
    process = os.pidfd_open(node.pid)
    try:
        begin = time.monotonic()
        signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [], STOP_DEADLINE)
        return (time.monotonic() - begin) * 1000
    finally:
        os.close(process)
        node.daemon.wait(1)


def _check(node: Node) -> None:
    assert node.running, f"the daemon ended with {node.daemon.status()}; its log:\n{node.log()[-2000:]}"
