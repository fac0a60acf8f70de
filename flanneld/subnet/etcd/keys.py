"""What etcd holds and how it is asked: the words that both of its APIs share (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from flanneld.errors import Retryable

if TYPE_CHECKING:
    from threading import Event


class Position(Struct, frozen=True, gc=False):
    """A point in the history of one cluster of etcd: an index of v2, a revision of v3."""

    index: int
    cluster: str = ""


class Node(Struct, frozen=True, gc=False):
    """A key. ``modified`` is the index of its last change.

    ``ttl`` is in seconds: None if the key stays, infinite if it does not and nobody asked for how long.
    """

    key: str
    value: str
    ttl: float | None
    modified: int
    is_dir: bool = False


class Reply(Struct, frozen=True, gc=False):
    """What etcd said. A long poll without news has no ``node``; ``children`` are those of a directory.

    ``at`` is how far the history of the key is known now.
    """

    action: str
    node: Node | None
    children: tuple[Node, ...]
    at: Position


class Changes(Struct, frozen=True, gc=False):
    """What happened to a watched key up to ``at``, in order; nothing, if a wait was in vain."""

    replies: tuple[Reply, ...]
    at: Position


class NotFound(Retryable):
    """There is no such key at ``at``.

    This and the next two are answers that the asker expects. Where it does not, they are ``Retryable``.
    """

    def __init__(self, at: Position) -> None:
        super().__init__(f"no such key at index {at.index}")
        self.at = at


class Conflict(Retryable):
    """The condition of a write was not met: somebody else was there first."""


class ListAgain(Retryable):
    """A watch cannot go on from where it was; the text says why."""


class Unsure(ListAgain):
    """The same, though perhaps nothing is wrong."""


class NoConfig(Retryable):
    """An operator has yet to write the network config."""


class Client(Protocol):
    """Requests in one API of etcd, of one thread at a time over one connection.

    Any request may raise ``Retryable``, and raises ``Cancelled`` after ``cut``.
    """

    #: "v2" or "v3".
    api: str
    #: Flannel of the time of this API names PublicIPv6 in each lease, be there one or not.
    names_ipv6: bool

    def root(self, prefix: str) -> str:
        """The key that the operator means by a prefix."""
        ...

    def fetch(self, key: str, *, recursive: bool = False) -> Reply:
        """Read a key, or all in a directory, as the majority of the servers knows it. Raises ``NotFound``."""
        ...

    def create(self, key: str, value: str, ttl: int | None) -> Reply:
        """Write a key that must not be there. Raises ``Conflict`` if it is.

        After ``Retryable`` it may have been written nevertheless.
        """
        ...

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> Reply:
        """Write a key that must not have changed since that index. Raises ``Conflict`` if it has."""
        ...

    def prolong(self, key: str, modified: int) -> float | None:
        """Let a key that is as we wrote it, at that index, last as long again, without a change to it.

        Gives its new TTL in seconds, None if this cannot be; then it has to be written again.
        """
        ...

    def remove(self, key: str) -> None:
        """Delete a key, whatever it holds. Raises ``NotFound``."""
        ...

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> Watcher:
        """Watch a key, or all in a directory, over a connection of its own."""
        ...

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        """What to say when the network config is not there; ``elsewhere``: but in the other API."""
        ...

    def reconnect(self) -> None:
        """Give up the connection of now: it may lead nowhere any more. May be called from any thread."""
        ...

    def cut(self) -> None:
        """End what goes on and refuse what comes. May be called from any thread, repeatedly."""
        ...


class Watcher(Protocol):
    """A connection on which etcd tells what happens."""

    @property
    def client(self) -> Client:
        """For reading what is there."""
        ...

    def read(self, after: Position) -> Changes:
        """Wait for the next changes after a position, or return none after a while.

        Raises ``ListAgain`` when what happened since then cannot be had.
        """
        ...

    def reread(self) -> None:
        """Let ``read``, now or when it is called next, raise ``ListAgain``. May be called from any thread."""
        ...

    def reconnect(self) -> None: ...

    def cut(self) -> None: ...

    def close(self) -> None:
        """Give up the connection; for the thread that reads."""
        ...


def check_history(after: Position, now: Position) -> None:
    """See from the first word of a server whether the changes after a position will come.

    If the server's index is lower, etcd waits in silence until it has caught up. Raises ``ListAgain``.
    """
    if now.cluster != after.cluster:
        raise ListAgain("this is another cluster of etcd than before")
    if now.index < after.index:
        raise ListAgain("etcd is behind what it said before; was it restored?")


def check_reread(wanted: Event) -> None:
    """Raise ``ListAgain`` once if somebody wants that."""
    if wanted.is_set():
        wanted.clear()
        raise ListAgain("somebody wants to be sure")
