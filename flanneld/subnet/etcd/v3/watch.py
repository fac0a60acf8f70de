"""Watch of keys in etcd's v3 API, over a stream that stays open."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Protocol

from flanneld.errors import Cancelled, Retryable
from flanneld.runtime import clock
from flanneld.subnet.etcd.endpoints import Server, Servers
from flanneld.subnet.etcd.http import ServerFailed
from flanneld.subnet.etcd.keys import (
    Client,
    KeyChanges,
    Position,
    PossibleGap,
    RelistNeeded,
    Reply,
    StoredKey,
    check_reread,
)
from flanneld.subnet.etcd.transport import EtcdTimeouts, no_answer, server_failed
from flanneld.subnet.etcd.v3 import answers
from flanneld.subnet.etcd.v3.carrier import Stream

#: Seconds between two restarts of a watch because the store's revision is ahead of the watch's.
TRUST = 600.0


class WatchClient(Client, Protocol):
    """``V3Client``, with the requests that it makes for watches."""

    servers: Servers
    timeouts: EtcdTimeouts

    def timed(self, found: answers.KeyValue) -> StoredKey: ...
    def prove(self, key: str) -> tuple[Position, answers.KeyValue | None]: ...
    def server_and_token(self, key: str) -> tuple[Server, str]: ...
    def stream(self) -> Stream: ...
    def distrust(self) -> None: ...
    def forget_login(self) -> None: ...


class V3Watcher:
    """``keys.Watcher`` on v3. ``contact`` is called once the watch has started."""

    def __init__(
        self, client: WatchClient, key: str, *, recursive: bool, contact: Callable[[], object]
    ) -> None:
        self.client = client
        self._key = key
        self._recursive = recursive
        self._contact = contact
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
        #: Until when a watch behind the store's revision is not restarted.
        self._trusted_until = -math.inf
        #: The watch was restarted as overdue and has sent nothing since.
        self._in_doubt = False
        #: True if we dropped the connection ourselves: its failure says nothing about the server.
        self._gave_up = False
        self._reread = threading.Event()

    def read(self, after: Position) -> KeyChanges:
        try:
            return self._read(after)
        except ServerFailed as failure:
            self.close()
            self._check()
            self.client.distrust()
            assert self._server  # the one that failed
            if not self._gave_up:
                raise no_answer({self._server.name: failure}) from None
        except Retryable as reason:
            self.close()
            if self._in_doubt and isinstance(reason, RelistNeeded):
                raise PossibleGap(reason.problem) from None
            raise
        self._gave_up = False
        check_reread(self._reread)
        raise PossibleGap("the connection was given up")

    def reread(self) -> None:
        self._reread.set()
        self.reconnect()

    def reconnect(self) -> None:
        self._gave_up = True
        self._drop()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
        self._drop()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _read(self, after: Position) -> KeyChanges:
        if self._stream is None or self._at != after:
            self.close()
            self._open(after)
        # Not earlier: a reread shuts the connection down, so it must be there by then.
        check_reread(self._reread)
        assert self._begun
        assert self._stream
        while True:
            result = self._stream.next(self.client.timeouts.silence)
            if result is None:
                return self._after_silence(after)
            told, self._at = answers.changes(result, self._begun, after)
            self._told = max(self._told, result.at.index)
            self._in_doubt = False
            if told or self._at != after:
                return KeyChanges(tuple(self._reply(*each, self._at) for each in told), self._at)

    def _after_silence(self, after: Position) -> KeyChanges:
        """Check the server with a request, which tells an idle server from a dead one."""
        now, found = self.client.prove(self._key)
        if self._seems_stalled(after, now, found):
            self._in_doubt = True
            self.close()
        elif self.client.servers.current is not self._server:
            raise PossibleGap("another server answers than before")
        return KeyChanges((), after)

    def _seems_stalled(self, after: Position, now: Position, found: answers.KeyValue | None) -> bool:
        """Return True if etcd knows more than the watch sent, as when a proxy hides that its server is gone.

        ``found`` is the key as of ``now``. For a directory the revision may have grown through other keys,
        which only a new watch can tell.
        """
        if found and not self._recursive:
            return found.modified > after.index
        if now.index <= self._told or clock.now() < self._trusted_until:
            return False
        self._trusted_until = clock.now() + TRUST
        return True

    def _reply(self, action: str, found: answers.KeyValue, at: Position) -> Reply:
        # Only our own lease's expiry matters.
        timed = action == "put" and not self._recursive
        return Reply(action, self.client.timed(found) if timed else found.node(), (), at)

    def _open(self, after: Position) -> None:
        try:
            self._begin(after)
        except answers.AccessRefused:
            self.close()
            self.client.forget_login()
            self._begin(after)

    def _begin(self, after: Position) -> None:
        server, token = self.client.server_and_token(self._key)
        self._server = server
        wanted = answers.directory(self._key) if self._recursive else {"key": answers.text64(self._key)}
        # One revision earlier than needed: at the compacted revision itself etcd does not report a lost
        # deletion.
        create = {**wanted, "start_revision": str(after.index), "progress_notify": True}
        stream = self._hold(self.client.stream())
        stream.open(server, {"create_request": create}, token)
        limit = self.client.timeouts.read
        first = stream.next(limit)
        if first is None:
            raise server_failed(TimeoutError(), limit, server)
        answers.began(first, after)
        self._told = first.at.index
        self._begun = self._at = after
        self._contact()

    def _hold(self, stream: Stream) -> Stream:
        with self._lock:
            if self._is_cancelled:
                raise Cancelled
            self._stream = stream
        return stream

    def _drop(self) -> None:
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.cancel()

    def _check(self) -> None:
        if self._is_cancelled:
            raise Cancelled
