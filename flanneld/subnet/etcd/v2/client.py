"""Client of etcd's v2 API: python-etcd on our own transport.

This is the only importer of python-etcd. On its own it repeats requests that timed out, fails for good once
every server has failed, and cannot be interrupted. All its requests go through ``api_execute``, which
``V2Client`` overrides.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import etcd
from msgspec.structs import replace

from flanneld.subnet.etcd.endpoints import Server
from flanneld.subnet.etcd.http import Answer, Request
from flanneld.subnet.etcd.keys import (
    Conflict,
    KeyChanges,
    NoConfig,
    NotFound,
    Position,
    PossibleGap,
    RelistNeeded,
    Reply,
    check_reread,
)
from flanneld.subnet.etcd.transport import Send, Transport
from flanneld.subnet.etcd.v2 import answers


class V2Client(etcd.Client):  # type: ignore[misc] # python-etcd has no types
    """``keys.Client`` on v2. Each watch needs a client of its own.

    ``contact`` is called when a response begins, which a long poll does before there is a change.
    """

    api = "v2"
    names_ipv6 = False

    def __init__(self, transport: Transport, contact: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._transport = transport
        self._contact = contact
        self._after: Position | None = None
        self._reread = threading.Event()

    def root(self, prefix: str) -> str:
        return "/" + posixpath.normpath(f"/{prefix}").lstrip("/")

    def fetch(self, key: str, *, recursive: bool = False) -> Reply:
        reply: Reply = self.read(key, quorum=True, recursive=recursive, sorted=False)
        return reply

    def create(self, key: str, value: str, ttl: int | None) -> Reply:
        reply: Reply = self.write(key, value, ttl=ttl, prevExist=False)
        return reply

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> Reply:
        try:
            reply: Reply = self.write(key, value, ttl=ttl, prevIndex=modified)
        except NotFound:
            raise Conflict(f"{key} has gone") from None
        return reply

    def prolong(self, key: str, modified: int) -> None:
        """Return None: Go flanneld 0.12 writes the lease again, and so do we."""

    def remove(self, key: str) -> None:
        self.delete(key)

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> V2Watcher:
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
            f"write it: ETCDCTL_API=2 etcdctl set {key} '{example}'"
            " (what is written through the v3 API cannot be seen here)",
        )

    def poll(self, key: str, after: Position, *, recursive: bool) -> Reply:
        """Wait for the first change of a key after a position, at most for the poll timeout.

        Raises ``RelistNeeded`` if changes since then are lost.
        """
        self._after = after
        try:
            reply: Reply = self.watch(key, index=after.index + 1, recursive=recursive)
        finally:
            self._after = None
        if reply.node is None:
            return reply
        if reply.node.modified <= after.index:
            raise RelistNeeded("etcd repeats what it reported before")
        return replace(reply, at=Position(reply.node.modified, reply.at.cluster))

    def reread(self) -> None:
        self._reread.set()
        self.reconnect()

    def reconnect(self) -> None:
        self._transport.reconnect()

    def cancel(self) -> None:
        self._transport.cancel()

    def close(self) -> None:
        """Close the connection. Only for the thread that uses this client."""
        self._transport.close()

    def api_execute(
        self, path: str, method: str, params: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Reply:
        """Send a request. All of python-etcd's requests go through this method."""
        del timeout  # python-etcd's own timeout; ours are in Timeouts
        query = {name: value for name, value in (params or {}).items() if name not in ("value", "ttl")}
        request = self._request(path, method, params or {}, query)

        def attempt(server: Server, send: Send) -> Reply:
            login = server.basic_login() | dict(request.headers)
            return answers.read(send(replace(request, headers=login)))

        repeatable = method != "DELETE" and query.get("prevExist") != "false"
        return self._transport.ask(attempt, repeatable=repeatable)

    def _request(
        self, path: str, method: str, params: Mapping[str, Any], query: Mapping[str, Any]
    ) -> Request:
        """Return a request as Go's client sends it: value and TTL in the body, the rest in the query."""
        form = {name: value for name, value in params.items() if name not in query}
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/x-www-form-urlencoded"} if form else {}
        poll_timeout = None if self._after is None else self._transport.timeouts.poll
        after, losses = self._after, self._transport.losses

        def on_head(answer: Answer) -> None:
            if answer.at.index and answer.status < 500:
                self._contact()
            if after is not None and answer.status == 200:
                # Not earlier: a reread shuts the connection down, so it must be there by then.
                check_reread(self._reread)
                answers.check_history(after, answer.at)
                if self._transport.losses > losses:
                    raise PossibleGap("the connection was lost, or given up")

        return Request(method, target, urlencode(form) if form else None, headers, poll_timeout, on_head)

    def _result_from_response(self, response: Reply) -> Reply:
        return response


class V2Watcher:
    """``keys.Watcher`` on v2: a sequence of long polls, with one change each."""

    def __init__(self, client: V2Client, key: str, *, recursive: bool) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive

    def read(self, after: Position) -> KeyChanges:
        reply = self.client.poll(self._key, after, recursive=self._recursive)
        if reply.node is None:
            self._prove()
            return KeyChanges((), reply.at)
        return KeyChanges((reply,), reply.at)

    def _prove(self) -> None:
        """Make a quorum read: a member that lost its peers accepts polls, and never answers them."""
        try:
            # In a directory, read a missing key: that has the smallest response.
            self.client.fetch(posixpath.join(self._key, "nobody") if self._recursive else self._key)
        except NotFound:
            return  # a quorum answered

    def reread(self) -> None:
        self.client.reread()

    def reconnect(self) -> None:
        self.client.reconnect()

    def cancel(self) -> None:
        self.client.cancel()

    def close(self) -> None:
        self.client.close()
