"""Our own node: requests about it, and its upkeep (annotations, NetworkUnavailable condition, saved copy)."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from flanneld.compat import json as gojson
from flanneld.compat.glog import V
from flanneld.config import Config
from flanneld.errors import Cancelled, Refused, Retryable
from flanneld.model import FAMILIES, Added, Event, Lease, LeaseAttrs, Removed, name_of
from flanneld.runtime import clock
from flanneld.runtime.clock import random_bytes
from flanneld.runtime.logs import Once
from flanneld.runtime.supervisor import StepLoop
from flanneld.runtime.waits import Backoff
from flanneld.subnet.kube.api import NODES, Api, ApiRefusal
from flanneld.subnet.kube.nodes import (
    ENDPOINTS,
    KubeNode,
    NodeReader,
    changed_notes,
    child,
    items,
    overwrite,
    own_key,
)
from flanneld.subnet.kube.watch import backoffs
from flanneld.subnet.store import Deliver

log = logging.getLogger(__name__)

#: Namespace of events about nodes, as kubelet's: nodes themselves have none.
_EVENTS = "/api/v1/namespaces/default/events"
_LONGEST_MESSAGE = 1000
#: Seconds after which the right to record events is tried again.
_TRY_AGAIN = 600.0


class OwnNode:
    """Our node, named by ``NODE_NAME`` or by our pod. Any call may raise ``Retryable`` or ``Cancelled``.

    Needs the rights of Go flanneld only: get pods, list nodes, patch nodes/status.
    """

    def __init__(self, api: Api, reader: NodeReader, environ: Mapping[str, str]) -> None:
        self._api = api
        self._reader = reader
        self._name = environ.get("NODE_NAME", "")
        self._pod = (environ.get("POD_NAMESPACE", ""), environ.get("POD_NAME", ""))
        self._once = Once()
        self._told = ""
        self._tell_from = -math.inf

    def name(self) -> str:
        """Return the node's name, read from our pod if ``NODE_NAME`` is not set."""
        if not self._name:
            namespace, pod = self._pod
            found = self._api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
            name = child(found, "spec").get("nodeName")
            if not isinstance(name, str) or not name:
                raise Retryable(f"pod {namespace}/{pod} has no node yet", "wait: it is tried again")
            self._name = name
        return self._name

    def fetch(self) -> KubeNode:
        """Return our node. Uses a list request: Go flanneld 0.12 has no right to get a single node."""
        name = self.name()
        for item in items(self._api.get(NODES, fieldSelector=f"metadata.name={name}")):
            try:
                node = self._reader.read(item)
            except Refused as reason:
                raise Retryable(reason.problem, reason.remedy) from None
            if node.name == name:
                self._check_overwrites(node)
                return node
        raise Retryable(
            f"node {name} is not there yet", "see that kubelet registers it, and that NODE_NAME is right"
        )

    def announce(self, node: KubeNode, attrs: LeaseAttrs) -> bool:
        """Write the annotations that are missing or differ. Return True if there were any."""
        self._check_overwrites(node)
        changes = changed_notes(attrs, node)
        if changes:
            self._patch(self._reader.patch(changes))
        return bool(changes)

    def publish_endpoints(self, name: str, text: str) -> None:
        """Write the annotation with our endpoints."""
        self._patch(self._reader.patch({ENDPOINTS: f"{name} {text}"}))

    def mark_available(self) -> None:
        """Set the node's NetworkUnavailable condition to False, as Go flanneld does at each start."""
        now = clock.utc_text(clock.wall())
        condition = {
            "type": "NetworkUnavailable",
            "status": "False",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
            "reason": "FlannelIsUp",
            "message": "Flannel is running on this node",
        }
        self._patch(gojson.compact({"status": {"conditions": [condition]}}))

    def record_event(self, text: str) -> None:
        """Record a warning event of the node, once per text.

        Ignored without the right or without an API server.
        """
        if text == self._told or clock.now() < self._tell_from or self._api.is_down:
            return
        self._told = text
        try:
            self._api.post(_EVENTS, _event(self.name(), text[:_LONGEST_MESSAGE]))
        except Retryable as reason:
            if isinstance(reason, ApiRefusal):
                if reason.status in (403, 404):
                    self._tell_from = clock.now() + _TRY_AGAIN
                # Not for a server that gave no answer: the caller must not be delayed again.
                if reason.is_passing:
                    self._told = ""
            log.log(V(1), "No event for %s: %s", self._name or "our node", reason)

    def _patch(self, body: str) -> None:
        self._api.patch(f"{NODES}/{self.name()}/status", body)

    def _check_overwrites(self, node: KubeNode) -> None:
        for family in FAMILIES:
            try:
                overwrite(node, family)
            except Refused as reason:
                self._once.warn(log, family, f"Announcing our own address: {reason.problem}; correct it")
            else:
                self._once.clear(family)


def _event(node: str, text: str) -> dict[str, Any]:
    """Return an event that ``kubectl describe node`` shows: like kubelet's, it has the name for a uid."""
    now = clock.utc_text(clock.wall())
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{node}.{random_bytes(8).hex()}", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "reason": "FlannelTrouble",
        "message": text,
        "type": "Warning",
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "flanneld", "host": node},
        "reportingComponent": "flanneld",
        "reportingInstance": node,
    }


#: Seconds between periodic checks, and between two writes of the cache.
_TICK, _SAVE_PAUSE = 10.0, 2.0


class NodeUpkeep:
    """Handler of changes to our node. ``post`` and ``cancel`` may be called from any thread.

    ``lease`` returns the lease our node should announce. ``save`` stores our node and the others.
    """

    def __init__(
        self, own_node: OwnNode, config: Config, lease: Callable[[], Lease], save: Callable[[KubeNode], None]
    ) -> None:
        self._own_node = own_node
        self._config = config
        self._lease = lease
        self._save = save
        self._news: deque[KubeNode] = deque()
        self.wake: Callable[[], None] = lambda: None
        self._stop = threading.Event()
        self._once = Once()
        self._node: KubeNode | None = None
        self._backoffs = backoffs(lambda: Backoff(first=2.0, longest=60.0))
        #: True once the network works, and the uid of the node whose condition was set.
        self._is_available = False
        self._marked: str | None = None
        self._mark_at = 0.0
        self._save_at = -math.inf

    def post(self, node: KubeNode) -> None:
        """Queue the new state of our node."""
        self._news.append(node)
        self.wake()

    def mark_available(self) -> None:
        """Set the node's NetworkUnavailable condition to False now and whenever the node is recreated."""
        self._is_available = True
        self.wake()

    def cancel(self) -> None:
        """End ``run`` at once."""
        self._stop.set()
        self.wake()

    def run(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Deliver the events of our lease until ``cancel``. Raises ``Cancelled`` then."""
        loop = StepLoop(partial(self.step, deliver), stop=self._stop, heartbeat=lambda _within: alive())
        self.wake = loop.cancel
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
        if now < self._save_at:
            return self._save_at
        if self._node is not None:
            self._save(self._node)
            self._save_at = now + _SAVE_PAUSE
        return now + _TICK

    def _judge(self, node: KubeNode) -> list[Event]:
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
