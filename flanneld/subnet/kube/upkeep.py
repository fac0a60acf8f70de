"""Upkeep of our own node: its annotations, its NetworkUnavailable condition, its saved copy."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from flanneld.compat.glog import OneTimeWarnings
from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, name_of
from flanneld.runtime import clock
from flanneld.runtime.loop import StepLoop
from flanneld.runtime.waits import Backoff
from flanneld.subnet.kube.nodes import Node, changed_notes, own_key
from flanneld.subnet.kube.own_node import OwnNode
from flanneld.subnet.kube.watch import backoffs
from flanneld.subnet.manager import Deliver

log = logging.getLogger(__name__)

#: Seconds between periodic checks.
_TICK = 10.0


class Upkeep:
    """Handler of changes to our node. ``post`` and ``cancel`` may be called from any thread.

    ``lease`` returns the lease our node should announce. ``save`` stores our node and is called at each step.
    """

    def __init__(
        self, own_node: OwnNode, config: Config, lease: Callable[[], Lease], save: Callable[[Node], None]
    ) -> None:
        self._own_node = own_node
        self._config = config
        self._lease = lease
        self._save = save
        self._news: deque[Node] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._once = OneTimeWarnings()
        self._node: Node | None = None
        self._backoffs = backoffs(lambda: Backoff(first=2.0, longest=60.0))
        #: True once the network works, and the uid of the node whose condition was set.
        self._is_available = False
        self._marked: str | None = None
        self._mark_at = 0.0

    def post(self, node: Node) -> None:
        """Queue the new state of our node."""
        self._news.append(node)
        self._wake()

    def mark_available(self) -> None:
        """Set the node's NetworkUnavailable condition to False now and whenever the node is recreated."""
        self._is_available = True
        self._wake()

    def cancel(self) -> None:
        """End ``run`` at once."""
        self._stop.set()
        self._wake()

    def run(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Deliver the events of our lease until ``cancel``. Raises ``Cancelled`` then."""
        loop = StepLoop(partial(self.step, deliver), stop=self._stop, heartbeat=lambda _within: alive())
        self._wake = loop.cancel
        loop.run()
        raise Cancelled

    def step(self, deliver: Deliver, now: float) -> float:
        """Deliver queued events, set the condition if due, and return the time of the next step."""
        while self._news:
            self._node = node = self._news.popleft()
            events = self._judge(node)
            if events:
                deliver(events)
        self._mark(now)
        if self._node is not None:
            self._save(self._node)
        return now + _TICK

    def _judge(self, node: Node) -> list[Event]:
        lease = self._lease()
        try:
            key = own_key(node, self._config)
        except Retryable as reason:
            self._once.warn(log, "own", f"Keeping the subnet {lease}: {reason}")
            return []
        if key != lease.key:
            log.error("The podCIDR of our node %s is %s now; it was %s", node.name, name_of(key), lease)
            return [Removed(lease.key)]
        self._once.clear("own")
        # Annotations that we lack count as overwritten by someone else.
        return [Added(replace(lease, attrs=LeaseAttrs()) if changed_notes(lease.attrs, node) else lease)]

    def _mark(self, now: float) -> None:
        node = self._node
        if not self._is_available or node is None or node.uid == self._marked or now < self._mark_at:
            return
        try:
            self._own_node.mark_available()
        except Retryable as reason:
            self._once.warn(
                log, "mark", f"Cannot clear the condition NetworkUnavailable of our node: {reason}"
            )
            self._mark_at = clock.now() + max(reason.retry_after, self._backoffs.pause(type(reason)))
            return
        self._marked = node.uid
        self._backoffs.reset()
        if self._once.clear("mark"):
            log.info("Cleared the condition NetworkUnavailable of our node")
