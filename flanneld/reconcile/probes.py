"""ICMP probes to peers, over the same path as containers' packets."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator

from msgspec import Struct

from flanneld.model import FAMILIES, Family, IPAddress, Lease, LeaseKey
from flanneld.network.survey import echoes
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counters import Histogram
from flanneld.runtime import clock, randomness
from flanneld.runtime.logs import Once
from flanneld.state.resources import Address

log = logging.getLogger(__name__)

#: Seconds until a peer counts as silent.
WITHIN = 2.0
#: Number of probes that the loss ratio covers.
_WINDOW = 100
#: Seconds allowed for a heartbeat in addition to the pause between two probes.
_SLACK = 60.0


class Probe(Struct, frozen=True, gc=False):
    """Result of a probe: ``time`` in seconds since the epoch, ``rtt`` in seconds, None without an answer."""

    target: IPAddress
    time: float
    rtt: float | None


class Prober:
    """Prober of one random peer at a time. Written by its own thread, read by any."""

    def __init__(
        self,
        per_minute: int,
        own: Lease,
        reconciler: Controller,
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
    ) -> None:
        self._pause = 60.0 / per_minute
        self._own = own
        self._reconciler = reconciler
        self._stop = stop
        self._heartbeat = heartbeat
        self._once = Once()
        self._lost: deque[bool] = deque(maxlen=_WINDOW)
        self.rtt = Histogram()
        #: The last probe of each probed peer.
        self.last: dict[LeaseKey, Probe] = {}

    @property
    def loss(self) -> float | None:
        """Ratio of recent probes without an answer; None before the first."""
        lost = self._lost.copy()
        return sum(lost) / len(lost) if lost else None

    def run(self) -> None:
        while not self._stop.is_set():
            self._heartbeat(self._pause + _SLACK)
            if not clock.pause(self._stop, self._pause):
                self._probe_one()

    def _probe_one(self) -> None:
        view = self._reconciler.peers.view()
        self.last = {key: probe for key, probe in self.last.items() if key in view.desired}
        # A refused peer, or one with another backend, is not reachable.
        peers = [lease for lease in view.leases if lease.key not in view.reasons]
        if not peers:
            return
        peer = randomness.choice(peers)
        for target in targets(peer, answering(self._own, self._reconciler.peers.local_resources())):
            self._probe(peer, target)

    def _probe(self, peer: Lease, target: IPAddress) -> None:
        try:
            rtt = echoes([target], WITHIN, 1, lambda: not self._stop.is_set())[target].rtt
        except OSError as failure:
            self._once.warn(log, "socket", f"Cannot probe peers: {failure.strerror}; CAP_NET_RAW is needed")
            return
        if self._stop.is_set():
            return
        self._lost.append(rtt is None)
        if rtt is not None:
            self.rtt.observe(rtt)
        self.last[peer.key] = Probe(target, clock.wall(), rtt)


def answering(own: Lease, local: Collection[object]) -> frozenset[Family]:
    """Return the families in which nodes have their subnet's first address, as we do (pure)."""
    ours = {each.address for each in local if isinstance(each, Address)}
    return frozenset(
        family for family in FAMILIES if (net := own.net(family)) is not None and net.network_address in ours
    )


def targets(peer: Lease, at_base: Collection[Family]) -> Iterator[IPAddress]:
    """Yield one address per family: the peer's tunnel address, else its public IP (pure)."""
    for family in FAMILIES:
        net, public = peer.net(family), peer.attrs.public(family)
        if net is not None and at_base:
            yield from [net.network_address] if family in at_base else []
        elif net is not None and public is not None:
            yield public
