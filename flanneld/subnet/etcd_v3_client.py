"""etcd's v3 API through its JSON gateway."""

from __future__ import annotations

import json
import logging
import math
import posixpath
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flanneld import clock
from flanneld.glog import V
from flanneld.subnet import etcd_v3_answers as answers
from flanneld.subnet.etcd_endpoints import Server, Servers
from flanneld.subnet.etcd_http import NoSuchApi, Request, Useless
from flanneld.subnet.etcd_keys import Conflict, NoConfig, Node, NotFound, Reply
from flanneld.subnet.etcd_transport import Send, Timeouts, Transport
from flanneld.subnet.etcd_v3_answers import LeaseGone, LoginNeeded
from flanneld.subnet.etcd_v3_watch import Watch

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Where the gateway is in etcd from 3.4 on, in 3.3, and in 3.2.
_ROOTS = ("/v3", "/v3beta", "/v3alpha")

_NO_GATEWAY = "start etcd with --enable-grpc-gateway=true; versions before 3.2 need -etcd-api=v2"


class Client:
    """``etcd_keys.Client`` on v3. Watches share it, as they have something to ask now and then."""

    api = "v3"
    names_ipv6 = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        #: By the name of a server.
        self._roots: dict[str, str] = {}
        #: By name and password: any server takes what one has given.
        self._tokens: dict[tuple[str, str], str] = {}
        self._answered = -math.inf

    @property
    def servers(self) -> Servers:
        return self._transport.servers

    @property
    def timeouts(self) -> Timeouts:
        return self._transport.timeouts

    # ---- what it is asked --------------------------------------------------------------------

    def root(self, prefix: str) -> str:
        """As Go joins it, and without a slash of our own: v3 has names, and no folders."""
        path = posixpath.normpath(prefix) if prefix else ""
        return "/" + path.lstrip("/") if path.startswith("/") else path

    def fetch(self, key: str, *, recursive: bool = False) -> Reply:
        wanted = answers.directory(key) if recursive else {"key": answers.text64(key)}
        found, at = self.ask(
            "/kv/range", wanted, lambda body: (answers.key_values(body), answers.position(body))
        )
        if recursive:
            here = Node(key, "", None, at.index, is_dir=True)
            return Reply("get", here, tuple(each.node() for each in found), at)
        if not found:
            raise NotFound(at)
        return Reply("get", self.timed(found[0]), (), at)

    def create(self, key: str, value: str, ttl: int | None) -> Reply:
        return self._write(key, value, ttl, {"target": "CREATE", "create_revision": "0"})

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> Reply:
        return self._write(key, value, ttl, {"target": "MOD", "mod_revision": str(modified)})

    def remove(self, key: str) -> None:
        name = {"key": answers.text64(key)}
        found, at = self.ask(
            "/kv/deleterange", name, lambda body: (answers.number(body, "deleted"), answers.position(body))
        )
        if not found:
            raise NotFound(at)

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> Watch:
        return Watch(self, key, recursive=recursive, contact=contact)

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        if elsewhere:
            return NoConfig(
                f"found a v2-only config at {key} in etcd, and none in v3",
                "set -etcd-api=v2, or write the config through the v3 API",
            )
        return NoConfig(
            f"etcd has no network config at {key}",
            f"write it: ETCDCTL_API=3 etcdctl put {key} '{example}'"
            " (what is written through the v2 API cannot be seen here)",
        )

    def reconnect(self) -> None:
        self._transport.reconnect()

    def cut(self) -> None:
        self._transport.cut()

    # ---- what watches need -------------------------------------------------------------------

    def timed(self, found: answers.KeyValue) -> Node:
        """A key with what is left of its lease, which is a request of its own."""
        if found.lease == "0":
            return found.node()
        left = self.ask("/kv/lease/timetolive", {"ID": found.lease}, lambda body: answers.number(body, "TTL"))
        return found.node(max(0, left))

    def prove(self, key: str) -> None:
        """See that a server answers, and has a leader."""
        self.ask("/kv/range", {"key": answers.text64(key), "count_only": True}, answers.position)

    def door(self, key: str) -> tuple[Server, str, dict[str, str]]:
        """A server that has answered lately, the path of its gateway, and the headers it wants."""
        recent = clock.now() - self._answered < self.timeouts.silence
        if not recent or self.servers.current.name not in self._roots:
            self.prove(key)
        server = self.servers.current
        return server, self._roots.get(server.name, _ROOTS[0]), self._headers(server)

    def distrust(self) -> None:
        """A watch has failed: what is known of the servers, and the login, may be outdated."""
        self._answered = -math.inf

    def forget_login(self) -> None:
        self._tokens.clear()
        self._answered = -math.inf

    # ---- asking ------------------------------------------------------------------------------

    def ask(self, path: str, body: Mapping[str, object], understand: Callable[[dict[str, Any]], T]) -> T:
        """Make a request, logged in if etcd wants that, and understand it. All of ours may be repeated."""
        text = json.dumps(body)

        def attempt(server: Server, send: Send) -> T:
            try:
                answer = self._post(server, send, path, text)
            except LoginNeeded:
                if not server.username:
                    raise
                self._log_in(server, send)
                answer = self._post(server, send, path, text)
            return understand(answer)

        result = self._transport.ask(attempt)
        self._answered = clock.now()
        return result

    def _post(self, server: Server, send: Send, path: str, text: str) -> dict[str, Any]:
        known = self._roots.get(server.name, _ROOTS[0])
        for root in dict.fromkeys((known, *_ROOTS)):
            answer = send(Request("POST", root + path, text, self._headers(server)))
            if not answers.is_unknown_path(answer):
                self._roots[server.name] = root
                return answers.read(answer)
        raise Useless("it has no JSON gateway to the v3 API", _NO_GATEWAY, kind=NoSuchApi)

    def _headers(self, server: Server) -> dict[str, str]:
        token = self._tokens.get((server.username, server.password))
        return {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})

    def _log_in(self, server: Server, send: Send) -> None:
        login = (server.username, server.password)
        self._tokens.pop(login, None)
        text = json.dumps({"name": server.username, "password": server.password})
        token = self._post(server, send, "/auth/authenticate", text).get("token")
        if not isinstance(token, str) or not token.isprintable():
            raise Useless("it answers with JSON that is not etcd's")
        self._tokens[login] = token

    # ---- writing -----------------------------------------------------------------------------

    def _write(self, key: str, value: str, ttl: int | None, condition: Mapping[str, str]) -> Reply:
        """Put a key with a lease of its own, if the condition holds.

        As with Go flanneld the lease that the key had is left to expire. Others may hang on it.
        """
        lease, granted = self._grant(ttl) if ttl is not None else ("0", None)
        name = answers.text64(key)
        try:
            at, done, found = self.ask(
                "/kv/txn",
                {
                    "compare": [{"key": name, "result": "EQUAL", **condition}],
                    "success": [
                        {"request_put": {"key": name, "value": answers.text64(value), "lease": lease}}
                    ],
                    "failure": [{"request_range": {"key": name}}],
                },
                answers.transaction,
            )
        except answers.AccessRefused:
            # Else an operator who gets the rights wrong would get a lease for each attempt.
            self._revoke(lease)
            raise
        if done:
            return Reply("put", Node(key, value, granted, at.index), (), at)
        if found and (found.lease, found.value) == (lease, value):
            # An earlier attempt got through, and its answer got lost.
            return Reply("put", Node(key, value, granted, found.modified), (), at)
        self._revoke(lease)
        raise Conflict(f"{key} is there" if found else f"{key} has gone")

    def _grant(self, ttl: int) -> tuple[str, int]:
        return self.ask(
            "/lease/grant",
            {"TTL": str(ttl)},
            lambda body: (str(answers.number(body, "ID")), answers.number(body, "TTL")),
        )

    def _revoke(self, lease: str) -> None:
        """Give back a lease that no key hangs on; "0" is none."""
        if lease == "0":
            return
        try:
            self.ask("/kv/lease/revoke", {"ID": lease}, answers.position)
        except LeaseGone:
            log.log(V(1), "The unused lease %s has gone by itself", lease)
