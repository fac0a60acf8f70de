"""Cache of the last known nodes on disk. A node that boots without an API server joins its network with it.

``docs/kubernetes.md`` describes the file.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from flanneld.compat.glog import OneTimeWarnings
from flanneld.runtime import clock, files
from flanneld.subnet.kube.nodes import Node

log = logging.getLogger(__name__)

NAME = "kube-nodes.json"
_VERSION = 1
#: Bytes of the file, at most. A node takes a few hundred, so this is beyond any cluster.
_MAX_SIZE = 64 << 20


class Saved(Struct, frozen=True, gc=False):
    """Our own node and the other managed nodes, as last known."""

    own: Node
    peers: tuple[Node, ...]


class _Version(Struct, frozen=True):
    version: Any


class _Content(Struct, frozen=True):
    """Contents of the file; ``own`` is the name of our node."""

    version: int
    own: str
    nodes: tuple[Node, ...]


class NodeCache:
    """Node cache in ``directory``, disabled if that does not exist. Used by one thread at a time.

    ``own`` is our node's name, or empty if only the API server knows it.
    """

    def __init__(self, directory: str, own: str = "") -> None:
        self.path = Path(directory or "/nonexistent") / NAME
        self._own = own
        self._last: Saved | None = None
        self._saved_at = 0.0
        self._once = OneTimeWarnings()

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
