"""Interface and values common to etcd's v2 and v3 APIs."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from flanneld.config import Config, parse
from flanneld.errors import Retryable
from flanneld.model import Event
from flanneld.subnet.list_watch import Contact, ListWatch, RelistNeeded


class Position(Struct, frozen=True, gc=False):
    """Point in the history of an etcd cluster: an index of v2 or a revision of v3."""

    index: int
    cluster: str = ""


class StoredKey(Struct, frozen=True, gc=False):
    """A key. ``modified`` is the index of its last change.

    ``created`` is that of its creation, 0 if unknown. In v2 a renewal by Go creates the key again.

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


class NoConfig(Retryable):
    """Error for a network config that the operator has not written yet."""


class NoSuchApi(Retryable):
    """Error for servers that answer, but lack this API of etcd."""


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

    def remove(self, key: str, modified: int) -> None:
        """Delete a key if its last change is at ``modified``. Raises ``NotFound``, or ``Conflict`` as above.

        In v2 without that condition: Go flanneld 0.12 cannot parse the event of a conditional removal. There
        a removal whose answer was lost is not repeated.
        """
        ...

    def watcher(self, key: str, *, recursive: bool, contact: Contact) -> Watcher:
        """Return a watcher of a key or a directory, with a connection of its own, for one list.

        ``contact`` is called when a watch has begun.
        """
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

    def cancel(self) -> None:
        """Make each ``read`` raise ``Cancelled``. May be called repeatedly, from any thread."""
        ...

    def close(self) -> None:
        """Close the connection. Only for the thread that reads."""
        ...


_EXAMPLE = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'


def read_config(
    client: KeyClient, prefix: str, is_elsewhere: Callable[[str], bool] = lambda _: False
) -> Config:
    """Return the network config. Raises ``NoConfig`` without one, or other ``Retryable``."""
    key = config_key(client, prefix)
    try:
        reply = client.fetch(key)
    except NotFound:
        raise client.missing(key, _EXAMPLE, elsewhere=is_elsewhere(key)) from None
    return parse(reply.node.value if reply.node else "")


def config_key(client: KeyClient, prefix: str) -> str:
    return posixpath.join(client.root(prefix), "config")


NO_ACCESS = "check -etcd-username, -etcd-password and the rights of that user"
#: Words of etcd's errors (api/v3rpc/rpctypes/error.go), and what helps.
_REMEDIES = {
    "space exceeded": "its alarm is NOSPACE: etcdctl compact REVISION && etcdctl defrag --cluster && etcdctl"
    " alarm disarm, with the revision that etcdctl endpoint status -w fields shows",
    **dict.fromkeys(
        ("no leader", "leader changed", "leader failure", "request timed out"),
        "it has no quorum: most of its members have to run and to reach each other, as etcdctl endpoint"
        " status --cluster shows",
    ),
}


#: The v2 API lists no key that begins so (etcd, server/etcdserver/api/v2store/node.go, IsHidden). A name then
#: begins with a character that URL-safe base64 lacks.
_HIDDEN, _SHOWN = "_", "~"


def key_of(name: str, api: str) -> str:
    """Return a name in URL-safe base64 as a key that this API lists."""
    return name.replace(_HIDDEN, _SHOWN, 1) if api == "v2" and name.startswith(_HIDDEN) else name


def name_in(key: str) -> str:
    """Return the name at the end of such a key's path."""
    return posixpath.basename(key).replace(_SHOWN, _HIDDEN)


def remedy_for(text: str) -> str:
    """Return the remedy for an error of etcd with this text."""
    return next((remedy for words, remedy in _REMEDIES.items() if words in text), "see the log of etcd")


def check_history(after: Position, now: Position) -> None:
    """Raise ``RelistNeeded`` unless a server at ``now`` can deliver the changes after a position.

    If the server's index is lower, etcd would wait silently until it has caught up.
    """
    if now.cluster != after.cluster:
        raise RelistNeeded("the etcd cluster was replaced")
    if now.index < after.index:
        raise RelistNeeded("etcd's revision went back; was it restored?")


#: Function that reads the current state; returns its events and the position to watch from.
Start = Callable[[KeyClient], tuple[list[Event], Position]]
#: Function that returns the events of changes. Raises ``RelistNeeded`` if everything must be read again.
EventsOf = Callable[[Sequence[KeyReply]], list[Event]]


class KeySource:
    """``Source`` on a watcher: ``start`` lists with its client, ``news`` turns changes into events."""

    def __init__(self, watcher: Watcher, start: Start, news: EventsOf) -> None:
        self._watcher = watcher
        self._start = start
        self._news = news
        self.cancel = watcher.cancel
        self.close = watcher.close

    def start(self, resume: Position | None) -> tuple[list[Event], Position]:
        del resume  # see ``watch_keys``
        return self._start(self._watcher.client)

    def changes(self, after: Position) -> tuple[list[Event], Position]:
        changes = self._watcher.read(after)
        return self._news(changes.replies), changes.at


def watch_keys(
    client: KeyClient, key: str, start: Start, news: EventsOf, *, recursive: bool, pace: float
) -> ListWatch[Position]:
    """Return the watch of a key, or of all keys of a directory.

    It lists after each loss of etcd. Neither the revision nor the cluster ID reveals a restored backup: the
    restored history may have overtaken ours, and a cluster restored with the same member URLs and token has
    the same ID.
    """

    def open_source(contact: Contact) -> KeySource:
        return KeySource(client.watcher(key, recursive=recursive, contact=contact), start, news)

    return ListWatch(open_source, key, back="etcd is back", pace=pace)
