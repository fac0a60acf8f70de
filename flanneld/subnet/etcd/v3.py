"""Client of etcd's v3 API, over either carrier, and its watch: a stream that stays open."""

from __future__ import annotations

import logging
import math
import posixpath
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from flanneld.compat.glog import V
from flanneld.errors import Cancelled, Retryable
from flanneld.runtime import clock
from flanneld.subnet.etcd import v3_messages
from flanneld.subnet.etcd.carriers import Stream, open_carrier
from flanneld.subnet.etcd.keys import Conflict, KeyChanges, KeyReply, NoConfig, NotFound, Position, StoredKey
from flanneld.subnet.etcd.transport import EtcdTimeouts, Server, Servers, Transport, server_failed
from flanneld.subnet.etcd.v3_messages import (
    AccessRefused,
    CallServer,
    GatewayMessage,
    KeyValue,
    LeaseGone,
    LoginNeeded,
)
from flanneld.subnet.failover import ServerFailed
from flanneld.subnet.list_watch import Contact, PossibleGap, RelistNeeded

log = logging.getLogger(__name__)

T = TypeVar("T")


class V3Client:
    """``KeyClient`` on v3. Watches share it for their occasional requests."""

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
        #: By key: until when a watch behind the store's revision is not restarted.
        self.trusted: dict[str, float] = {}

    # ---- interface ---------------------------------------------------------------------------

    def root(self, prefix: str) -> str:
        """Return the prefix, cleaned as in Go. No leading slash is added: v3 has no directories."""
        path = posixpath.normpath(prefix) if prefix else ""
        return "/" + path.lstrip("/") if path.startswith("/") else path

    def fetch(self, key: str, *, recursive: bool = False) -> KeyReply:
        wanted = v3_messages.directory(key) if recursive else {"key": v3_messages.text64(key)}
        found, at = self._range(wanted)
        if recursive:
            here = StoredKey(key, "", None, at.index, is_dir=True)
            return KeyReply("get", here, tuple(each.node() for each in found), at)
        if not found:
            raise NotFound(at)
        return KeyReply("get", self.timed(found[0]), (), at)

    def create(self, key: str, value: str, ttl: int | None) -> KeyReply:
        return self._write(key, value, ttl, {"target": "CREATE", "create_revision": "0"})

    def replace(self, key: str, value: str, ttl: int | None, modified: int) -> KeyReply:
        return self._write(key, value, ttl, _unchanged_since(modified))

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

    def remove(self, key: str, modified: int) -> None:
        deletion = {"request_delete_range": {"key": v3_messages.text64(key)}}
        at, done, found = self._transact(key, _unchanged_since(modified), deletion)
        if found:
            raise Conflict(f"{key} was written again")
        if not done:
            raise NotFound(at)

    def watcher(self, key: str, *, recursive: bool, contact: Contact) -> V3Watcher:
        return V3Watcher(self, key, recursive=recursive, contact=contact)

    def missing(self, key: str, example: str, *, elsewhere: bool) -> NoConfig:
        if elsewhere:
            return NoConfig(
                f"found a v2-only config at {key} in etcd, and none in v3",
                "set -etcd-api=v2, or write the config through the v3 API",
            )
        return NoConfig(
            f"etcd answers, but has no network config at {key}",
            f"write it with flannelctl config set, or: ETCDCTL_API=3 etcdctl put {key} '{example}'"
            " (what is written through the v2 API cannot be seen here)",
        )

    def reconnect(self) -> None:
        self._carrier.reconnect()

    def cancel(self) -> None:
        self._carrier.cancel()

    # ---- for watches -------------------------------------------------------------------------

    def timed(self, found: KeyValue) -> StoredKey:
        """Return a key with the remaining TTL of its lease, which takes a request of its own."""
        if not found.lease:
            return found.node()
        left = self.ask("/kv/lease/timetolive", {"ID": str(found.lease)}, lambda said: said.TTL)
        return found.node(max(0, left))

    def prove(self, key: str) -> tuple[Position, KeyValue | None]:
        """Make a quorum read of a key, to prove that a server answers and has a leader.

        Return the position of the history, and the key if it exists.
        """
        found, at = self._range({"key": v3_messages.text64(key)})
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

    def _range(self, wanted: Mapping[str, object]) -> tuple[list[KeyValue], Position]:
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

    def _write(self, key: str, value: str, ttl: int | None, condition: Mapping[str, str]) -> KeyReply:
        """Put a key with an etcd lease of its own, if the condition holds.

        As in Go flanneld the key's previous etcd lease is left to expire, which then no longer removes the
        key. Other keys may be attached to it.
        """
        lease, granted = self._grant(ttl) if ttl is not None else (0, None)
        put = {"key": v3_messages.text64(key), "value": v3_messages.text64(value), "lease": str(lease)}
        try:
            at, done, found = self._transact(key, condition, {"request_put": put})
        except AccessRefused:
            # Otherwise a user without write access would leave an etcd lease behind at each attempt.
            self._revoke(lease)
            raise
        if found and not done and (found.lease, found.value) == (lease, v3_messages.encoded(value)):
            # An earlier attempt succeeded, but its response was lost.
            at, done = Position(found.modified, at.cluster), True
        if not done:
            self._revoke(lease)
            raise Conflict(f"{key} is there" if found else f"{key} has gone")
        self._written[key] = at.index, lease
        return KeyReply("put", StoredKey(key, value, granted, at.index), (), at)

    def _transact(
        self, key: str, condition: Mapping[str, str], operation: Mapping[str, object]
    ) -> tuple[Position, bool, KeyValue | None]:
        """Do an operation if the condition holds for a key. Return the position, True if so, else the key."""
        name = v3_messages.text64(key)
        transaction = {
            "compare": [{"key": name, "result": "EQUAL", **condition}],
            "success": [operation],
            "failure": [{"request_range": {"key": name}}],
        }
        return self.ask(
            "/kv/txn", transaction, lambda said: (said.at, said.succeeded, v3_messages.other_branch(said))
        )

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


def _unchanged_since(modified: int) -> dict[str, str]:
    return {"target": "MOD", "mod_revision": str(modified)}


#: Seconds between two restarts of a watch because the store's revision is ahead of the watch's.
TRUST = 600.0


class V3Watcher:
    """``keys.Watcher`` on v3. ``contact`` is called once the watch has started."""

    def __init__(self, client: V3Client, key: str, *, recursive: bool, contact: Contact) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive
        self._contact = contact
        # Only our own lease's expiry matters.
        self._stored: Callable[[KeyValue], StoredKey] = KeyValue.node if recursive else client.timed
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._server: Server | None = None
        #: Set before it connects, so that another thread can cut it.
        self._stream: Stream | None = None
        #: Where the stream began, and the position it has reached.
        self._begun: Position | None = None
        self._at: Position | None = None
        #: The latest store revision that the stream has named.
        self._told = 0
        #: The watch was restarted as overdue and has sent nothing since.
        self._in_doubt = False

    def read(self, after: Position) -> KeyChanges:
        try:
            return self._read(after)
        except ServerFailed as failure:
            self.close()
            self._check()
            self.client.distrust()
            assert self._server  # the one that failed
            raise self.client.servers.no_answer({self._server.name: failure}) from None
        except Retryable as reason:
            self.close()
            if self._in_doubt and isinstance(reason, RelistNeeded):
                raise PossibleGap(reason.problem) from None
            raise

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._stream is not None:
                self._stream.cancel()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _read(self, after: Position) -> KeyChanges:
        if self._stream is None or self._at != after:
            self.close()
            self._open(after)
        assert self._begun
        assert self._stream
        replies: list[KeyReply] = []
        at = after
        while not replies and at == after:
            messages = self._stream.read(self.client.timeouts.silence)
            if not messages:
                return self._after_silence(after)
            self._in_doubt = False
            for message in messages:
                told, at = v3_messages.changes(message, self._begun, at)
                self._told = max(self._told, message.at.index)
                replies += [KeyReply(action, self._stored(found), (), at) for action, found in told]
        self._at = at
        return KeyChanges(tuple(replies), at)

    def _after_silence(self, after: Position) -> KeyChanges:
        """Check the server with a request, which tells an idle server from a dead one."""
        now, found = self.client.prove(self._key)
        if self._seems_stalled(after, now, found):
            self._in_doubt = True
            self.close()
        elif self.client.servers.current is not self._server:
            raise PossibleGap("another server answers than before")
        return KeyChanges((), after)

    def _seems_stalled(self, after: Position, now: Position, found: KeyValue | None) -> bool:
        """Return True if etcd knows more than the watch sent, as when a proxy hides that its server is gone.

        ``found`` is the key as of ``now``. For a directory the revision may have grown through other keys,
        which only a new watch can tell.
        """
        if found and not self._recursive:
            return found.modified > after.index
        trusted = self.client.trusted
        if now.index <= self._told or clock.now() < trusted.get(self._key, -math.inf):
            return False
        trusted[self._key] = clock.now() + TRUST
        return True

    def _open(self, after: Position) -> None:
        try:
            self._begin(after)
        except AccessRefused:
            self.close()
            self.client.forget_login()
            self._begin(after)

    def _begin(self, after: Position) -> None:
        server, token = self.client.server_and_token(self._key)
        self._server = server
        wanted = (
            v3_messages.directory(self._key) if self._recursive else {"key": v3_messages.text64(self._key)}
        )
        # One revision earlier than needed: at the compacted revision itself etcd does not report a lost
        # deletion.
        create = {**wanted, "start_revision": str(after.index), "progress_notify": True}
        stream = self._hold(self.client.stream())
        stream.open(server, {"create_request": create}, token)
        limit = self.client.timeouts.read
        first = stream.read(limit, 1)
        if not first:
            raise server_failed(TimeoutError(), limit, server)
        v3_messages.began(first[0], after)
        self._told = first[0].at.index
        self._begun = self._at = after
        self._contact()

    def _hold(self, stream: Stream) -> Stream:
        with self._lock:
            if self._is_cancelled:
                raise Cancelled
            self._stream = stream
        return stream

    def _check(self) -> None:
        if self._is_cancelled:
            raise Cancelled
