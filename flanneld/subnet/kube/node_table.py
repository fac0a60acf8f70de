"""Table of the last seen nodes, which turns their changes into lease events, and its cache on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flanneld.config import Config
from flanneld.errors import Refused
from flanneld.model import Added, Event, Lease, LeaseKey, Removed, Snapshot, name_of
from flanneld.runtime import clock, files
from flanneld.runtime.logs import BatchedWarnings, Once
from flanneld.subnet.kube.nodes import KubeNode, key_of, lease_of

log = logging.getLogger(__name__)


class _ManagedNode(Struct, frozen=True, gc=False):
    """A managed node, its subnet if known, and the last valid lease it announced."""

    node: KubeNode
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
        self._once = Once()
        self._complaints = BatchedWarnings(
            log, "Ignoring an invalid node: {reason}", "Ignoring {count} invalid nodes", "{reason}"
        )

    def nodes(self) -> tuple[KubeNode, ...]:
        # Copied at once, because another thread may call this.
        return tuple(entry.node for entry in list(self._entries.values()))

    def put(self, node: KubeNode) -> list[Event]:
        """Record an added or modified node and return the lease events."""
        events = self._put(node)
        self.complain()
        return events

    def complain(self) -> None:
        """Log refused nodes, at most one line a minute. To be called periodically."""
        self._complaints.flush()

    def _put(self, node: KubeNode) -> list[Event]:
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

    def replace(self, nodes: Iterable[KubeNode], own: Lease) -> Snapshot:
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

    def _entry(self, node: KubeNode, known: _ManagedNode | None) -> _ManagedNode:
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

    def _key(self, node: KubeNode) -> LeaseKey | None:
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


NAME = "kube-nodes.json"
_VERSION = 1
#: Bytes of the file, at most. A node takes a few hundred, so this is beyond any cluster.
_MAX_SIZE = 64 << 20


class Saved(Struct, frozen=True, gc=False):
    """Our own node and the other managed nodes, as last known."""

    own: KubeNode
    peers: tuple[KubeNode, ...]


class _Version(Struct, frozen=True):
    version: Any


class _Content(Struct, frozen=True):
    """Contents of the file; ``own`` is the name of our node."""

    version: int
    own: str
    nodes: tuple[KubeNode, ...]


class NodeCache:
    """Node cache in ``directory``, disabled if that does not exist. Used by one thread at a time.

    ``own`` is our node's name, or empty if only the API server knows it.
    """

    def __init__(self, directory: str, own: str = "") -> None:
        self.path = Path(directory or "/nonexistent") / NAME
        self._own = own
        self._last: Saved | None = None
        self._saved_at = 0.0
        self._once = Once()

    @property
    def description(self) -> str:
        """Description of the loaded nodes and their age, for status and log."""
        return f"the nodes saved in {self.path} at {clock.utc_text(self._saved_at)}"

    def save(self, saved: Saved) -> None:
        """Write the nodes unless they are unchanged. Never raises: a failure is logged once."""
        if saved == self._last or not self.path.parent.is_dir():
            return
        try:
            files.replace(self.path, _text(saved).encode(), 0o600)
        except OSError as error:
            self._once.warn(log, "save", f"Cannot save the nodes in {self.path}: {error.strerror}")
            return
        self._once.clear("save")
        self._last = saved

    def load(self) -> Saved | None:
        """Return the saved nodes, or None. Never raises: an invalid file is logged and ignored."""
        try:
            saved_at, found = self.path.stat().st_mtime, _parse(self.path, self._own)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RecursionError) as error:
            problem = f"{type(error).__name__} {error}".strip()
            self._once.warn(log, "load", f"Ignoring the saved nodes in {self.path}: {problem}")
            return None
        # Unchanged nodes are not written again: the file's modification time stays their age.
        self._last, self._saved_at = found, saved_at
        return found


def _text(saved: Saved) -> str:
    content = _Content(_VERSION, saved.own.name, (saved.own, *saved.peers))
    plain = msgspec.to_builtins(content, order="deterministic")
    return json.dumps(plain, separators=(",", ":")) + "\n"


def _parse(path: Path, own_name: str) -> Saved:
    text = files.read(path, _MAX_SIZE)
    version = msgspec.json.decode(text, type=_Version).version
    if version != _VERSION:
        raise ValueError(f"its version is {json.dumps(version)}, not {_VERSION}")
    content = msgspec.json.decode(text, type=_Content)
    # A host cloned from another's disk would take over that host's subnet.
    if own_name not in ("", content.own):
        raise ValueError(f"it is of node {content.own}, and this is {own_name}")
    nodes = {node.name: node for node in content.nodes}
    own = nodes.pop(content.own)
    return Saved(own, tuple(nodes.values()))
