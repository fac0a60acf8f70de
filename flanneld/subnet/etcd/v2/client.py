"""etcd's v2 API through python-etcd, over our own transport.

The only importer of python-etcd. It alone repeats what timed out, is stuck once every server has failed,
and cannot be interrupted. Each of its requests ends up in ``api_execute``, which ``Client`` replaces.
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
    Changes,
    Conflict,
    ListAgain,
    NoConfig,
    NotFound,
    Position,
    Reply,
    Unsure,
    check_reread,
)
from flanneld.subnet.etcd.transport import Send, Transport
from flanneld.subnet.etcd.v2 import answers


class Client(etcd.Client):  # type: ignore[misc] # python-etcd has no types
    """``etcd_keys.Client`` on v2: whoever watches needs a client of its own.

    ``contact`` is called when etcd begins to answer, which for a long poll is long before there is news.
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
        """Go flanneld 0.12 writes a lease anew, and so do we."""

    def remove(self, key: str) -> None:
        self.delete(key)

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> Poller:
        own = Transport(self._transport.servers, self._transport.timeouts)
        return Poller(Client(own, contact), key, recursive=recursive)

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
        """Wait for the first change of a key after a position, for as long as a poll may last.

        Raises ``ListAgain`` when what happened since then cannot be had.
        """
        self._after = after
        try:
            reply: Reply = self.watch(key, index=after.index + 1, recursive=recursive)
        finally:
            self._after = None
        if reply.node is None:
            return reply
        if reply.node.modified <= after.index:
            raise ListAgain("etcd repeats what it reported before")
        return replace(reply, at=Position(reply.node.modified, reply.at.cluster))

    def reread(self) -> None:
        self._reread.set()
        self.reconnect()

    def reconnect(self) -> None:
        self._transport.reconnect()

    def cut(self) -> None:
        self._transport.cut()

    def close(self) -> None:
        """Give up the connection; for the thread that uses this client."""
        self._transport.close()

    def api_execute(
        self, path: str, method: str, params: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Reply:
        """The place where all of python-etcd's requests meet."""
        del timeout  # python-etcd's idea of it; see Timeouts
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
        """As Go's client does, put the value and its TTL in the body and all else in the query."""
        form = {name: value for name, value in params.items() if name not in query}
        target = quote(path) + (f"?{urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/x-www-form-urlencoded"} if form else {}
        patience = None if self._after is None else self._transport.timeouts.poll
        after, losses = self._after, self._transport.losses

        def on_head(answer: Answer) -> None:
            if answer.at.index and answer.status < 500:
                self._contact()
            if after is not None and answer.status == 200:
                # Not before: who asks for it shuts the connection down, which must be there by then.
                check_reread(self._reread)
                answers.check_history(after, answer.at)
                if self._transport.losses > losses:
                    raise Unsure("the connection was lost, or given up")

        return Request(method, target, urlencode(form) if form else None, headers, patience, on_head)

    def _result_from_response(self, response: Reply) -> Reply:
        return response


class Poller:
    """``etcd_keys.Watcher`` on v2: one long poll after the other, one change each."""

    def __init__(self, client: Client, key: str, *, recursive: bool) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive

    def read(self, after: Position) -> Changes:
        reply = self.client.poll(self._key, after, recursive=self._recursive)
        if reply.node is None:
            self._prove()
            return Changes((), reply.at)
        return Changes((reply,), reply.at)

    def _prove(self) -> None:
        """A member that has lost the others takes each poll, and is as silent as one that has no news."""
        try:
            # Only the majority can say so. In a folder what is not there is the smallest thing to ask for.
            self.client.fetch(posixpath.join(self._key, "nobody") if self._recursive else self._key)
        except NotFound:
            return  # says the majority

    def reread(self) -> None:
        self.client.reread()

    def reconnect(self) -> None:
        self.client.reconnect()

    def cut(self) -> None:
        self.client.cut()

    def close(self) -> None:
        self.client.close()
