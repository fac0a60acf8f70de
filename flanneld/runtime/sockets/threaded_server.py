"""Server of connections that wait for long: a thread for each, once its first request is there."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from flanneld.runtime.logs.outage import LogRateLimit
from flanneld.runtime.sockets.polled_server import Conversation, Limits, PolledServer

log = logging.getLogger(__name__)

#: Bytes of a handler's stack: 8 MiB of address space each, the default, soon are more than a limit allows.
_STACK = 512 << 10


class ThreadedServer:
    """Server on one listening socket.

    ``receive`` is the coroutine of a new connection. It has a seat within ``seats``, and no thread. It
    returns a call of ``start``, which gives the connection one of ``limit`` threads.
    """

    def __init__(
        self,
        listener: socket.socket,
        receive: Callable[[socket.socket], Conversation],
        seats: Limits,
        limit: int,
    ) -> None:
        self.lock = threading.Lock()
        self._threads = 0
        self._limit = limit
        self._full = LogRateLimit()
        self._front = PolledServer(listener, receive, seats, "Cannot receive a request")

    @property
    def connections(self) -> int:
        return self._threads + self._front.connections

    def serve(self) -> None:
        """Answer until ``close``."""
        threading.stack_size(_STACK)
        try:
            self._front.serve()
        finally:
            threading.stack_size(0)

    def close(self) -> None:
        """End ``serve``. May be called repeatedly, from any thread."""
        self._front.close()

    def start(self, connection: socket.socket, handle: Callable[[], object]) -> None:
        """Call ``handle`` in a thread, and close the connection after it; at once if there is no room."""
        with self.lock:
            has_room = self._threads < self._limit
            self._threads += has_room
        if has_room:
            thread = threading.Thread(
                target=self._run, args=(connection, handle), name="request", daemon=True
            )
            with suppress(RuntimeError):  # no memory for a thread
                thread.start()
                return
            with self.lock:
                self._threads -= 1
        if self._full.allows("full"):
            log.warning("Too many connections: refusing one of %s; start another server", _peer(connection))
        connection.close()

    def _run(self, connection: socket.socket, handle: Callable[[], object]) -> None:
        try:
            handle()
        except Exception:  # a bug must not end the daemon
            log.exception("Cannot answer a request of %s", _peer(connection))
        finally:
            with suppress(OSError):  # the client has gone
                connection.shutdown(socket.SHUT_WR)
            connection.close()
            with self.lock:
                self._threads -= 1


def _peer(connection: socket.socket) -> object:
    with suppress(OSError):
        return connection.getpeername()
    return "a client that has gone"
