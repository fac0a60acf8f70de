"""ICMP probes to peers, over the same path as containers' packets: of single peers, and of the path MTU.

``-follow-path-mtu`` lowers the network's MTU to what paths to peers carry. It measures inside the tunnel. A
path that takes the tunnel's packets apart still carries them, and lowers nothing. The device changes in
place: containers that were made before get the kernel's ICMP errors, or have their packets taken apart by
this host.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from flanneld.errors import cause_of
from flanneld.model import FAMILIES, Family, IPAddress, Lease, LeaseKey
from flanneld.network.survey import SMALLEST, echoes, glance_at_mtu, path_mtus
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.counters import Histogram
from flanneld.runtime import clock, waits
from flanneld.runtime.clock import choice, shuffle
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
        controller: Controller,
        *,
        stop: threading.Event,
        heartbeat: Callable[[float], None],
    ) -> None:
        self._pause = 60.0 / per_minute
        self._own = own
        self._controller = controller
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
            if not waits.pause(self._stop, self._pause):
                self._probe_one()

    def _probe_one(self) -> None:
        view = self._controller.peers.view()
        self.last = {key: probe for key, probe in self.last.items() if key in view.desired}
        # A refused peer, or one with another backend, is not reachable.
        peers = [lease for lease in view.leases if lease.key not in view.reasons]
        if not peers:
            return
        peer = choice(peers)
        for target in targets(peer, answering(self._own, self._controller.peers.local_resources())):
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


#: Name of the task's thread.
MTU_TASK = "path MTU"
#: Paths that a round measures.
_FEW = 8
#: Seconds between two rounds, and until a path that seems to carry less is measured again.
_PAUSE, _AGAIN = 30.0, 5.0
#: MTU in bytes below which one of several peers does not lower ours, as it may be broken, or filter. Paths of
#: the Internet carry this (IPv6's least).
_BY_ONE = SMALLEST[6]
#: Seconds without an answer after which a node is no other peer: longer than a reboot takes.
_DEAD = 600.0

#: Returns for each target a size that its path carries, at most the wanted one, or None without an answer.
Measure = Callable[[Sequence[tuple[IPAddress, int]]], Sequence[int | None]]


def agreed(
    before: Mapping[IPAddress, int], now: Mapping[IPAddress, int], *, alone: bool
) -> tuple[IPAddress, int] | None:
    """Return the end of the path that carries least, and the MTU for it; None without one (pure).

    Only paths with two equal sizes count: a busy node or a lossy path makes a size look too large once, and
    hardly twice in the same way. Below ``_BY_ONE`` two peers must agree, unless there is no other one.
    """
    same = sorted((target for target, size in now.items() if before.get(target) == size), key=now.__getitem__)
    if not same:
        return None
    least = 0 if alone else min([_BY_ONE, *(now[each] for each in same[1:2])])
    return same[0], max(now[same[0]], least)


class PathMtuFollower:
    """Follower that measures a few random paths at a time. ``step`` is called by a loop."""

    def __init__(
        self,
        own: Lease,
        controller: Controller,
        glance: Measure = glance_at_mtu,
        measure: Measure = path_mtus,
    ) -> None:
        self._own = own
        self._controller = controller
        self._glance = glance
        self._measure = measure
        #: Never below: every path carries this in one piece.
        self._least = max(SMALLEST[net.version] for net in own.key if net is not None)
        #: Sizes that the paths carry which seem to carry less than the MTU.
        self._short: Mapping[IPAddress, int] = {}
        #: Time of each node's last answer, and before that of the first look at its lease.
        self._answered: dict[LeaseKey, float] = {}
        self._once = Once()

    def step(self, now: float) -> float:
        """Measure, and lower the MTU after two equal results. Return the time of the next round."""
        uplinks = self._controller.uplink_manager
        before, mtu = self._short, uplinks.mtu
        try:
            self._short = self._look(mtu, now)
        except OSError as failure:
            self._once.warn(log, "socket", f"Cannot measure paths to peers: {cause_of(failure)}")
            return clock.now() + _PAUSE
        alive = sum(now - at < _DEAD for at in self._answered.values())
        found = agreed(before, self._short, alone=alive == 1)
        if found is not None:
            target, lower = found[0], max(found[1], self._least)
            self._short = {}  # also if the MTU is as low as it may be: other paths get their turn
            if lower < mtu == uplinks.mtu:  # else the uplink has moved meanwhile
                log.warning(
                    "Lowered the MTU to %d, from %d: the path to %s carries no more; recreate containers, as"
                    " they keep theirs; to raise it, start flanneld once without -follow-path-mtu",
                    *(lower, mtu, target),
                )
                self._controller.lower_mtu(lower)
        return clock.now() + (_AGAIN if self._short else _PAUSE)

    def _look(self, mtu: int, now: float) -> dict[IPAddress, int]:
        """Return what the paths carry that carry less than the MTU. Raises ``OSError``.

        A measurement sends many packets. A peer that limits ICMP answers some of them, and all at a glance.
        """
        targets = self._targets(now)
        shuffle(others := list(targets))
        found = list(dict.fromkeys([*(self._short.keys() & targets), *others[:_FEW]]))
        for measure in (self._glance, self._measure):
            sizes = measure([(target, mtu) for target in found]) if found else ()
            answered = (target for target, size in zip(found, sizes, strict=True) if size)
            self._answered |= dict.fromkeys(map(targets.__getitem__, answered), now)
            short = {target: size for target, size in zip(found, sizes, strict=True) if size and size < mtu}
            found = list(short)
        # Of many packets at once, a queue on the way may lose some that it carries alone.
        above = self._glance([(target, size + 1) for target, size in short.items()]) if short else ()
        confirmed = zip(short.items(), above, strict=True)
        return {target: size for (target, size), seen in confirmed if seen and seen <= size}

    def _targets(self, now: float) -> dict[IPAddress, LeaseKey]:
        """Return the addresses of all peers' ends of the tunnel."""
        peers = self._controller.peers
        at_base, view = answering(self._own, peers.local_resources()), peers.view()
        self._answered = {lease.key: self._answered.get(lease.key, now) for lease in view.leases}
        return {
            net.network_address: lease.key
            for lease in view.leases
            if lease.key not in view.reasons
            for net in lease.key
            if net is not None and net.version in at_base
        }
