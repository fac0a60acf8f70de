"""The figures that are measured, and the goals some of them have."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.bench.cluster import MOST_PEERS


class Measure(StrEnum):
    """What can be asked for with ``--only``."""

    START = "start"
    BULK = "bulk"
    LATENCY = "latency"
    BURST = "burst"
    RSS = "rss"
    IDLE = "idle"
    AMONG = "among"
    RESTART = "restart"
    DRAIN = "drain"
    DOCTOR = "doctor"
    FLOW = "flow"


class Figure(StrEnum):
    """One number of one life of a daemon, in the unit its text says."""

    ENV = "exec to subnet.env, ms"
    READY = "exec to READY=1, ms"
    START_CPU = "CPU of a start, ms"
    BULK = "exec to all routes, s"
    BULK_CPU = "CPU until all routes, s"
    RSS = "RSS, MiB"
    PEAK = "peak RSS, MiB"
    IDLE = "CPU in 60 s idle, s"
    ADD = "add to kernel, p50 ms"
    ADD_P99 = "add to kernel, p99 ms"
    REMOVE = "remove to kernel, p50 ms"
    REMOVE_P99 = "remove to kernel, p99 ms"
    RESTART = "restart to READY=1, ms"
    LOST = "echoes lost over a restart"
    DRAIN = "all removed at once, s"
    DOCTOR = "doctor, s"
    DOCTOR_CPU = "CPU of doctor, s"
    PEERS = "flannelctl peers, s"
    CLUSTER = "doctor --cluster, s"
    BURST = "burst of leases to kernel, ms"
    BURST_GONE = "burst of removals to kernel, ms"
    BURST_CPU = "CPU of an event in a burst, ms"
    STOP = "SIGTERM to exit, ms"
    TCP = "TCP, Gbit/s"
    TCP_NODE_CPU = "CPU of the daemons, s/GB"
    TCP_CPU = "CPU of the machine, s/GB"
    PACKETS = "64-byte packets, 1000/s"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a figure is about: a node with so many peers; for traffic, two nodes with one peer each."""

    backend: str
    peers: int
    figure: Figure


@dataclass(frozen=True, slots=True)
class Samples:
    """One value for each round, of our daemon and of the one it is compared with, if any."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def ratio(self) -> float | None:
        """Our median to the peer's, None when there is nothing to divide by."""
        if not self.ours or not self.peer or not (base := statistics.median(self.peer)):
            return None
        return statistics.median(self.ours) / base


@dataclass(frozen=True, slots=True)
class Goal:
    """At most or at least ``limit``: a ratio to the peer's median or, if absolute, in the figure's unit."""

    limit: float
    absolute: bool = False
    at_least: bool = False

    def __str__(self) -> str:
        bound = f"{'>=' if self.at_least else '<='} {self.limit:g}"
        return bound if self.absolute else f"ratio {bound}"

    def verdict(self, samples: Samples) -> str:
        """``met``, ``missed``, or ``""`` when there is nothing to judge."""
        reached = statistics.median(samples.ours) if self.absolute and samples.ours else None
        reached = reached if self.absolute else samples.ratio()
        if reached is None:
            return ""
        return "met" if (reached >= self.limit if self.at_least else reached <= self.limit) else "missed"


GOALS = {
    Subject("vxlan", 0, Figure.ENV): Goal(2.0),
    Subject("vxlan", 0, Figure.ADD_P99): Goal(1.2),
    Subject("vxlan", 0, Figure.BURST): Goal(1.0),
    Subject("vxlan", 0, Figure.BURST_GONE): Goal(1.0),
    Subject("vxlan", 15_000, Figure.RSS): Goal(1.3),
    Subject("vxlan in Kubernetes", 0, Figure.BURST_CPU): Goal(1.0),
    Subject("vxlan in Kubernetes", 15_000, Figure.BULK): Goal(4, absolute=True),
    Subject("vxlan in Kubernetes", 15_000, Figure.PEAK): Goal(120, absolute=True),
    Subject("vxlan in Kubernetes", 15_000, Figure.IDLE): Goal(2.4, absolute=True),  # 4 % of a core
    Subject("vxlan on etcd v3", MOST_PEERS, Figure.BULK): Goal(8, absolute=True),
    Subject("vxlan on etcd v3", MOST_PEERS, Figure.RSS): Goal(150, absolute=True),
    Subject("vxlan on etcd v3", MOST_PEERS, Figure.LOST): Goal(0, absolute=True),
    Subject("vxlan on etcd v3", 15_000, Figure.DRAIN): Goal(0.15),
    Subject("vxlan", 5_000, Figure.BULK): Goal(0.35),
    Subject("vxlan", 15_000, Figure.BULK): Goal(0.15),
    Subject("host-gw", 5_000, Figure.BULK): Goal(0.06),
    Subject("host-gw", 15_000, Figure.BULK): Goal(0.03),
    Subject("host-gw", 15_000, Figure.IDLE): Goal(0.1),
    Subject("vxlan", 5_000, Figure.RSS): Goal(1.2),
    Subject("vxlan in Kubernetes", 5_000, Figure.BULK): Goal(2.5, absolute=True),
    Subject("vxlan in Kubernetes", 5_000, Figure.PEAK): Goal(90, absolute=True),
    Subject("vxlan in Kubernetes", 5_000, Figure.IDLE): Goal(1.2, absolute=True),  # 2 % of a core
    # Next to Go flanneld v0.28, which speaks v3 and asks twice for each peer.
    Subject("vxlan on etcd v3", 0, Figure.ENV): Goal(0.9),
    Subject("vxlan on etcd v3", 0, Figure.ADD): Goal(1.0),
    Subject("vxlan on etcd v3", 0, Figure.REMOVE): Goal(1.2),
    Subject("vxlan on etcd v3", 0, Figure.BURST): Goal(1.0),
    Subject("vxlan on etcd v3", 0, Figure.BURST_GONE): Goal(1.0),
    Subject("vxlan on etcd v3", 5_000, Figure.RSS): Goal(1.1),
    **{
        Subject(bed, peers, Figure.BULK): Goal(limit)
        for bed in ("vxlan on etcd v3", "vxlan, both families")
        for peers, limit in ((5_000, 0.08), (15_000, 0.05))
    },
    **{
        Subject(bed, peers, figure): Goal(seconds, absolute=True)
        for bed in ("vxlan", "vxlan on etcd v3")
        for peers, figure, seconds in (
            (5_000, Figure.DOCTOR, 1),
            (1_000, Figure.CLUSTER, 5),
            (MOST_PEERS, Figure.DOCTOR, 3),
            (MOST_PEERS, Figure.PEERS, 3),
        )
    },
    # The daemon carries no packet, so a tunnel is as fast as one that was made by hand.
    Subject("wireguard, peer by hand", 1, Figure.TCP): Goal(0.97, at_least=True),
    Subject("ipsec, peer by hand", 1, Figure.TCP): Goal(0.97, at_least=True),
    Subject("udp", 1, Figure.TCP): Goal(10, at_least=True),
    Subject("udp", 1, Figure.TCP_NODE_CPU): Goal(0.12),
    Subject("udp", 1, Figure.PACKETS): Goal(3, at_least=True),
    Subject("udp/python", 1, Figure.TCP): Goal(1.2, at_least=True),
    **{
        Subject(backend, 0, figure): goal
        for backend in ("vxlan", "host-gw")
        for figure, goal in {
            Figure.READY: Goal(250, absolute=True),
            Figure.RSS: Goal(36, absolute=True),
            Figure.ADD: Goal(1.1),
            Figure.REMOVE: Goal(1.1),
        }.items()
    },
}


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many percent of all do not exceed."""
    return sorted(values)[max(-(-len(values) * percent // 100), 1) - 1]
