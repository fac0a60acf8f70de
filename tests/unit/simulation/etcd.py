"""Simulated etcd, in either API: a history of revisions, leases that end, compaction, and watches that fail.

Reads may be up to a second old, which is how it looks to a node that another one overtakes between its read
and its write. An answer may get lost after the write was done. Each watch hears of an event after a delay of
its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

from msgspec import Struct, structs

from flanneld.errors import Cancelled, NoAnswer
from flanneld.model import IPAddress
from flanneld.runtime import clock
from flanneld.subnet.etcd.keys import (
    Conflict,
    KeyChanges,
    KeyReply,
    NoConfig,
    NotFound,
    Position,
    StoredKey,
    check_history,
)
from flanneld.subnet.etcd.store import EtcdStore
from flanneld.subnet.etcd.v2 import V2Watcher
from flanneld.subnet.list_watch import RelistNeeded
from tests.unit.simulation.world import World

#: Seconds for which a poll or a silent stream lasts.
POLL = 1800.0
#: Seconds that a request takes: a read may be so old when its answer comes.
LONGEST_REQUEST = 1.0
#: Changes that the v2 API remembers, and those that it queues for a stream.
V2_HISTORY = 1000
V2_QUEUE = 100
PREFIX = "/coreos.com/network"
#: Its addresses: inside the cluster's networks, and for each node behind the default gateway.
ADDRESSES: frozenset[IPAddress] = frozenset({IPv4Address("10.3.200.9"), IPv6Address("fd00:10:0:ff00::9")})


class Change(Struct, frozen=True, gc=False):
    """One revision: what was done to a key, and what it held before."""

    action: str
    node: StoredKey
    before: StoredKey | None
    time: float


class Faults(Struct):
    """Chances, of 0 to 1, of what goes wrong with one request, and the longest delay of an event."""

    stale: float = 0.0
    lost_answer: float = 0.0
    lag: float = 0.05


class SimulatedEtcd:
    """One cluster of etcd. ``api`` is "v2" or "v3"."""

    def __init__(self, world: World, api: str, config: dict[str, object]) -> None:
        self.world = world
        self.api = api
        self.faults = Faults()
        self.is_down = False
        self.keys: dict[str, StoredKey] = {}
        #: When each key ends that does.
        self.ends: dict[str, float] = {}
        #: Each change from ``first`` on, one index each.
        self.history: list[Change] = []
        self.first = 1
        self.watchers: list[SimulatedWatcher] = []
        #: Returns how many changes the next read lacks, as out of a replica that is behind.
        self.age: Callable[[], int] = lambda: 0
        #: Returns the seconds until a watch hears of a change.
        self.delay: Callable[[], float] = lambda: world.random.uniform(0.001, self.faults.lag)
        self.put(f"{PREFIX}/config", json.dumps(config), None)
        self.compact()  # each backup has it

    @property
    def index(self) -> int:
        return self.first + len(self.history) - 1

    def position(self) -> Position:
        return Position(self.index, "simulated")

    # ---- what happens to it ----------------------------------------------------------------------

    def put(self, key: str, value: str, ttl: float | None) -> StoredKey:
        before = self.keys.get(key)
        created = before.created if before else self.index + 1
        node = StoredKey(key, value, ttl, self.index + 1, created=created)
        self.keys[key] = node
        self.ends.pop(key, None)
        if ttl is not None:
            self._let_last(key, ttl)
        self._record(Change("set" if self.api == "v2" else "put", node, before, self.world.time))
        return node

    def delete(self, key: str, action: str = "delete") -> None:
        before = self.keys.pop(key)
        self.ends.pop(key, None)
        self._record(Change(action, StoredKey(key, "", None, self.index + 1), before, self.world.time))

    def prolong(self, key: str, ttl: float) -> None:
        self._let_last(key, ttl)

    def compact(self) -> None:
        """Forget all history up to now."""
        self.first, self.history = self.index + 1, []

    def restore(self, changes: int) -> None:
        """Put a backup in place that lacks the last changes; every connection ends."""
        for _ in range(min(changes, len(self.history))):
            change = self.history.pop()
            if change.before is None:
                self.keys.pop(change.node.key, None)
                self.ends.pop(change.node.key, None)
            else:
                self.keys[change.node.key] = change.before
                if change.before.ttl is not None:
                    self._let_last(change.node.key, change.before.ttl)
        self.break_watches()

    def set_down(self, *, down: bool) -> None:
        self.is_down = down
        if down:
            self.break_watches()

    def break_watches(self) -> None:
        for watcher in self.watchers:
            watcher.is_broken = True
            watcher.hear(0.0)

    def leases(self) -> dict[str, str]:
        return {key: node.value for key, node in self.keys.items() if "/subnets/" in key}

    def state_before(self, changes: int) -> tuple[dict[str, StoredKey], Position]:
        """The keys as they were so many changes ago."""
        keys = dict(self.keys)
        count = min(changes, len(self.history))
        for change in reversed(self.history[len(self.history) - count :]):
            if change.before is None:
                keys.pop(change.node.key, None)
            else:
                keys[change.node.key] = change.before
        return keys, Position(self.index - count, "simulated")

    def changes_since(self, index: int) -> int:
        """Return how many changes a slow read may have missed, none up to an index."""
        recent = [change for change in self.history[-10:] if change.time > self.world.time - LONGEST_REQUEST]
        return max(0, min(len(recent), self.index - index))

    def _let_last(self, key: str, ttl: float) -> None:
        end = self.ends[key] = self.world.time + ttl
        self.world.at(end, lambda: self._expire(key, end))

    def _expire(self, key: str, end: float) -> None:
        if self.ends.get(key) == end:
            self.delete(key, "expire" if self.api == "v2" else "delete")

    def _record(self, change: Change) -> None:
        self.history.append(change)
        if self.api == "v2" and len(self.history) > V2_HISTORY:
            del self.history[0]
            self.first += 1
        for watcher in self.watchers:
            if watcher.concerns(change.node.key):
                watcher.stream.tell(change)
                watcher.hear(self.delay())


class SimulatedClient:
    """``KeyClient`` of one process. ``before_request`` is called first, and may raise.

    So may ``effect``, which is called before and after each write.
    """

    def __init__(
        self,
        etcd: SimulatedEtcd,
        before_request: Callable[[], None],
        effect: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._etcd = etcd
        self._before_request = before_request
        self._effect = effect
        self.api = etcd.api
        self.names_ipv6 = etcd.api == "v3"
        self._is_cancelled = False
        self._written: dict[str, int] = {}
        self._seen = 0
        #: The watcher of each key that was opened last.
        self.watchers: dict[str, SimulatedWatcher] = {}

    def root(self, prefix: str) -> str:
        return prefix

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        self.ask()
        keys, at = self._etcd.state_before(self._etcd.age())
        if recursive and self._chance(self._etcd.faults.stale):
            keys, at = self._etcd.state_before(self._etcd.changes_since(self._seen))
        if recursive:
            found = tuple(
                self._timed(each) for name, each in sorted(keys.items()) if name.startswith(f"{key}/")
            )
            if not found and self.api == "v2":
                raise NotFound(at)
            return KeyReply("get", StoredKey(key, "", None, at.index, is_dir=True), found, at)
        if key not in keys:
            raise NotFound(at)
        return KeyReply("get", self._timed(keys[key]), (), at)

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        self.ask()
        if key in self._etcd.keys:
            raise Conflict(f"{key} is there")
        return self._write(key, value, ttl)

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> KeyReply:
        self.ask()
        there = self._etcd.keys.get(key)
        if there is None or there.modified != modified:
            raise Conflict(f"{key} has changed")
        return self._write(key, value, ttl)

    def prolong(self, key: str, modified: int) -> float | None:
        if self.api == "v2" or self._written.get(key) != modified:
            return None
        self.ask()
        there = self._etcd.keys.get(key)
        if there is None or there.modified != modified or there.ttl is None:
            return None
        self._effect(f"before {key} is prolonged")
        self._etcd.prolong(key, there.ttl)
        self._effect(f"after {key} is prolonged")
        return there.ttl

    def remove(self, key: str, modified: int) -> None:
        self.ask()
        found = self._etcd.keys.get(key)
        if found is None:
            raise NotFound(self._etcd.position())
        if self.api != "v2" and found.modified != modified:
            raise Conflict(f"{key} was written again")
        self._effect(f"before {key} is removed")
        self._etcd.delete(key)
        self._effect(f"after {key} is removed")

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> SimulatedWatcher:
        made = SimulatedWatcher(self._etcd, self, key, recursive=recursive, contact=contact)
        former, self.watchers[key] = self.watchers.get(key), made
        watchers = self._etcd.watchers
        if former in watchers:
            watchers[watchers.index(former)] = made
        else:
            watchers.append(made)
        return made

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        del example, elsewhere
        return NoConfig(f"no config at {key}")

    def reconnect(self) -> None:
        pass

    def cancel(self) -> None:
        self._is_cancelled = True
        for watcher in self.watchers.values():
            self._etcd.watchers.remove(watcher)
        self.watchers.clear()

    def ask(self) -> None:
        if self._is_cancelled:
            raise Cancelled
        self._before_request()
        if self._etcd.is_down:
            raise NoAnswer("etcd does not answer")

    def _write(self, key: str, value: str, ttl: int | None) -> KeyReply:
        self._effect(f"before {key} is written")
        node = self._etcd.put(key, value, ttl)
        self._written[key] = self._seen = node.modified
        self._before_request()  # the process may end before it has the answer
        self._effect(f"after {key} is written")
        if self._chance(self._etcd.faults.lost_answer):
            raise NoAnswer("the answer of etcd got lost")
        return KeyReply("put", node, (), self._etcd.position())

    def _timed(self, node: StoredKey) -> StoredKey:
        end = self._etcd.ends.get(node.key)
        if node.ttl is None or end is None:
            return node
        return structs.replace(node, ttl=max(0.0, end - clock.now()))

    def _chance(self, of: float) -> bool:
        return of > 0 and self._etcd.world.random.random() < of


class SimulatedStream:
    """What ``V2Watcher`` asks of its client: a stream that etcd drops without a word, or a poll."""

    def __init__(self, etcd: SimulatedEtcd, watcher: SimulatedWatcher) -> None:
        self._etcd = etcd
        self._watcher = watcher
        self._begun: Position | None = None
        self._is_watched = False
        self._queue: list[Change] = []

    def tell(self, change: Change) -> None:
        if self._is_watched and len(self._queue) < V2_QUEUE:
            self._queue.append(change)
        else:
            self._is_watched = False

    def listen(self, at: Position) -> None:
        """Be watched from now on, as a stream is that has been requested."""
        if self._begun is None and at == self._etcd.position():
            self._begun, self._is_watched = at, True

    def changes(
        self, key: str, after: Position, *, recursive: bool, is_stream: bool, timeout: float
    ) -> tuple[list[KeyReply], Position]:
        del key, recursive, timeout
        if self._begun is None or not is_stream:
            self._open(after)
        assert self._begun is not None
        begun, told = self._begun, [_reply(each, after) for each in self._queue]
        self._queue = []
        if not (told and is_stream):
            self.close()
        return told, begun

    def fetch(self, key: str) -> KeyReply:
        return self._watcher.client.fetch(key)

    def close(self) -> None:
        self._begun, self._is_watched, self._queue = None, False, []

    def _open(self, after: Position) -> None:
        self._watcher.begin(after)
        self._begun = self._etcd.position()
        self._queue = self._watcher.news(after)[:1]
        self._is_watched = not self._queue


class SimulatedWatcher:
    """``Watcher`` of one process. ``wake`` is called with the time at which ``read`` would return."""

    def __init__(
        self,
        etcd: SimulatedEtcd,
        client: SimulatedClient,
        key: str,
        *,
        recursive: bool,
        contact: Callable[[], object],
    ) -> None:
        self.client = client
        self._etcd = etcd
        self._key = key
        self._recursive = recursive
        self._contact = contact
        self._is_cancelled = False
        self.is_broken = False
        self.stream = SimulatedStream(etcd, self)
        self._v2 = V2Watcher(self.stream, key, recursive=recursive)  # type: ignore[arg-type]
        #: Until when nothing is told, as when a proxy holds a connection whose server has gone.
        self.stalled_until = -math.inf
        self.wake: Callable[[float], None] = lambda _when: None

    def concerns(self, key: str) -> bool:
        return key.startswith(f"{self._key}/") if self._recursive else key == self._key

    def hear(self, after: float) -> None:
        """Something is to be read, in so many seconds."""
        self.wake(max(self._etcd.world.time + after, self.stalled_until))

    def wait(self, at: Position) -> float:
        """Begin to wait for what comes after now; return when ``read`` would return without news."""
        if self._is_cancelled:
            return self._etcd.world.time
        if self.is_broken:
            return max(self._etcd.world.time, self.stalled_until)
        if not self._etcd.is_down:
            self._contact()
            self.stream.listen(at)
        return self._etcd.world.time + min(POLL, self._v2.patience)

    def has_more_than(self, at: Position) -> bool:
        """Return True if something has happened since."""
        return at.index < self._etcd.index

    def read(self, after: Position) -> KeyChanges:
        if self._is_cancelled:
            raise Cancelled
        if self.is_broken:
            self.is_broken = False
            self.stream.close()
            raise NoAnswer("the connection of the watch was lost")
        self.client.ask()
        if self._etcd.api == "v2":
            return self._v2.read(after)
        self.begin(after)
        told = tuple(_reply(each, after) for each in self.news(after))
        return KeyChanges(told, self._etcd.position())

    def begin(self, after: Position) -> None:
        """Begin to watch after a position."""
        check_history(after, self._etcd.position())
        if after.index < self._etcd.first - 1:
            raise RelistNeeded("etcd has compacted its history since")
        self._contact()

    def news(self, after: Position) -> list[Change]:
        """What has been done to the key since."""
        found = self._etcd.history[after.index + 1 - self._etcd.first :]
        return [each for each in found if self.concerns(each.node.key)]

    def cancel(self) -> None:
        self._is_cancelled = True
        self.wake(self._etcd.world.time)  # also in a stall: whoever cancels waits for nobody

    def close(self) -> None:
        self.stream.close()


def _reply(change: Change, after: Position) -> KeyReply:
    return KeyReply(change.action, change.node, (), Position(change.node.modified, after.cluster))


def store_on(client: SimulatedClient) -> EtcdStore:
    """The product's store over a client of one process."""
    return EtcdStore(client, PREFIX, "simulation", pause_time=1.0, addresses=lambda: ADDRESSES)
