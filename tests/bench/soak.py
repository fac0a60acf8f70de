"""Let leases flap for a long time: ``python -m tests.bench.soak``.

Each peer goes and comes back, at a steady rate or as fast as etcd takes it. The output has the time from an
event to the kernel, by the daemon's own histogram, and the resident memory after ten rounds and each part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.bed import make_bed
from tests.bench.cluster import Leases, Peer, open_leases
from tests.bench.process import rss_mib
from tests.bench.trial import SETTLE
from tests.lab import Node, own_command, wait_for

HEALTH_PORT = 8080
#: Rounds until the heap and the daemon's rings of past events have their size.
_WARM_UP = 10
#: Parts of the time, to tell two reasons apart: what is kept of each event makes the daemon larger in all of
#: them, a backlog in one.
_PARTS = 5
_BUCKET = 'flannel_event_to_kernel_seconds_bucket{le="'


@dataclass(frozen=True, slots=True)
class Soaked:
    """Events after the warm-up, resident MiB before them and after each part, share of events by duration."""

    events: int
    sizes: tuple[float, ...]
    within: dict[float, float]


def soak(seconds: float, peers: int, rate: float) -> Soaked:
    """Flap the leases of ``peers`` at ``rate`` events a second, without a limit if it is 0."""
    with make_bed("vxlan", peers) as bed, bed.node() as node, open_leases(bed.etcd, "vxlan") as leases:
        node.start(f"-healthz-port={HEALTH_PORT}", "-healthz-ip=127.0.0.1", command=own_command())
        node.wait_for_log(f"In sync with {peers} peers")
        _flap(leases, peers, 0, rounds=_WARM_UP)
        _settle(node, peers)
        counted, sizes, events = _buckets(node), [rss_mib(node.pid)[0]], 0
        for _ in range(_PARTS):
            end = time.monotonic() + seconds / _PARTS
            while time.monotonic() < end:
                events += _flap(leases, peers, rate, rounds=1)
            _settle(node, peers)
            sizes.append(rss_mib(node.pid)[0])
        after = _buckets(node)
        total = max(after.values()) - max(counted.values())
        within = {bound: (after[bound] - counted[bound]) / total for bound in after}
        return Soaked(events, tuple(sizes), within)


def _flap(leases: Leases, peers: int, rate: float, *, rounds: int) -> int:
    """Remove and add each lease once a round. Return the number of events."""
    begin, events = time.monotonic(), 0
    for peer in [*map(Peer, range(peers))] * rounds:
        for request in (leases.removal(peer), leases.addition(peer)):
            if rate:
                time.sleep(max(0.0, begin + events / rate - time.monotonic()))
            leases.send(request)
            leases.finish()
            events += 1
    return events


def _settle(node: Node, peers: int) -> None:
    """Wait until the kernel has the routes to all peers, then for a reading of the tables."""
    shown = ("ip", "-j", "route", "show", "dev", "flannel.1")
    wait_for(lambda: len(node.namespace.json(*shown)) == peers, 60, "the routes to all peers")
    time.sleep(SETTLE)


def _buckets(node: Node) -> dict[float, float]:
    """Return the number of batches of events by the upper bound of their time to the kernel, in seconds."""
    page = node.run("curl", "-sf", f"http://127.0.0.1:{HEALTH_PORT}/metrics").stdout
    rows = [row.removeprefix(_BUCKET).split('"} ') for row in page.splitlines() if row.startswith(_BUCKET)]
    return {float(bound): float(count) for bound, count in rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Soak as the arguments say, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--peers", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=200, help="events a second; 0: no limit")
    chosen = parser.parse_args(argv)
    found = soak(chosen.seconds, chosen.peers, chosen.rate)
    before, *later = (f"{size:.2f}" for size in found.sizes)
    print(f"{found.events} events; resident memory {before} MiB, then {', '.join(later)} MiB")
    for bound, share in found.within.items():
        print(f"within {1000 * bound:g} ms: {share:.2%}")


if __name__ == "__main__":
    main()
