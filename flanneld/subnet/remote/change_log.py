"""Log of changes below etcd's prefix, filled by one watch and shared by all waiting clients."""

from __future__ import annotations

import logging
import posixpath
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from flanneld.errors import Cancelled, Refused
from flanneld.model import Event, LeaseKey
from flanneld.runtime import clock
from flanneld.runtime.waits import Signal
from flanneld.subnet.codec import parse_attrs, parse_key
from flanneld.subnet.etcd.keys import KeyClient, KeyReply, NotFound, Position, watch_keys
from flanneld.subnet.etcd.leases import GONE
from flanneld.subnet.list_watch import RelistNeeded
from flanneld.subnet.remote.wire import WireEvent, WireLease

log = logging.getLogger(__name__)

#: Changes to keep, about as many as etcd's v2 API keeps.
KEPT = 1000
#: Seconds between two checks that a waiting client is still connected.
LOOK = 15.0
#: Seconds to assume for a lease's term: v3 does not report it in a watch.
_FULL_TERM = 86400.0


class LogEntry(Struct, frozen=True, gc=False):
    """Change at an index of etcd: of the lease ``key``, or of the network itself if that is None."""

    index: int
    network: str
    key: LeaseKey | None
    event: WireEvent


#: Predicate: True for entries that a client wants.
Wanted = Callable[[LogEntry], bool]


class ChangeLog:
    """Log that follows etcd's prefix in one thread, for any number of waiters. "_" is the unnamed network."""

    def __init__(self, client: KeyClient, prefix: str, pause: float) -> None:
        self._root = client.root(prefix)
        self._watch = watch_keys(client, self._root, self._start, self._news, recursive=True, pace=pause)
        self._changed = Signal()
        self._entries: deque[LogEntry] = deque()
        #: The index after which every change is in the log, None until etcd has answered.
        self._floor: int | None = None
        self._index = 0
        self._is_closed = False

    @property
    def problem(self) -> str:
        """Reason why etcd cannot be watched now; empty if it can."""
        return str(self._watch.problem or "")

    def run(self, alive: Callable[[], None]) -> None:
        """Follow etcd until ``close`` (raises ``Cancelled``)."""
        self._watch.run(_ignore, alive)

    def close(self) -> None:
        """End ``run`` and every wait. From any thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._watch.close()

    def next_after(
        self, after: int, wanted: Wanted, is_there: Callable[[], bool], now: Callable[[], int]
    ) -> list[LogEntry] | None:
        """Wait for a wanted change after an index. Return all such entries.

        Return None if the history is too short, or if etcd's own index from ``now`` is lower than ``after``,
        as after a restore. Raises ``Cancelled`` if the server stops or the client has left.
        """
        if after > self._index and now() < after:
            return None
        with self._changed:
            while True:
                if self._is_closed:
                    raise Cancelled
                if self._floor is not None and after < self._floor:
                    return None
                if found := [each for each in self._entries if each.index > after and wanted(each)]:
                    return found
                if not self._changed.heard(LOOK) and not is_there():
                    raise Cancelled

    def _start(self, client: KeyClient) -> tuple[list[Event], Position]:
        try:
            at = client.fetch(self._root).at
        except NotFound as missing:
            at = missing.at
        with self._changed:
            # Waiting clients list again, because changes in between are unknown.
            self._entries.clear()
            self._floor = self._index = at.index
            self._changed.notify_all()
        return [], at

    def _news(self, replies: Sequence[KeyReply]) -> list[Event]:
        nodes = [reply.node for reply in replies if reply.node is not None]
        entries = [entry for reply in replies if reply.node and (entry := self._entry(reply))]
        # At once, because the changes of a transaction have one index: a client that has heard of the first
        # one asks for those after it.
        with self._changed:
            self._index = max([self._index, *(node.modified for node in nodes)])
            self._entries += entries
            while len(self._entries) > KEPT:
                self._floor = self._entries.popleft().index
            if entries:
                self._changed.notify_all()
        return []

    def _entry(self, reply: KeyReply) -> LogEntry | None:
        """Return a change's entry; None for other keys. Raises ``RelistNeeded`` for a removed directory."""
        node, is_gone = reply.node, reply.action in GONE
        assert node is not None
        path = posixpath.relpath(node.key, self._root).split("/")
        if node.is_dir:
            if is_gone:
                raise RelistNeeded(f"the directory {node.key} was removed")
            return None
        match path:
            case ["subnets", name]:
                return self._lease_entry(reply, "_", name, is_gone=is_gone)
            case [network, "subnets", name]:
                return self._lease_entry(reply, network, name, is_gone=is_gone)
            case [network, "config"]:
                event = WireEvent(is_added=not is_gone, network=network)
                return LogEntry(node.modified, network, None, event)
        return None

    @staticmethod
    def _lease_entry(reply: KeyReply, network: str, name: str, *, is_gone: bool) -> LogEntry | None:
        node = reply.node
        assert node is not None
        try:
            key = parse_key(name)
            if is_gone:
                return LogEntry(node.modified, network, key, WireEvent(is_added=False, key=key))
            ends = expires_ns(node.ttl)
            lease = WireLease(parse_attrs(node.value), key, ends, node.modified, node.created)
        except Refused as reason:
            # Go flannel 0.6.2 answers 500 from then on, for good.
            log.warning("Ignoring %s in etcd: %s", node.key, reason)
            return None
        return LogEntry(node.modified, network, key, WireEvent(is_added=True, lease=lease))


def _ignore(_events: list[Event]) -> None:
    """Do nothing: waiting clients read the log."""


def expires_ns(ttl: float | None) -> int | None:
    """Return the end of a TTL in nanoseconds of Unix time; None without a TTL."""
    return None if ttl is None else clock.wall_ns() + int(min(ttl, _FULL_TERM) * 1e9)
