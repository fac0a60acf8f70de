"""Watches: what is there, what changes, bookmarks, and how a stream ends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.lab.kube_api import refusals
from tests.lab.kube_api.faults import Cut, Fault
from tests.lab.kube_api.lists import Query, selector, version_of, wait_for_version
from tests.lab.kube_api.nodes import NO_STATUS
from tests.lab.kube_api.store import Change, Store, dump

NODE = b'{"kind":"Node","apiVersion":"v1",'
#: Seconds before its end at which a watch gets a bookmark, and from one to the next otherwise.
LAST_BOOKMARKS = (2.6, 1.6)
BOOKMARK_INTERVAL = 60.0
SHORTEST, LONGEST = 1800, 3600  # seconds, of a watch without timeoutSeconds


class Watch:
    """One watch on nodes. Iteration gives the lines to send at once, ``[]`` first: then the header goes out.

    ``order`` takes a fault that shall strike it while it is open. ``begun`` is true from its first read on:
    it tells of every change after that. Making one may raise ``Refusal``, iterating ``Cut``.
    """

    def __init__(self, store: Store, query: Query, bookmark_interval: float, patience: float) -> None:
        self.order: Fault | None = None
        self.begun = False
        #: Bookmarks sent so far.
        self.bookmarks = 0
        self._store = store
        self._selected = selector(query)
        self._version = version_of(query, watch=True)
        self._lists_first = query.get("sendInitialEvents") == "true"
        self._wants_all = self._lists_first or self._version == 0
        self._end = time.monotonic() + float(query.get("timeoutSeconds") or random.randint(SHORTEST, LONGEST))
        self._bookmarks: Iterator[float] = iter(())
        if query.get("allowWatchBookmarks") in ("true", "1"):
            self._bookmarks = _bookmark_times(self._end, bookmark_interval)
        if self._lists_first:
            wait_for_version(store, self._version, patience)

    def __iter__(self) -> Iterator[list[bytes]]:
        yield []
        next_bookmark = next(self._bookmarks, float("inf"))
        if self._wants_all:
            first = self._all()
            self.begun = True
            yield first
        elif self._version < self._store.oldest:
            yield [self._too_old()]
            return
        self.begun = True
        while True:
            changes = self._wait(min(self._end, next_bookmark) - time.monotonic())
            if changes is None:
                yield [self._too_old()]
                return
            if lines := [line for change in changes if (line := self._line(change))]:
                yield lines
            if self.order is not None:
                yield from self._obey(self.order)
                return
            is_over = time.monotonic() >= self._end
            while next_bookmark < float("inf") and (is_over or time.monotonic() >= next_bookmark):
                yield [bookmark(self._version)]
                self.bookmarks += 1
                next_bookmark = next(self._bookmarks, float("inf"))
            if is_over:
                return

    def expire(self) -> None:
        """Let its time be up now: what bookmarks were to come come at once."""
        with self._store.lock:
            self._end = 0.0
            self._store.lock.notify_all()

    def _all(self) -> list[bytes]:
        with self._store.lock:
            items = self._store.items("nodes")
            self._version = self._store.version
        lines = [_event("ADDED", item) for name, item in items if self._selected(name, item)]
        if self._lists_first:
            lines.append(bookmark(self._version, {"k8s.io/initial-events-end": "true"}))
        return lines

    def _wait(self, patience: float) -> list[Change] | None:
        """What happened since the last time, ``[]`` when the time was up; None when that is forgotten."""
        with self._store.lock:
            self._store.lock.wait_for(
                lambda: self._store.version > self._version or self.order or not self._end, max(patience, 0)
            )
            found = self._store.since(self._version)
            if found is None:
                return None
            changes = list(found)
            # A watch from the future stays there.
            self._version = max(self._version, self._store.version)
            return [change for change in changes if change.resource == "nodes"]

    def _line(self, change: Change) -> bytes | None:
        """A change as this watch sees it: what enters or leaves the selection is added or deleted."""
        is_in = change.type != "DELETED" and self._selected(change.name, change.item)
        was_in = change.before is not None and self._selected(change.name, change.before)
        if is_in:
            return _event("MODIFIED" if was_in else "ADDED", change.item)
        return _event("DELETED", change.item) if was_in else None

    def _too_old(self) -> bytes:
        return error(refusals.too_old_version(self._version, self._store.oldest))

    def _obey(self, order: Fault) -> Iterator[list[bytes]]:
        if order.line:
            yield [order.line.encode() + b"\n"]
        if order.error:
            yield [error(refusals.ordered(order.error))]
        elif order.then != "end":
            raise Cut(order.then)


def error(refusal: refusals.Refusal) -> bytes:
    """The ERROR event that ends a watch."""
    return b'{"type":"ERROR","object":%b}\n' % dump(refusal.status())


def bookmark(version: int, annotations: Mapping[str, str] | None = None) -> bytes:
    """A node without a name that tells how far the watch is."""
    metadata: dict[str, Any] = {"resourceVersion": str(version)}
    metadata |= {"annotations": dict(annotations)} if annotations else {}
    return _event("BOOKMARK", dump({"metadata": metadata, "spec": {}, "status": NO_STATUS}))


def _event(kind: str, item: bytes) -> bytes:
    return b'{"type":"%b","object":%b%b}\n' % (kind.encode(), NODE, item[1:])


def _bookmark_times(end: float, interval: float) -> Iterator[float]:
    at = time.monotonic() + interval
    last = [end - before for before in LAST_BOOKMARKS]
    while at < last[0]:
        yield at
        at += interval
    yield from (moment for moment in last if moment > time.monotonic())
