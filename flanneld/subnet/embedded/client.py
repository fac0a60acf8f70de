"""Client of the embedded store with the interface of etcd's clients, so that one manager serves both."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable

from flanneld.errors import Cancelled
from flanneld.runtime import clock
from flanneld.subnet.embedded.store import TICK, KeyStore
from flanneld.subnet.etcd.keys import (
    KeyChanges,
    NoConfig,
    Position,
    Reply,
    StoredKey,
    check_reread,
)

#: Key below which the store holds the network: etcd's default, so that an export changes no key.
PREFIX = "/coreos.com/network"
#: Seconds after which a watch without changes returns, so that its thread can send a heartbeat.
POLL = 60.0


class EmbeddedClient:
    """``Client`` of a store in this process. ``cancel`` ends this client and leaves the store open."""

    api = "embedded"
    names_ipv6 = True

    def __init__(self, store: KeyStore) -> None:
        self.store = store
        self._is_cancelled = threading.Event()

    def root(self, prefix: str) -> str:
        return posixpath.normpath("/" + prefix.strip("/"))

    def fetch(self, key: str, *, recursive: bool = False) -> Reply:
        self.check()
        if recursive:
            children, at = self.store.below(key)
            return Reply("get", StoredKey(key, "", None, at.index, is_dir=True), children, at)
        node, at = self.store.get(key)
        return Reply("get", node, (), at)

    def create(self, key: str, value: str, ttl: int | None) -> Reply:
        self.check()
        node, at = self.store.create(key, value, ttl)
        return Reply("put", node, (), at)

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> Reply:
        self.check()
        node, at = self.store.replace(key, value, ttl, modified)
        return Reply("put", node, (), at)

    def prolong(self, key: str, modified: int) -> float | None:
        self.check()
        return self.store.prolong(key, modified)

    def remove(self, key: str) -> None:
        self.check()
        self.store.remove(key)

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> EmbeddedWatcher:
        return EmbeddedWatcher(EmbeddedClient(self.store), key, recursive=recursive, contact=contact)

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        del key, example, elsewhere
        return NoConfig(f"the {self.store.name} has no network config", "start with -network=10.5.0.0/16")

    def reconnect(self) -> None:
        """Do nothing: a file has no connection."""

    def cancel(self) -> None:
        self._is_cancelled.set()
        self.store.wake()

    def check(self) -> None:
        """Raise ``Cancelled`` after ``cancel``."""
        if self._is_cancelled.is_set():
            raise Cancelled


class EmbeddedWatcher:
    """``Watcher`` of a store in this process."""

    def __init__(
        self, client: EmbeddedClient, key: str, *, recursive: bool, contact: Callable[[], object]
    ) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive
        self._contact = contact
        self._reread = threading.Event()

    def read(self, after: Position) -> KeyChanges:
        store = self.client.store
        deadline = clock.now() + POLL
        while True:
            writes = store.writes
            self.client.check()
            check_reread(self._reread)
            changes = store.changes(self._key, recursive=self._recursive, after=after)
            self._contact()
            if changes.replies or clock.now() > deadline:
                return changes
            store.listen(writes, TICK)
            store.tick()
            after = changes.at

    def reread(self) -> None:
        self._reread.set()
        self.client.store.wake()

    def reconnect(self) -> None:
        """Do nothing: a file has no connection."""

    def cancel(self) -> None:
        self.client.cancel()

    def close(self) -> None:
        """Do nothing: a file has no connection."""
