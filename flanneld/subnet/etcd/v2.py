"""Client of etcd's v2 API: python-etcd on our own transport.

This is the only importer of python-etcd. On its own it repeats requests that timed out, fails for good once
every server has failed, and cannot be interrupted. All its requests go through ``api_execute``, which
``V2Client`` overrides.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

import etcd
from msgspec.structs import replace

from flanneld.subnet.etcd import v2_messages
from flanneld.subnet.etcd.keys import Conflict, KeyChanges, KeyReply, NoConfig, NotFound, Position
from flanneld.subnet.etcd.transport import Answer, Request, Send, Server, Transport
from flanneld.subnet.list_watch import Contact, PossibleGap, RelistNeeded

#: Changes that etcd queues for a stream.
_QUEUE = 100
#: Seconds of silence after which a stream that delivered as many is requested again.
_QUIET = 0.05


class V2Client(etcd.Client):  # type: ignore[misc] # python-etcd has no types
    """``KeyClient`` on v2. Each watch needs a client of its own.

    ``contact`` is called when a response begins, which a long poll does before there is a change.
    """

    api = "v2"
    names_ipv6 = False
    version_prefix = "/v2"

    def __init__(self, transport: Transport, contact: Contact = lambda: None) -> None:
        # Without python-etcd's own, which would load urllib3 for connections that are never used.
        self._transport = transport
        self._contact = contact

    def root(self, prefix: str) -> str:
        return "/" + posixpath.normpath(f"/{prefix}").lstrip("/")

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        reply: KeyReply = self.read(key, quorum=True, recursive=recursive, sorted=False)
        return reply

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        reply: KeyReply = self.write(key, value, ttl=ttl, prevExist=False)
        return reply

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> KeyReply:
        try:
            reply: KeyReply = self.write(key, value, ttl=ttl, prevIndex=modified)
        except NotFound:
            raise Conflict(f"{key} has gone") from None
        return reply

    def prolong(self, key: str, modified: int) -> None:
        """Return None: Go flanneld 0.12 writes the lease again, and so do we."""

    def remove(self, key: str, modified: int) -> None:
        del modified  # see ``KeyClient.remove``
        self.delete(key)

    def watcher(self, key: str, *, recursive: bool, contact: Contact) -> V2Watcher:
        own = Transport(self._transport.servers, self._transport.timeouts)
        return V2Watcher(V2Client(own, contact), key, recursive=recursive)

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        if elsewhere:
            return NoConfig(
                f"found a v3-only config at {key} in etcd, and none in v2",
                "set -etcd-api=v3, or write the config through the v2 API",
            )
        return NoConfig(
            f"etcd answers, but has no network config at {key}",
            f"write it with flannelctl config set, or: ETCDCTL_API=2 etcdctl set {key} '{example}'"
            " (what is written through the v3 API cannot be seen here)",
        )

    def changes(
        self, key: str, after: Position, *, recursive: bool, is_stream: bool, timeout: float = math.inf
    ) -> tuple[list[KeyReply], Position]:
        """Wait for the next changes of a key after a position.

        Return them, and the position of the history when etcd began to watch; none after ``timeout``
        seconds, or the poll timeout. With ``is_stream`` one request serves many calls, until one returns
        nothing or another request is made. Raises ``RelistNeeded`` if changes since ``after`` are lost.
        """
        # Not by python-etcd, which knows no streams.
        query = f"wait=true&recursive={str(recursive).lower()}&waitIndex={after.index + 1}"
        request = Request(
            "GET",
            f"{quote(self.key_endpoint + key)}?{query}{'&stream=true' if is_stream else ''}",
            poll_timeout=min(timeout, self._transport.timeouts.poll),
            is_stream=is_stream,
            on_head=partial(self._began, after, self._transport.losses),
        )
        # A watch that breaks off is a failure, as in v3: the next server may lack changes that this one had.
        answer = self._send(request, repeatable=False)
        found = answer if isinstance(answer, list) else [answer]
        begun, last = found[0].at, after.index
        for reply in found:
            if reply.node is None:
                return [], begun
            if reply.node.modified <= last:
                self.close()
                raise RelistNeeded("etcd repeats what it reported before")
            last = reply.node.modified
        return found, begun

    def reconnect(self) -> None:
        self._transport.reconnect()

    def cancel(self) -> None:
        self._transport.cancel()

    def close(self) -> None:
        """Close the connection. Only for the thread that uses this client."""
        self._transport.close()

    def api_execute(
        self, path: str, method: str, params: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> KeyReply | list[KeyReply]:
        """Send a request as Go's client does: value and TTL in the body, the rest in the query.

        All of python-etcd's requests go through this method.
        """
        del timeout  # python-etcd's own timeout; ours are in Timeouts
        query = {name: value for name, value in (params or {}).items() if name not in ("value", "ttl")}
        form = {name: value for name, value in (params or {}).items() if name not in query}
        request = Request(
            method,
            quote(path) + (f"?{urlencode(query)}" if query else ""),
            urlencode(form) if form else None,
            {"Content-Type": "application/x-www-form-urlencoded"} if form else {},
            on_head=partial(self._began, None, 0),
        )
        return self._send(request, repeatable=method != "DELETE" and query.get("prevExist") != "false")

    def _send(self, request: Request, *, repeatable: bool) -> KeyReply | list[KeyReply]:
        """Return the reply; for a stream a list."""

        def attempt(server: Server, send: Send) -> KeyReply | list[KeyReply]:
            login = server.basic_login() | dict(request.headers)
            answer = send(replace(request, headers=login))
            return v2_messages.changes(answer) if request.is_stream else v2_messages.read(answer)

        return self._transport.ask(attempt, repeatable=repeatable)

    def _began(self, after: Position | None, losses: int, answer: Answer) -> None:
        """Look at the head of a response, for a watch whether it shows all changes after a position."""
        if answer.at.index and answer.status < 500:
            self._contact()
        if after is not None and answer.status == 200:
            v2_messages.check_history(after, answer.at)
            if self._transport.losses > losses:
                raise PossibleGap("another server answers than before")

    def _result_from_response(self, response: KeyReply) -> KeyReply:
        return response


class V2Watcher:
    """``keys.Watcher`` on v2: a stream of changes, or long polls that catch up with the history.

    Source: etcd's ``store/watcher_hub.go`` and ``store/watcher.go``. A watch that begins in the history
    delivers one change from there, and no other even if it is a stream. A stream of which etcd has to queue
    too many changes ends without a word: it stays open and silent.
    """

    def __init__(self, client: V2Client, key: str, *, recursive: bool) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive
        #: Position that the open stream has reached, if there is one.
        self._reached: Position | None = None
        #: True if the last change was from the history, and not the last one there.
        self._is_behind = False
        #: Changes delivered since it was last asked. None can be lost before as many as fit the queue.
        self._delivered = 0

    @property
    def patience(self) -> float:
        """Seconds of silence after which it is asked whether etcd has dropped the stream's watch."""
        return _QUIET if self._delivered >= _QUEUE else math.inf

    def read(self, after: Position) -> KeyChanges:
        patience = self.patience
        changes, begun = self._read(after, patience)
        if not changes.replies and patience < math.inf:
            self._delivered = 0
            changes, begun = self._read(after, math.inf)
        if not changes.replies:
            self._prove()
        while self._is_behind and changes.at.index < begun.index:
            # Changes of other keys may be all that is left there.
            more, _ = self._read(changes.at, _QUIET)
            changes = KeyChanges((*changes.replies, *more.replies), more.at)
        return changes

    def _read(self, after: Position, timeout: float) -> tuple[KeyChanges, Position]:
        """Return changes, and the position of the history when etcd began to watch for them."""
        if self._reached not in (None, after):
            self.client.close()
            self._is_behind = False
        is_stream, self._reached = not self._is_behind, None
        replies, begun = self.client.changes(
            self._key, after, recursive=self._recursive, is_stream=is_stream, timeout=timeout
        )
        if not replies:
            self._is_behind = False
            # A short silence does not prove that there is nothing in the history.
            reached = max(after.index, begun.index) if timeout == math.inf else after.index
            return KeyChanges((), Position(reached, begun.cluster)), begun
        at = Position(_index(replies[-1]), begun.cluster)
        self._delivered += len(replies)
        self._is_behind = at.index < begun.index
        if at.index > begun.index:
            self._reached = at if is_stream else None
        elif is_stream:
            self.client.close()
        return KeyChanges(tuple(replies), at), begun

    def _prove(self) -> None:
        """Make a quorum read: a member that lost its peers accepts polls, and never answers them."""
        try:
            # In a directory, read a missing key: that has the smallest response.
            self.client.fetch(posixpath.join(self._key, "nobody") if self._recursive else self._key)
        except NotFound:
            return  # a quorum answered

    def cancel(self) -> None:
        self.client.cancel()

    def close(self) -> None:
        self.client.close()


def _index(reply: KeyReply) -> int:
    assert reply.node is not None
    return reply.node.modified
