"""Interface and values common to etcd's v2 and v3 APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from flanneld.errors import Retryable

if TYPE_CHECKING:
    from threading import Event


class Position(Struct, frozen=True, gc=False):
    """Point in the history of an etcd cluster: an index of v2 or a revision of v3."""

    index: int
    cluster: str = ""


class StoredKey(Struct, frozen=True, gc=False):
    """A key. ``modified`` is the index of its last change.

    ``created`` is that of its creation. It is 0 if unknown, and in v2, where a renewal by Go sets it anew.

    ``ttl`` is in seconds. It is None for a key without expiry, infinite if it expires at a time not asked
    for.
    """

    key: str
    value: str
    ttl: float | None
    modified: int
    is_dir: bool = False
    created: int = 0


class KeyReply(Struct, frozen=True, gc=False):
    """Result of a request.

    A long poll without a change has no ``node``; ``children`` are a directory's entries.

    ``at`` is the position up to which the key's history is known.
    """

    action: str
    node: StoredKey | None
    children: tuple[StoredKey, ...]
    at: Position


class KeyChanges(Struct, frozen=True, gc=False):
    """Changes of a watched key up to ``at``, in order. Empty if the wait timed out."""

    replies: tuple[KeyReply, ...]
    at: Position


class NotFound(Retryable):
    """Error for a key that does not exist at ``at``.

    Callers expect this and the next two errors. Others handle them as ``Retryable``.
    """

    def __init__(self, at: Position) -> None:
        super().__init__(f"no such key at index {at.index}")
        self.at = at


class Conflict(Retryable):
    """Error for a conditional write whose condition did not hold: another writer was first."""


class RelistNeeded(Retryable):
    """Error for a watch that cannot continue from its position: relist. The text gives the reason."""


class PossibleGap(RelistNeeded):
    """``RelistNeeded`` as a precaution: perhaps no event was lost."""


class NoConfig(Retryable):
    """Error for a network config that the operator has not written yet."""


class KeyClient(Protocol):
    """Client of one etcd API, for one request at a time over one connection.

    Any request may raise ``Retryable``. After ``cancel`` each raises ``Cancelled``.
    """

    #: "v2" or "v3".
    api: str
    #: True if leases always have a PublicIPv6 field, as flannel of this API's time writes it.
    names_ipv6: bool

    def root(self, prefix: str) -> str:
        """Return the key that an operator means by a prefix."""
        ...

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        """Read a key, or all keys of a directory, with a quorum read. Raises ``NotFound``."""
        ...

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        """Write a key that must not exist. Raises ``Conflict`` if it does.

        After ``Retryable`` it may have been written nevertheless.
        """
        ...

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> KeyReply:
        """Write a key if its last change is at ``modified``. Raises ``Conflict`` if it changed since."""
        ...

    def prolong(self, key: str, modified: int) -> float | None:
        """Renew the TTL of a key that we wrote at ``modified``, without changing the key.

        Return the new TTL in seconds, or None if that is impossible; then the key must be written again.
        """
        ...

    def remove(self, key: str) -> None:
        """Delete a key unconditionally. Raises ``NotFound``."""
        ...

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> Watcher:
        """Return a watcher of a key or a directory, with a connection of its own."""
        ...

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        """Return the error for a missing network config. ``elsewhere``: the other API has one."""
        ...

    def reconnect(self) -> None:
        """Drop the current connection, which may be dead. May be called from any thread."""
        ...

    def cancel(self) -> None:
        """Abort the current request and refuse later ones. May be called repeatedly, from any thread."""
        ...


class Watcher(Protocol):
    """Watch of a key or a directory over a connection of its own."""

    @property
    def client(self) -> KeyClient:
        """Client for reading the current state."""
        ...

    def read(self, after: Position) -> KeyChanges:
        """Wait for the next changes after a position; return none after a timeout.

        Raises ``RelistNeeded`` if changes since then are lost.
        """
        ...

    def reread(self) -> None:
        """Make the current or next ``read`` raise ``RelistNeeded``. May be called from any thread."""
        ...

    def reconnect(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None:
        """Close the connection. Only for the thread that reads."""
        ...


def check_history(after: Position, now: Position) -> None:
    """Raise ``RelistNeeded`` unless a server at ``now`` can deliver the changes after a position.

    If the server's index is lower, etcd would wait silently until it has caught up.
    """
    if now.cluster != after.cluster:
        raise RelistNeeded("the etcd cluster was replaced")
    if now.index < after.index:
        raise RelistNeeded("etcd's revision went back; was it restored?")


def check_reread(wanted: Event) -> None:
    """Raise ``RelistNeeded`` if a reread was requested, and clear the request."""
    if wanted.is_set():
        wanted.clear()
        raise RelistNeeded("requested by the removal guard")
