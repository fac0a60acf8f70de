"""Client of etcd's v3 API, over either carrier."""

from __future__ import annotations

import logging
import math
import posixpath
from collections.abc import Callable, Mapping
from typing import TypeVar

from flanneld.compat.glog import V
from flanneld.errors import Retryable
from flanneld.runtime import clock
from flanneld.subnet.etcd.endpoints import Server, Servers
from flanneld.subnet.etcd.http import ServerFailed
from flanneld.subnet.etcd.keys import Conflict, NoConfig, NotFound, Position, Reply, StoredKey
from flanneld.subnet.etcd.transport import EtcdTimeouts, Transport
from flanneld.subnet.etcd.v3 import answers
from flanneld.subnet.etcd.v3.answers import AccessRefused, CallServer, GatewayMessage, LeaseGone, LoginNeeded
from flanneld.subnet.etcd.v3.carrier import Stream, open_carrier
from flanneld.subnet.etcd.v3.watch import V3Watcher

log = logging.getLogger(__name__)

T = TypeVar("T")


class V3Client:
    """``keys.Client`` on v3. Watches share it for their occasional requests."""

    api = "v3"
    names_ipv6 = True

    def __init__(self, transport: Transport) -> None:
        self._carrier = open_carrier(transport)
        self.servers: Servers = transport.servers
        self.timeouts: EtcdTimeouts = transport.timeouts
        #: Tokens by user name and password. Each server accepts the tokens of the others.
        self._tokens: dict[tuple[str, str], str] = {}
        #: By key: the revision of our last write, and the etcd lease granted for it.
        self._written: dict[str, tuple[int, int]] = {}
        #: By server name: the time of its last response.
        self._answered: dict[str, float] = {}

    # ---- interface ---------------------------------------------------------------------------

    def root(self, prefix: str) -> str:
        """Return the prefix, cleaned as in Go. No leading slash is added: v3 has no directories."""
        path = posixpath.normpath(prefix) if prefix else ""
        return "/" + path.lstrip("/") if path.startswith("/") else path

    def fetch(self, key: str, *, recursive: bool = False) -> Reply:
        wanted = answers.directory(key) if recursive else {"key": answers.text64(key)}
        found, at = self._range(wanted)
        if recursive:
            here = StoredKey(key, "", None, at.index, is_dir=True)
            return Reply("get", here, tuple(each.node() for each in found), at)
        if not found:
            raise NotFound(at)
        return Reply("get", self.timed(found[0]), (), at)

    def create(self, key: str, value: str, ttl: int | None) -> Reply:
        return self._write(key, value, ttl, {"target": "CREATE", "create_revision": "0"})

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> Reply:
        return self._write(key, value, ttl, {"target": "MOD", "mod_revision": str(modified)})

    def prolong(self, key: str, modified: int) -> float | None:
        at, lease = self._written.get(key, (0, 0))
        if at != modified or not lease:
            return None
        try:
            # The gateway answers this call as a stream.
            left = self.ask("/lease/keepalive", {"ID": str(lease)}, lambda said: (said.result or said).TTL)
        except Retryable as problem:
            log.log(V(1), "The lease %s of %s cannot be kept alive: %s", lease, key, problem)
            return None
        return left if left > 0 else None

    def remove(self, key: str) -> None:
        name = {"key": answers.text64(key)}
        found, at = self.ask("/kv/deleterange", name, lambda said: (said.deleted, said.at))
        if not found:
            raise NotFound(at)

    def watcher(self, key: str, *, recursive: bool, contact: Callable[[], object]) -> V3Watcher:
        return V3Watcher(self, key, recursive=recursive, contact=contact)

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        if elsewhere:
            return NoConfig(
                f"found a v2-only config at {key} in etcd, and none in v3",
                "set -etcd-api=v2, or write the config through the v3 API",
            )
        return NoConfig(
            f"etcd answers, but has no network config at {key}",
            f"write it: ETCDCTL_API=3 etcdctl put {key} '{example}'"
            " (what is written through the v2 API cannot be seen here)",
        )

    def reconnect(self) -> None:
        self._carrier.reconnect()

    def cancel(self) -> None:
        self._carrier.cancel()

    # ---- for watches -------------------------------------------------------------------------

    def timed(self, found: answers.KeyValue) -> StoredKey:
        """Return a key with the remaining TTL of its lease, which takes a request of its own."""
        if not found.lease:
            return found.node()
        left = self.ask("/kv/lease/timetolive", {"ID": str(found.lease)}, lambda said: said.TTL)
        return found.node(max(0, left))

    def prove(self, key: str) -> tuple[Position, answers.KeyValue | None]:
        """Make a quorum read of a key, to prove that a server answers and has a leader.

        Return the position of the history, and the key if it exists.
        """
        found, at = self._range({"key": answers.text64(key)})
        return at, found[0] if found else None

    def server_and_token(self, key: str) -> tuple[Server, str]:
        """Return a server that answered recently, and the token to use with it."""
        if clock.now() - self._answered.get(self.servers.current.name, -math.inf) > self.timeouts.silence:
            self.prove(key)
        server = self.servers.current
        return server, self._token(server)

    def stream(self) -> Stream:
        return self._carrier.stream()

    def distrust(self) -> None:
        """Forget when servers answered, so that the next watch after a failed one checks them first."""
        self._answered.clear()

    def forget_login(self) -> None:
        self._tokens.clear()
        self._answered.clear()

    # ---- requests ----------------------------------------------------------------------------

    def ask(self, path: str, body: Mapping[str, object], understand: Callable[[GatewayMessage], T]) -> T:
        """Send a request, logging in if etcd requires it, and parse the response.

        All our requests are repeatable.
        """

        def attempt(server: Server, call: CallServer) -> T:
            token = self._token(server)
            try:
                answer = call(path, body, token)
            except AccessRefused as refusal:
                # Without a login, gRPC identifies us by our certificate's common name.
                if not server.username or (token and not isinstance(refusal, LoginNeeded)):
                    raise
                answer = call(path, body, self._log_in(server, call))
            understood = understand(answer)
            self._answered[server.name] = clock.now()
            return understood

        return self._carrier.ask(attempt)

    def _range(self, wanted: Mapping[str, object]) -> tuple[list[answers.KeyValue], Position]:
        return self.ask("/kv/range", wanted, lambda said: (said.kvs or [], said.at))

    def _token(self, server: Server) -> str:
        return self._tokens.get((server.username, server.password), "")

    def _log_in(self, server: Server, call: CallServer) -> str:
        login = (server.username, server.password)
        self._tokens.pop(login, None)
        order = {"name": server.username, "password": server.password}
        token = call("/auth/authenticate", order, "").token
        if not token or not token.isprintable():
            raise ServerFailed("it answers with JSON that is not etcd's")
        self._tokens[login] = token
        return token

    # ---- writing -----------------------------------------------------------------------------

    def _write(self, key: str, value: str, ttl: int | None, condition: Mapping[str, str]) -> Reply:
        """Put a key with an etcd lease of its own, if the condition holds.

        As in Go flanneld the key's previous etcd lease is left to expire, which then no longer removes the
        key. Other keys may be attached to it.
        """
        lease, granted = self._grant(ttl) if ttl is not None else (0, None)
        name = answers.text64(key)
        try:
            at, done, found = self.ask(
                "/kv/txn",
                {
                    "compare": [{"key": name, "result": "EQUAL", **condition}],
                    "success": [
                        {"request_put": {"key": name, "value": answers.text64(value), "lease": str(lease)}}
                    ],
                    "failure": [{"request_range": {"key": name}}],
                },
                lambda said: (said.at, said.succeeded, answers.other_branch(said)),
            )
        except AccessRefused:
            # Otherwise a user without write access would leave an etcd lease behind at each attempt.
            self._revoke(lease)
            raise
        if found and not done and (found.lease, found.value) == (lease, answers.encoded(value)):
            # An earlier attempt succeeded, but its response was lost.
            at, done = Position(found.modified, at.cluster), True
        if not done:
            self._revoke(lease)
            raise Conflict(f"{key} is there" if found else f"{key} has gone")
        self._written[key] = at.index, lease
        return Reply("put", StoredKey(key, value, granted, at.index), (), at)

    def _grant(self, ttl: int) -> tuple[int, int]:
        return self.ask("/lease/grant", {"TTL": str(ttl)}, lambda said: (said.ID, said.TTL))

    def _revoke(self, lease: int) -> None:
        """Revoke an etcd lease without keys; 0 is none."""
        if not lease:
            return
        try:
            self.ask("/kv/lease/revoke", {"ID": str(lease)}, lambda said: said.at)
        except LeaseGone:
            log.log(V(1), "The unused lease %s had already expired", lease)
