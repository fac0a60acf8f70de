"""What is to be done about our own node while the daemon runs."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from flanneld.compat.glog import Once
from flanneld.config import Config
from flanneld.errors import Cancelled, Retryable
from flanneld.model import Added, Event, Lease, LeaseAttrs, Removed, name_of
from flanneld.runtime import clock
from flanneld.runtime.backoff import Backoff
from flanneld.runtime.step_loop import StepLoop
from flanneld.subnet.kube.nodes import Node, changed_notes, own_key
from flanneld.subnet.kube.own import OwnNode
from flanneld.subnet.kube.watch import backoffs
from flanneld.subnet.manager import Deliver

log = logging.getLogger(__name__)

#: Seconds between two looks at what is to be done.
_TICK = 10.0


class Upkeep:
    """Looks at our node whenever it changes. ``post`` may be called from any thread, and so may ``cut``.

    ``lease`` is what our node should say now, ``save`` is called from time to time with our node.
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
        self._once = Once()
        self._node: Node | None = None
        self._backoffs = backoffs(lambda: Backoff(first=2.0, longest=60.0))
        #: Whether the network is there, and which node, by its uid, already says so.
        self._is_available = False
        self._marked: str | None = None
        self._mark_at = 0.0

    def post(self, node: Node) -> None:
        """Our node is like this now."""
        self._news.append(node)
        self._wake()

    def mark_available(self) -> None:
        """Have the node's condition say that the network is there, now and whenever the node is made anew."""
        self._is_available = True
        self._wake()

    def cut(self) -> None:
        """End ``run`` at once."""
        self._stop.set()
        self._wake()

    def run(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Deliver what happens to our lease until ``cut`` (raises ``Cancelled``)."""
        loop = StepLoop(partial(self.step, deliver), stop=self._stop, heartbeat=lambda _within: alive())
        self._wake = loop.cancel
        loop.run()
        raise Cancelled

    def step(self, deliver: Deliver, now: float) -> float:
        """Deliver what has become of our node, and do what is due; return when to step again."""
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
        # What we do not say of ourselves is as foreign as what somebody else says.
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
