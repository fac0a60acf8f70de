"""Follower of the path MTU (``-follow-path-mtu``): lowers the network's MTU to what paths to peers carry.

It measures inside the tunnel, as containers' packets travel. A path that takes the tunnel's packets apart
still carries them, and lowers nothing. The device changes in place: containers that were made before get the
kernel's ICMP errors, or have their packets taken apart by this host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from flanneld.errors import cause_of
from flanneld.model import FAMILIES, IPAddress, Lease
from flanneld.network.survey import SMALLEST, glance_at_mtu, path_mtus
from flanneld.reconcile.controller import Controller
from flanneld.reconcile.probes import answering
from flanneld.runtime import clock, randomness
from flanneld.runtime.logs import Once

log = logging.getLogger(__name__)

#: Name of the task's thread.
NAME = "path MTU"
#: Paths that a round measures.
_FEW = 8
#: Seconds between two rounds, and until a path that seems to carry less is measured again.
_PAUSE, _AGAIN = 30.0, 5.0

#: Returns for each target a size that its path carries, at most the wanted one, or None without an answer.
Measure = Callable[[Sequence[tuple[IPAddress, int]]], Sequence[int | None]]


def agreed(before: Mapping[IPAddress, int], now: Mapping[IPAddress, int]) -> IPAddress | None:
    """Return the end of the path that carries least, of those with two equal sizes; None without (pure).

    A busy node or a lossy path makes a size look too large once, and hardly twice in the same way.
    """
    same = [target for target, size in now.items() if before.get(target) == size]
    return min(same, key=now.__getitem__, default=None)


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
        self._once = Once()

    def step(self, _now: float) -> float:
        """Measure, and lower the MTU after two equal results. Return the time of the next round."""
        uplinks = self._controller.uplink_manager
        before, mtu = self._short, uplinks.mtu
        try:
            self._short = self._look(mtu)
        except OSError as failure:
            self._once.warn(log, "socket", f"Cannot measure paths to peers: {cause_of(failure)}")
            return clock.now() + _PAUSE
        target = agreed(before, self._short)
        if target is not None:
            lower = max(self._short[target], self._least)
            self._short = {}  # also if the MTU is as low as it may be: other paths get their turn
            if lower < mtu == uplinks.mtu:  # else the uplink has moved meanwhile
                log.warning(
                    "Lowered the MTU to %d, from %d: the path to %s carries no more; recreate containers, as"
                    " they keep theirs; to raise it, start flanneld once without -follow-path-mtu",
                    *(lower, mtu, target),
                )
                self._controller.lower_mtu(lower)
        return clock.now() + (_AGAIN if self._short else _PAUSE)

    def _look(self, mtu: int) -> dict[IPAddress, int]:
        """Return what the paths carry that carry less than the MTU. Raises ``OSError``.

        A measurement sends many packets. A peer that limits ICMP answers some of them, and all at a glance.
        """
        found = list(self._short) or self._some_targets()
        for measure in (self._glance, self._measure):
            sizes = measure([(target, mtu) for target in found]) if found else ()
            short = {target: size for target, size in zip(found, sizes, strict=True) if size and size < mtu}
            found = list(short)
        # Of many packets at once, a queue on the way may lose some that it carries alone.
        above = self._glance([(target, size + 1) for target, size in short.items()]) if short else ()
        confirmed = zip(short.items(), above, strict=True)
        return {target: size for (target, size), seen in confirmed if seen and seen <= size}

    def _some_targets(self) -> list[IPAddress]:
        """Return addresses of some peers' ends of the tunnel."""
        peers = self._controller.peers
        at_base, view = answering(self._own, peers.local_resources()), peers.view()
        followed = [lease for lease in view.leases if lease.key not in view.reasons]
        nets = [net for lease in followed for family in FAMILIES if (net := lease.net(family)) is not None]
        found = [net.network_address for net in nets if net.version in at_base]
        randomness.shuffle(found)
        return found[:_FEW]
