"""The nodes as last seen, and what a change of one means for the leases (pure)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from flanneld.config import Config
from flanneld.errors import Refused
from flanneld.glog import Once
from flanneld.model import Added, Event, Lease, LeaseKey, Removed, Snapshot, name_of
from flanneld.subnet.kube_nodes import Node, key_of, lease_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A managed node; ``lease`` is what it last said that made sense."""

    node: Node
    lease: Lease | None


class NodeTable:
    """All managed nodes but our own, which ``own`` leaves out by its name.

    A heartbeat changes nothing that matters, and costs one comparison. Where several nodes have one
    podCIDR the first by name has it, on every node of the cluster alike.
    """

    def __init__(self, own: str, config: Config) -> None:
        self._own = own
        self._config = config
        self._entries: dict[str, _Entry] = {}
        self._holders: dict[LeaseKey, list[str]] = {}
        self._once = Once()

    def nodes(self) -> tuple[Node, ...]:
        # A copy in one step: another thread may ask.
        return tuple(entry.node for entry in list(self._entries.values()))

    def put(self, node: Node) -> list[Event]:
        """A node is there as given now."""
        if node.name == self._own:
            return []
        if not node.is_managed:
            return self.drop(node.name)
        known = self._entries.get(node.name)
        if known is not None and known.node == node:
            return []
        before = known.lease if known else None
        # A node made anew under an old name owes nothing to the old one.
        same = known is not None and known.node.uid == node.uid
        lease = self._lease(node) or (before if same else None)
        self._entries[node.name] = _Entry(node, lease)
        return self._move(node.name, before, lease)

    def drop(self, name: str) -> list[Event]:
        """A node is gone, or not ours to look after any more."""
        known = self._entries.pop(name, None)
        self._once.clear(name)
        return self._move(name, known.lease, None) if known else []

    def replace(self, nodes: Iterable[Node], own: Lease) -> Snapshot:
        """These are all nodes there are. ``own`` is our lease, which nobody can take from us here."""
        there = {node.name: node for node in nodes}
        for name in [name for name in self._entries if name not in there]:
            self.drop(name)
        for node in there.values():
            self.put(node)
        leases = [
            entry.lease for key in self._holders if (entry := self._entries[self._holders[key][0]]).lease
        ]
        return Snapshot((*leases, own), frozenset(self._unreadable()))

    def _move(self, name: str, before: Lease | None, after: Lease | None) -> list[Event]:
        """A node leaves its old subnet and takes its new one; each of them may have other claimants."""
        events: list[Event] = []
        if before and (after is None or after.key != before.key):
            events += self._leave(name, before.key)
        if after and after != before:
            events += self._enter(name, after)
        return events

    def _leave(self, name: str, key: LeaseKey) -> list[Event]:
        holders = self._holders[key]
        had_it = holders[0] == name
        holders.remove(name)
        if not holders:
            del self._holders[key]
            return [Removed(key)]
        heir = self._entries[holders[0]].lease
        return [Added(heir)] if had_it and heir else []

    def _enter(self, name: str, lease: Lease) -> list[Event]:
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

    def _lease(self, node: Node) -> Lease | None:
        try:
            lease = lease_of(node, self._config)
        except Refused as reason:
            self._once.warn(log, node.name, f"Ignoring what a node says: {reason}")
            return None
        self._once.clear(node.name)
        return lease

    def _unreadable(self) -> Iterable[LeaseKey]:
        """The subnets of nodes of which nothing that makes sense is known."""
        for entry in self._entries.values():
            if entry.lease is not None:
                continue
            try:
                key = key_of(entry.node, self._config)
            except Refused:
                continue
            if any(key):
                yield key
