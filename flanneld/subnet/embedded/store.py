"""Embedded store: keys in a file with revisions, compare-and-swap, expiry and a bounded history."""

from __future__ import annotations

import json
import logging
import posixpath
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path

from msgspec import Struct, structs

from flanneld.config import parse, say_the_same
from flanneld.errors import Cancelled, Fatal, Retryable
from flanneld.runtime import clock
from flanneld.runtime.clock import randrange
from flanneld.runtime.waits import Signal
from flanneld.subnet.embedded.database import Database, fact, number, set_fact
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
from flanneld.subnet.list_watch import Contact, RelistNeeded

log = logging.getLogger(__name__)

#: Key below which the store holds the network: etcd's default, so that an export changes no key.
PREFIX = "/coreos.com/network"
_CONFIG = posixpath.join(PREFIX, "config")
#: Seconds after which a watch without changes returns, so that its thread can send a heartbeat.
POLL = 60.0
#: Changes to keep: more than a large cluster makes in a minute, for which a client may be disconnected.
KEPT = 10_000
#: Seconds between two checks for expired keys, and for writes of other processes.
TICK = 1.0
#: Owner of the leases of the host with the file. It is no hash, so no secret matches it.
LOCAL = "this host"
#: Seconds between two records of the time. After a reboot it goes on from the last one.
_RECORD = 60.0
_FOUND = "SELECT key, value, ttl, expires, modified, created.revision FROM keys LEFT JOIN created USING (key)"


class Moment(Struct, frozen=True, gc=False):
    """Time of the store, in seconds, with the boot ID and the kernel's time of its record."""

    time: float
    boot: str
    at: float


def time_since(record: Moment, boot: str, at: float) -> float:
    """Return the store's time now (pure). It stands still while the host is down, and never goes back.

    So a lease never ends early: neither a wrong time of day nor a long repair of the host ends it.
    """
    return record.time + max(0.0, at - record.at) if boot == record.boot else record.time


class KeyStore:
    """Keys in a database. May be used from any thread; other processes may write, too."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._changed = Signal()
        self._writes = 0
        self.name = f"store {database.path}"

    # ---- reading -----------------------------------------------------------------------------

    def get(self, key: str) -> tuple[StoredKey, Position]:
        """Read a key. Raises ``NotFound``."""
        with self.database.reading() as connection:
            now, at = _now(connection), _position(connection)
            node = _find(connection, key, now)
        if node is None:
            raise NotFound(at)
        return node, at

    def below(self, directory: str) -> tuple[tuple[StoredKey, ...], Position]:
        """Read all keys in a directory, at any depth."""
        with self.database.reading() as connection:
            now = _now(connection)
            rows = connection.execute(
                f"{_FOUND} WHERE key >= ? AND key < ? ORDER BY key",
                _range(directory),
            )
            nodes = [_node(row, now) for row in rows]
            return tuple(each for each in nodes if each.ttl is None or each.ttl > 0), _position(connection)

    def changes(self, key: str, *, recursive: bool, after: Position) -> KeyChanges:
        """Return the changes since, at most 1,000. Raises ``RelistNeeded`` if the history has lost them."""
        first, last = _range(key) if recursive else (key, f"{key}\0")
        with self.database.reading() as connection:
            now, at = _now(connection), _position(connection)
            check_history(after, at)
            if after.index < number(connection, "floor"):
                raise RelistNeeded("the history of the store does not go back so far")
            rows = connection.execute(
                "SELECT action, key, value, expires, history.revision, created.revision"
                " FROM history LEFT JOIN created USING (key)"
                " WHERE history.revision > ? AND key >= ? AND key < ? ORDER BY history.revision LIMIT 1000",
                (after.index, first, last),
            ).fetchall()
        replies = tuple(
            KeyReply(
                action,
                StoredKey(name, value, _left(expires, now), revision, created=created or 0),
                (),
                Position(revision, at.cluster),
            )
            for action, name, value, expires, revision, created in rows
        )
        return KeyChanges(replies, replies[-1].at if len(replies) == 1000 else at)

    @property
    def writes(self) -> int:
        """Return the number of writes by this process, for ``listen``."""
        return self._writes

    def listen(self, writes: int, seconds: float) -> None:
        """Wait until this process has written more than ``writes`` times, at most ``seconds``."""
        with self._changed:
            if self._writes == writes:
                self._changed.heard(seconds)

    def wake(self) -> None:
        """End every ``listen``."""
        with self._changed:
            self._writes += 1
            self._changed.notify_all()

    def tick(self) -> None:
        """Remove expired keys, and record the time periodically."""
        with self.database.reading() as connection:
            now = _now(connection)
            (ends,) = connection.execute("SELECT min(expires) FROM keys").fetchone()
            is_due = ends is not None and ends <= now
            is_due |= now - _record(connection).time > _RECORD
            is_due |= fact(connection, "boot") != clock.boot_id()
        if is_due:
            with self._writing():
                pass

    # ---- writing -----------------------------------------------------------------------------

    def create(self, key: str, value: str, ttl: int | None, owner: str = "") -> tuple[StoredKey, Position]:
        """Create a key. Raises ``Conflict`` if it exists."""
        with self._writing() as (connection, now):
            if _find(connection, key, now) is not None:
                raise Conflict(f"{key} is there")
            node, at = _put(connection, key, value, ttl, now, owner)
            connection.execute("INSERT OR REPLACE INTO created VALUES (?, ?)", (key, at.index))
            return structs.replace(node, created=at.index), at

    def replace(
        self, key: str, value: str, ttl: int | None, modified: int, owner: str = ""
    ) -> tuple[StoredKey, Position]:
        """Write a key. Raises ``Conflict`` if it has changed since revision ``modified``."""
        with self._writing() as (connection, now):
            _check_unchanged(connection, key, modified, now)
            return _put(connection, key, value, ttl, now, owner)

    def prolong(self, key: str, modified: int) -> float | None:
        """Renew a key for its original TTL. Return None if it has changed since, or never expires."""
        with self._writing() as (connection, now):
            found = connection.execute(
                "UPDATE keys SET expires = ttl + ? WHERE key = ? AND modified = ? AND ttl NOT NULL"
                " RETURNING ttl",
                (now, key, modified),
            ).fetchall()
        return float(found[0][0]) if found else None

    def owner(self, key: str) -> str:
        """Return the owner of a key; empty if its last write named none."""
        with self.database.reading() as connection:
            row = connection.execute(
                "SELECT owner FROM owners JOIN keys USING (key, modified) WHERE key = ?", (key,)
            ).fetchone()
        return str(row[0]) if row else ""

    def claim(self, key: str, owner: str) -> None:
        """Name the owner of a key without a write of its value."""
        with self.database.writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO owners SELECT key, modified, ? FROM keys WHERE key = ?", (owner, key)
            )

    def remove(self, key: str, modified: int) -> Position:
        """Delete a key. Raises ``NotFound``, or ``Conflict`` if it has changed since ``modified``."""
        with self._writing() as (connection, now):
            if _find(connection, key, now) is None:
                raise NotFound(_position(connection))
            _check_unchanged(connection, key, modified, now)
            return _drop(connection, "delete", key)

    @contextmanager
    def _writing(self) -> Iterator[tuple[sqlite3.Connection, float]]:
        """Write in one transaction, which first removes expired keys."""
        with self.database.writing() as connection:
            now = _now(connection)
            set_fact(connection, "time", now)
            set_fact(connection, "boot", clock.boot_id())
            set_fact(connection, "at", clock.now())
            ended = connection.execute(
                "SELECT key FROM keys WHERE expires <= ? ORDER BY expires, key", (now,)
            )
            for (key,) in ended.fetchall():
                _drop(connection, "expire", key)
            yield connection, now
        self.wake()


def _record(connection: sqlite3.Connection) -> Moment:
    time, boot, at = (fact(connection, name) for name in ("time", "boot", "at"))
    return Moment(_seconds(time), str(boot or ""), _seconds(at))


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _now(connection: sqlite3.Connection) -> float:
    return time_since(_record(connection), clock.boot_id(), clock.now())


def _position(connection: sqlite3.Connection) -> Position:
    return Position(number(connection, "revision"), str(fact(connection, "cluster")))


def _range(directory: str) -> tuple[str, str]:
    """Return the first possible key in a directory, and the first one behind it."""
    return f"{directory}/", f"{directory}0"  # "0" comes next to "/"


def _left(expires: float | None, now: float) -> float | None:
    return None if expires is None else max(0.0, expires - now)


def _node(row: tuple[str, str, int | None, float | None, int, int | None], now: float) -> StoredKey:
    key, value, _, expires, modified, created = row
    return StoredKey(key, value, _left(expires, now), modified, created=created or 0)


def _find(connection: sqlite3.Connection, key: str, now: float) -> StoredKey | None:
    """Return a key that has not expired; None if there is none."""
    row = connection.execute(f"{_FOUND} WHERE key = ?", (key,)).fetchone()
    node = _node(row, now) if row else None
    return node if node and (node.ttl is None or node.ttl > 0) else None


def _check_unchanged(connection: sqlite3.Connection, key: str, modified: int, now: float) -> None:
    node = _find(connection, key, now)
    if node is None or node.modified != modified:
        raise Conflict(f"{key} has changed" if node else f"{key} has gone")


def _put(
    connection: sqlite3.Connection, key: str, value: str, ttl: int | None, now: float, owner: str
) -> tuple[StoredKey, Position]:
    expires = None if ttl is None else now + ttl
    at = _note(connection, "put", key, value, expires)
    connection.execute(
        "INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?)", (key, value, ttl, expires, at.index)
    )
    if owner:
        connection.execute("INSERT OR REPLACE INTO owners VALUES (?, ?, ?)", (key, at.index, owner))
    return StoredKey(key, value, None if ttl is None else float(ttl), at.index), at


def _drop(connection: sqlite3.Connection, action: str, key: str) -> Position:
    connection.execute("DELETE FROM keys WHERE key = ?", (key,))
    connection.execute("DELETE FROM created WHERE key = ?", (key,))
    connection.execute("DELETE FROM owners WHERE key = ?", (key,))
    return _note(connection, action, key, "", None)


def _note(
    connection: sqlite3.Connection, action: str, key: str, value: str, expires: float | None
) -> Position:
    """Add a change to the history, and drop the oldest one."""
    revision = number(connection, "revision") + 1
    connection.execute("INSERT INTO history VALUES (?, ?, ?, ?, ?)", (revision, action, key, value, expires))
    set_fact(connection, "revision", revision)
    if number(connection, "floor") < revision - KEPT:
        connection.execute("DELETE FROM history WHERE revision <= ?", (revision - KEPT,))
        set_fact(connection, "floor", revision - KEPT)
    return _position(connection)


class EmbeddedClient:
    """``KeyClient`` of a store in this process. ``cancel`` ends this client and leaves the store open.

    ``owner`` is the owner of the keys it writes; empty for none.
    """

    api = "embedded"
    names_ipv6 = True

    def __init__(self, store: KeyStore, owner: str = "") -> None:
        self.store = store
        self.owner = owner
        self._is_cancelled = threading.Event()

    def root(self, prefix: str) -> str:
        return posixpath.normpath("/" + prefix.strip("/"))

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        self.check()
        if recursive:
            children, at = self.store.below(key)
            return KeyReply("get", StoredKey(key, "", None, at.index, is_dir=True), children, at)
        node, at = self.store.get(key)
        return KeyReply("get", node, (), at)

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        self.check()
        node, at = self.store.create(key, value, ttl, self.owner)
        return KeyReply("put", node, (), at)

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> KeyReply:
        self.check()
        node, at = self.store.replace(key, value, ttl, modified, self.owner)
        return KeyReply("put", node, (), at)

    def prolong(self, key: str, modified: int) -> float | None:
        self.check()
        return self.store.prolong(key, modified)

    def remove(self, key: str, modified: int) -> None:
        self.check()
        self.store.remove(key, modified)

    def watcher(self, key: str, *, recursive: bool, contact: Contact) -> EmbeddedWatcher:
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

    def __init__(self, client: EmbeddedClient, key: str, *, recursive: bool, contact: Contact) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive
        self._contact = contact

    def read(self, after: Position) -> KeyChanges:
        store = self.client.store
        deadline = clock.now() + POLL
        while True:
            writes = store.writes
            self.client.check()
            changes = store.changes(self._key, recursive=self._recursive, after=after)
            self._contact()
            if changes.replies or clock.now() > deadline:
                return changes
            store.listen(writes, TICK)
            store.tick()
            after = changes.at

    def cancel(self) -> None:
        self.client.cancel()

    def close(self) -> None:
        """Do nothing: a file has no connection."""


def open_file(path: str, *, create: bool = False) -> KeyStore:
    """Open the store in a file; ``create`` makes a missing file. Raises ``Fatal``."""
    return KeyStore(Database(Path(path).absolute(), create=create))


def store_of(store: KeyStore, network: str = "", randrange: Callable[[int], int] = randrange) -> EtcdStore:
    """Return the leases of a network in a file of this host; ``network`` is its name, or empty."""
    prefix = posixpath.join(PREFIX, network) if network else PREFIX
    name = f"{store.name} under {network}" if network else store.name
    return EtcdStore(
        EmbeddedClient(store, LOCAL), prefix, store.name, pause_time=1.0, randrange=randrange, name=name
    )


def config_of(text: str) -> str:
    """Return the network config that ``-network`` means: a network, or JSON. Raises ``Fatal``."""
    if not text.lstrip().startswith("{"):
        try:
            family = ip_network(text).version
        except ValueError as error:
            raise Fatal(f"-network: {error}", "give a network like 10.5.0.0/16, or JSON") from None
        named = (
            {"Network": text}
            if family == 4
            else {"EnableIPv4": False, "EnableIPv6": True, "IPv6Network": text}
        )
        text = json.dumps({**named, "Backend": {"Type": "vxlan"}})
    try:
        parse(text)
    except Retryable as error:
        raise Fatal(f"-network: {error.problem}", error.remedy) from None
    return text


def write_config(store: KeyStore, text: str) -> None:
    """Write the network config of ``-network``, unless the store has it.

    A bare network keeps the rest of a config that has this network. Raises ``Retryable`` and ``Fatal``.
    """
    wanted = config_of(text)
    try:
        node, _ = store.get(_CONFIG)
    except NotFound:
        store.create(_CONFIG, wanted, None)
        return
    if say_the_same(wanted, node.value) or (wanted != text and _has_network(node.value, wanted)):
        return
    store.replace(_CONFIG, wanted, None, node.modified)
    log.warning("Changed the network config in %s from %s to %s", store.name, node.value, wanted)


def _has_network(stored: str, wanted: str) -> bool:
    """Return True if two configs are for the same networks."""
    try:
        one, other = parse(stored), parse(wanted)
    except Retryable:
        return False
    return one.networks == other.networks
