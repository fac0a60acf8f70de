"""SQLite file of a store: checked when opened, written durably, never overwritten."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flanneld.errors import Cancelled, Fatal, FlannelError, Retryable, cause_of
from flanneld.runtime import files
from flanneld.runtime.clock import random_bytes, randrange

#: ``application_id`` in the file's header, "flan" in ASCII.
APPLICATION = 0x666C616E
#: ``user_version`` in the file's header: the format of the tables. A table more does not change it.
FORMAT = 1
#: Revisions that a new store and a backup skip at least. Cursors of another store, such as etcd, or of the
#: time after the backup, then name no revision of this one.
ERA = 1_000_000_000
#: The largest revision that leaves room for many eras in SQLite's 64 bits.
_LAST = 1 << 62
#: Seconds to wait for another process, such as ``flannelctl``, to end its transaction.
_BUSY = 5.0
_HEADER = b"SQLite format 3\0"
_RESTORE = "restore a backup: flannelctl store restore"

_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE keys (
    key TEXT PRIMARY KEY, value TEXT NOT NULL, ttl INTEGER, expires REAL, modified INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX keys_by_expiry ON keys (expires) WHERE expires IS NOT NULL;
CREATE TABLE history (
    revision INTEGER PRIMARY KEY, action TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, expires REAL
);
CREATE TABLE tokens (id TEXT PRIMARY KEY, ends INTEGER NOT NULL, is_revoked INTEGER NOT NULL) WITHOUT ROWID;
"""

#: Tables that files of earlier versions lack. Those versions write the others without them: the revision of
#: each key's creation; the owner of a key as of the revision ``modified``, so of no later write.
_LATER = """
CREATE TABLE IF NOT EXISTS created (key TEXT PRIMARY KEY, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owners (
    key TEXT PRIMARY KEY, modified INTEGER NOT NULL, owner TEXT NOT NULL
) WITHOUT ROWID;
"""


class Database:
    """Connection to the file, for one thread at a time. Other processes may use the file meanwhile.

    ``create`` makes a missing file. Raises ``Fatal`` for an unusable file.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path = path.resolve()
        self._lock = threading.Lock()
        self._is_closed = False
        if create and not path.exists():
            _create(path)
        self._file = _check_header(path)
        try:
            self._connection = _connect(path)
            _check_content(self._connection, path)
            self._connection.executescript(_LATER)
        except sqlite3.Error as error:
            raise _fatal(path, error) from None

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read in one transaction, with a consistent state of the store. Raises ``Retryable``."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Write in one transaction, on disk when the block ends; an exception undoes it.

        Raises ``Retryable`` if the write fails; then nothing is changed.
        """
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    def backup(self, path: Path) -> None:
        """Copy the store to a new file, while others write. Raises ``Fatal``."""
        with _made(path) as copy, self._lock, self._understood():
            self._connection.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
            _begin_era(copy)

    def close(self) -> None:
        """End every use. From any thread, repeatedly."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._connection.close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock, self._understood():
            if _identity(self.path) != self._file:
                raise Retryable(
                    f"{self.path} was moved away or replaced while in use",
                    "put it back, or restart its server to use what is there",
                )
            self._connection.execute(begin)
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # After a full disk SQLite has ended the transaction itself.
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _understood(self) -> Iterator[None]:
        if self._is_closed:
            raise Cancelled
        try:
            yield
        except sqlite3.Error as error:
            reason = _fatal(self.path, error)
            raise Retryable(reason.problem, reason.remedy) from None


def fact(connection: sqlite3.Connection, name: str) -> object:
    """Return a value by its name; None if it is missing."""
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return row[0] if row else None


def number(connection: sqlite3.Connection, name: str) -> int:
    """Return a number by its name; 0 if it is missing."""
    value = fact(connection, name)
    return value if isinstance(value, int) else 0


def set_fact(connection: sqlite3.Connection, name: str, value: str | bytes | float) -> None:
    """Write a value inside the caller's transaction."""
    connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def restore(backup: Path, path: Path) -> None:
    """Restore a backup to a new file. Raises ``Fatal``."""
    source = Database(backup)
    try:
        source.backup(path)
    finally:
        source.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
    # Without FULL a power cut may undo acknowledged writes.
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def _create(path: Path) -> None:
    """Create an empty store in one step: an existing file is always complete."""
    try:
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise Fatal(f"cannot make {path.parent}: {cause_of(error)}", "correct -store") from None
    with _made(path) as connection:
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA application_id={APPLICATION}")
        connection.execute(f"PRAGMA user_version={FORMAT}")
        _begin_era(connection)


def _begin_era(connection: sqlite3.Connection) -> None:
    """Start a history of its own for a new store or a copy. Its clock stands still until first use."""
    revision = number(connection, "revision") + ERA + randrange(ERA)
    connection.execute("DELETE FROM history")
    set_fact(connection, "cluster", random_bytes(8).hex())
    set_fact(connection, "revision", revision)
    set_fact(connection, "floor", revision)
    set_fact(connection, "boot", "")


@contextmanager
def _made(path: Path) -> Iterator[sqlite3.Connection]:
    """Write a file beside ``path``, and move it there once it is complete. Raises ``Fatal``."""
    for name in (path, _log_of(path)):
        if name.exists():
            raise Fatal(f"{name} is there", "it may hold leases: move it away, or choose another name")
    temporary = path.with_name(f".{path.name}.{random_bytes(8).hex()}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(temporary, isolation_level=None)
        try:
            yield connection
            connection.execute("PRAGMA journal_mode=WAL")
        finally:
            connection.close()
        files.sync(temporary)
        path.hardlink_to(temporary)
        files.sync(path.parent)
    except (OSError, sqlite3.Error) as error:
        raise Fatal(
            f"cannot make {path}: {cause_of(error)}", "see its directory, and its free space"
        ) from None
    finally:
        for name in (temporary, _log_of(temporary), Path(f"{temporary}-shm")):
            name.unlink(missing_ok=True)


def _log_of(path: Path) -> Path:
    """Return the path of SQLite's write-ahead log."""
    return Path(f"{path}-wal")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, None if it cannot be seen."""
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino
    return None


def _check_header(path: Path) -> tuple[int, int]:
    """Return device and inode. Raise ``Fatal`` unless it is an SQLite file that this user may write."""
    try:
        with path.open("r+b") as file:
            header = file.read(len(_HEADER))
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        raise Fatal(
            f"there is no store at {path}", "correct -store, or start flanneld -listen with it"
        ) from None
    except OSError as error:
        raise Fatal(
            f"cannot write {path}: {cause_of(error)}", "see its owner, mode and file system"
        ) from None
    if header != _HEADER:
        raise Fatal(
            f"{path} is no store of flanneld", f"choose another -store, or move it away and {_RESTORE}"
        )
    if found.st_nlink > 1:  # each name would have a log of its own
        remedy = f"remove the others: find / -xdev -samefile {path}"
        raise Fatal(f"{path} is one of {found.st_nlink} names of a file", remedy)
    return found.st_dev, found.st_ino


def _check_content(connection: sqlite3.Connection, path: Path) -> None:
    """Raise ``Fatal`` for a file of another program or format, or one that is damaged."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise Fatal(f"{path} belongs to another program", "choose another -store")
    if version != FORMAT:
        raise Fatal(
            f"{path} has format {version}, this flanneld reads {FORMAT}", "use the flanneld that made it"
        )
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found == "ok" and number(connection, "revision") > _LAST:
        found = "its revision is too large"
    if found != "ok":
        raise Fatal(f"{path} is damaged: {found}", f"move it away and {_RESTORE}")


def _fatal(path: Path, error: sqlite3.Error) -> FlannelError:
    """Return the error for an operator, from SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    remedies = {
        sqlite3.SQLITE_FULL: "free space there",
        sqlite3.SQLITE_READONLY: "see its owner, mode and file system",
        sqlite3.SQLITE_CANTOPEN: "see its owner, mode and file system",
        sqlite3.SQLITE_IOERR: "see the kernel's log about this disk",
        sqlite3.SQLITE_CORRUPT: f"move it away and {_RESTORE}",
        sqlite3.SQLITE_NOTADB: f"move it away and {_RESTORE}",
        sqlite3.SQLITE_BUSY: "see which other program has it open",
    }
    return Fatal(f"cannot use the store {path}: {error}", remedies.get(code, _RESTORE))
