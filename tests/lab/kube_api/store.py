"""The objects, their resource versions, and a history that watches read and that can be cut off."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

Object = dict[str, Any]

FIRST_VERSION = 200  # a real server's own start uses up about as many
SNAPSHOTS = 16  # lists that can be read on page by page, of which others write into the cluster


class Change(NamedTuple):
    """One step of the history; ``item`` is the object's JSON, at a deletion its last one."""

    version: int
    type: str
    resource: str
    name: str
    item: bytes
    before: bytes | None


Items = list[tuple[str, bytes]]


class Store:
    """All objects by resource and name, as JSON; ``lock`` guards everything and is notified of every change.

    With a journal, a file, they outlive the process. The history does not, like the real server's cache.
    """

    def __init__(self, journal: Path | None = None, version: int = 0, window: int = 4096) -> None:
        self.lock = threading.Condition()
        self.version = FIRST_VERSION
        self._objects: dict[str, dict[str, bytes]] = {}
        self._history: deque[Change] = deque()
        self._window = window
        self._snapshots: dict[tuple[str, int], Items] = {}
        self._journal: IO[bytes] | None = None
        if journal is not None:
            self._replay(journal)
            self._journal = journal.open("ab")
        self.version = max(self.version, version)
        #: A new watch from before this version is refused, one that goes on only when it is very slow.
        self.oldest = self._forgotten = self.version

    def get(self, resource: str, name: str) -> Object | None:
        with self.lock:
            item = self._objects.get(resource, {}).get(name)
        return None if item is None else json.loads(item)

    def put(self, resource: str, name: str, value: Object) -> bytes:
        """Write an object and return its JSON with its version, a new one if anything changed."""
        with self.lock:
            there = self._objects.setdefault(resource, {})
            before = there.get(name)
            if before is not None and before == dump(value):
                return before
            self.version += 1
            value["metadata"] = _versioned(value["metadata"], self.version)
            item = dump({key: part for key, part in value.items() if key not in ("kind", "apiVersion")})
            there[name] = item
            self._record(
                Change(self.version, "MODIFIED" if before else "ADDED", resource, name, item, before)
            )
            return item

    def add_item(self, resource: str, name: str, item: bytes) -> None:
        """Write an object that was not there, from JSON without a version, in less time."""
        with self.lock:
            self.version += 1
            place = item.index(b'"creationTimestamp"')
            whole = b'%b"resourceVersion":"%d",%b' % (item[:place], self.version, item[place:])
            self._objects.setdefault(resource, {})[name] = whole
            self._record(Change(self.version, "ADDED", resource, name, whole, None))

    def delete(self, resource: str, name: str) -> Object | None:
        """Delete an object and return it; its last event carries the version of the deletion."""
        with self.lock:
            before = self._objects.get(resource, {}).pop(name, None)
            if before is None:
                return None
            self.version += 1
            last: Object = json.loads(before)
            last["metadata"]["resourceVersion"] = str(self.version)
            self._record(Change(self.version, "DELETED", resource, name, dump(last), before))
            return last

    def items(self, resource: str) -> Items:
        """All objects of a resource, in the order of their names."""
        with self.lock:
            return sorted(self._objects.get(resource, {}).items())

    def keep(self, resource: str, version: int, items: Items) -> None:
        """Keep the items of a version for who reads them in pages."""
        with self.lock:
            self._snapshots.setdefault((resource, version), items)
            while len(self._snapshots) > SNAPSHOTS:
                del self._snapshots[next(iter(self._snapshots))]

    def items_at(self, resource: str, version: int) -> Items | None:
        """The items at a version, None when that is not known any more."""
        with self.lock:
            if version == self.version:
                return self.items(resource)
            return self._snapshots.get((resource, version))

    def since(self, version: int) -> Iterator[Change] | None:
        """What came after a version, None when some of it is forgotten; ask under the lock."""
        if version < self._forgotten:
            return None
        new = 0
        for change in reversed(self._history):
            if change.version <= version:
                break
            new += 1
        return islice(self._history, len(self._history) - new, None)

    def compact(self) -> int:
        """Refuse new watches from before now and pages of earlier lists; return the present version."""
        with self.lock:
            self.version += 1  # else a watch that has seen everything would not be too old
            self.oldest = self.version
            self._snapshots.clear()
            return self.version

    def jump(self, versions: int) -> int:
        """Use up so many versions, as writes of other resources do; return the present one."""
        with self.lock:
            self.version += versions
            self.lock.notify_all()
            return self.version

    def _record(self, change: Change) -> None:
        self._history.append(change)
        while len(self._history) > self._window:
            self._forgotten = self._history.popleft().version
            self.oldest = max(self.oldest, self._forgotten)
        if self._journal is not None:
            head = [change.version, change.type, change.resource, change.name]
            self._journal.write(json.dumps(head).encode() + b"\t" + change.item + b"\n")
            self._journal.flush()
        self.lock.notify_all()

    def _replay(self, journal: Path) -> None:
        if not journal.exists():
            return
        with journal.open("rb") as lines:
            for line in lines:
                head, _, item = line.rstrip(b"\n").partition(b"\t")
                self.version, kind, resource, name = json.loads(head)
                there = self._objects.setdefault(resource, {})
                if kind == "DELETED":
                    there.pop(name, None)
                else:
                    there[name] = item


def _versioned(metadata: Object, version: int) -> Object:
    """With a resource version, at its place in the server's order."""
    first = {key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata}
    stamp = {"resourceVersion": str(version)}
    return first | stamp | metadata | stamp


def dump(value: Any) -> bytes:
    """JSON as Go writes it: compact, UTF-8, and what means something in HTML escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for sign, escaped in (("&", "\\u0026"), ("<", "\\u003c"), (">", "\\u003e")):
        text = text.replace(sign, escaped)
    return text.encode()
