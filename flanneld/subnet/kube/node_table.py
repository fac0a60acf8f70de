"""Table of the last seen nodes, which turns changes of nodes into lease events."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec import Struct

from flanneld.compat.glog import OneTimeWarnings
from flanneld.config import Config
from flanneld.errors import Refused
from flanneld.model import Added, Event, Lease, LeaseKey, Removed, Snapshot, name_of
from flanneld.runtime.complaints import BatchedWarnings
from flanneld.subnet.kube.nodes import Node, key_of, lease_of

log = logging.getLogger(__name__)


class _ManagedNode(Struct, frozen=True, gc=False):
    """A managed node, its subnet if known, and the last valid lease it announced."""

    node: Node
    key: LeaseKey | None
    lease: Lease | None


class NodeTable:
    """All managed nodes except ``own``, indexed by name and by subnet.

    A node's heartbeat costs one comparison and yields no event. If several nodes have the same podCIDR, the
    first by name gets it, so that all nodes of the cluster agree.
    """

    def __init__(self, own: str, own_key: LeaseKey, config: Config) -> None:
        self._own = own
        self._own_key = own_key
        self._config = config
        self._entries: dict[str, _ManagedNode] = {}
        self._holders: dict[LeaseKey, list[str]] = {}
        self._once = OneTimeWarnings()
        self._complaints = BatchedWarnings(
            log, "Ignoring an invalid node: {reason}", "Ignoring {count} invalid nodes", "{reason}"
        )

    def nodes(self) -> tuple[Node, ...]:
        # Copied at once, because another thread may call this.
        return tuple(entry.node for entry in list(self._entries.values()))

    def put(self, node: Node) -> list[Event]:
        """Record an added or modified node and return the lease events."""
        events = self._put(node)
        self.complain()
        return events

    def complain(self) -> None:
        """Log refused nodes, at most one line a minute. To be called periodically."""
        self._complaints.flush()

    def _put(self, node: Node) -> list[Event]:
        if node.name == self._own:
            return []
        if not node.is_managed:
            return self.drop(node.name)
        known = self._entries.get(node.name)
        if known is not None and known.node == node:
            return []
        entry = self._entries[node.name] = self._entry(node, known)
        return self._move(node.name, known, entry)

    def drop(self, name: str) -> list[Event]:
        """Remove a node that was deleted or is no longer managed, and return the lease events."""
        self._once.clear(name)
        self._complaints.clear(name)
        return self._move(name, self._entries.pop(name, None), None)

    def replace(self, nodes: Iterable[Node], own: Lease) -> Snapshot:
        """Replace all nodes with a complete list. ``own`` is our lease, which always stays ours."""
        there = {node.name: node for node in nodes}
        for name in [name for name in self._entries if name not in there]:
            self.drop(name)
        for node in there.values():
            self._put(node)
        self.complain()
        first = (self._entries[names[0]].lease for names in self._holders.values())
        silent = (entry.key for entry in self._entries.values() if entry.lease is None)
        return Snapshot((*filter(None, first), own), frozenset(filter(None, silent)))

    def _entry(self, node: Node, known: _ManagedNode | None) -> _ManagedNode:
        try:
            lease = lease_of(node, self._config)
        except Refused as reason:
            self._complaints.note(node.name, reason)
        else:
            self._once.clear(node.name)
            self._complaints.clear(node.name)
            return _ManagedNode(node, lease.key, lease)
        # A node recreated under the same name does not inherit the lease of its predecessor.
        if known is not None and known.lease and known.node.uid == node.uid:
            return _ManagedNode(node, known.key, known.lease)
        return _ManagedNode(node, self._key(node), None)

    def _key(self, node: Node) -> LeaseKey | None:
        try:
            key = key_of(node, self._config)
        except Refused:
            return None
        return key if any(key) else None

    def _move(self, name: str, before: _ManagedNode | None, after: _ManagedNode | None) -> list[Event]:
        """Move a node from its old subnet to its new one. Other nodes may claim either."""
        events: list[Event] = []
        if before and before.key and (after is None or after.key != before.key):
            events += self._leave(name, before.key)
        if after and after.lease and (before is None or after.lease != before.lease):
            events += self._enter(name, after.lease)
        return events

    def _leave(self, name: str, key: LeaseKey) -> list[Event]:
        holders = self._holders.get(key, [])
        had_it = holders[:1] == [name]
        if name in holders:
            holders.remove(name)
        if not holders:
            self._holders.pop(key, None)
            return [Removed(key)]
        heir = self._entries[holders[0]].lease
        return [Added(heir)] if had_it and heir else []

    def _enter(self, name: str, lease: Lease) -> list[Event]:
        if lease.key == self._own_key:
            self._once.warn(
                log, name, f"Ignoring node {name}: it has our own podCIDR {lease}; give each its own"
            )
        holders = self._holders.setdefault(lease.key, [])
        if name not in holders:
            holders.append(name)
            holders.sort()
        if len(holders) > 1:
            self._once.warn(
                log,
                lease.key,
                f"Nodes {', '.join(holders)} all have the podCIDR {name_of(lease.key)}: "
                f"{holders[0]} gets its packets; give each its own",
            )
        return [Added(lease)] if holders[0] == name else []
