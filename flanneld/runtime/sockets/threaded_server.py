"""Server of connections that wait for long: a thread for each, up to a limit."""

from __future__ import annotations

import logging
import socket
import threading
from http.server import ThreadingHTTPServer
from socketserver import BaseRequestHandler
from typing import Any

from flanneld.errors import lacking
from flanneld.runtime import waits
from flanneld.runtime.logs.outage import LogRateLimit

log = logging.getLogger(__name__)

#: Bytes of a handler's stack: 8 MiB of address space each, the default, soon are more than a limit allows.
_STACK = 512 << 10
#: Seconds to wait when there is no file descriptor for a connection: it stays in the queue meanwhile.
_STARVED = 0.1


class ThreadedServer(ThreadingHTTPServer):
    """Server on one listening socket, for at most ``limit`` connections at a time."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, handler: type[BaseRequestHandler], limit: int) -> None:
        super().__init__(listener.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.connections = 0
        self.lock = threading.Lock()
        self._limit = limit
        self._full = LogRateLimit()
        self._is_closing = threading.Event()

    def serve(self) -> None:
        """Answer until ``close``."""
        threading.stack_size(_STACK)
        try:
            self.serve_forever(poll_interval=0.1)
        finally:
            threading.stack_size(0)
            self.server_close()

    def close(self) -> None:
        """End ``serve``. May be called repeatedly, from any thread."""
        self._is_closing.set()
        self.shutdown()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, address = super().get_request()
        except OSError as error:
            if lacking(error) is not None:
                waits.pause(self._is_closing, _STARVED)
            raise
        with self.lock:
            has_room = self.connections < self._limit
            self.connections += has_room
        if not has_room:
            if self._full.allows("full"):
                log.warning("Too many connections: refusing one of %s; start another server", address)
            connection.close()
            raise ConnectionAbortedError
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        try:
            super().shutdown_request(request)
        finally:
            with self.lock:
                self.connections -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an unexpected exception in the handling of a request."""
        del request
        log.exception("Cannot answer a request of %s", client_address)
