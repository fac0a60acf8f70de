"""Requests about our own node: read it, annotate it, set its condition, record events."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flanneld.compat import json as gojson
from flanneld.compat.glog import OneTimeWarnings, V
from flanneld.errors import Refused, Retryable
from flanneld.model import FAMILIES, LeaseAttrs
from flanneld.runtime import clock
from flanneld.runtime.randomness import random_bytes
from flanneld.subnet.kube.api import NODES, Api, Refusal
from flanneld.subnet.kube.nodes import Node, NodeReader, changed_notes, child, items, overwrite

log = logging.getLogger(__name__)

#: Namespace of events about nodes, as kubelet's: nodes themselves have none.
_EVENTS = "/api/v1/namespaces/default/events"
_LONGEST_MESSAGE = 1000


class OwnNode:
    """Our node, named by ``NODE_NAME`` or by our pod. Any call may raise ``Retryable`` or ``Cancelled``.

    Needs the rights of Go flanneld only: get pods, list nodes, patch nodes/status.
    """

    def __init__(self, api: Api, reader: NodeReader, environ: Mapping[str, str]) -> None:
        self._api = api
        self._reader = reader
        self._name = environ.get("NODE_NAME", "")
        self._pod = (environ.get("POD_NAMESPACE", ""), environ.get("POD_NAME", ""))
        self._once = OneTimeWarnings()
        self._told = ""
        self._may_tell = True

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

    def fetch(self) -> Node:
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

    def announce(self, node: Node, attrs: LeaseAttrs) -> bool:
        """Write the annotations that are missing or differ. Return True if there were any."""
        self._check_overwrites(node)
        changes = changed_notes(attrs, node)
        if changes:
            self._patch(self._reader.patch(changes))
        return bool(changes)

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
        if text == self._told or not self._may_tell or self._api.is_down:
            return
        self._told = text
        try:
            self._api.post(_EVENTS, _event(self.name(), text[:_LONGEST_MESSAGE]))
        except Retryable as reason:
            if isinstance(reason, Refusal):
                self._may_tell = reason.status not in (403, 404)
                # Not for a server that gave no answer: the caller must not be delayed again.
                if reason.is_passing:
                    self._told = ""
            log.log(V(1), "No event for %s: %s", self._name or "our node", reason)

    def _patch(self, body: str) -> None:
        self._api.patch(f"{NODES}/{self.name()}/status", body)

    def _check_overwrites(self, node: Node) -> None:
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
