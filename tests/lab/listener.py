"""What all servers in the way of tests have in common: they listen, and their connections can be cut."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

from tests.lab.namespace import Namespace

Address = tuple[str, int]


class Listener:
    """Calls ``serve`` with each connection, in a thread of its own; to be used in a ``with``.

    ``serve`` may raise ``OSError``, and ``EOFError``, when its connection is over. What it opens by
    ``connected`` is cut together with the connections. All methods may be called at any time.
    """

    def __init__(
        self, serve: Callable[[socket.socket], None], address: Address, namespace: Namespace | None = None
    ) -> None:
        self._serve = serve
        self._namespace = namespace
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_shut = False
        with self._inside():
            self._listener = socket.create_server(address, backlog=64)
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        end(self._listener)
        self._thread.join(60)
        self._listener.close()
        self.shut()

    def cut(self) -> None:
        """Break all connections of now."""
        with self._lock:
            for sock in self._open:
                end(sock)

    def shut(self) -> None:
        """Break all connections, and each new one at once."""
        self._is_shut = True
        self.cut()

    def reopen(self) -> None:
        self._is_shut = False

    @contextmanager
    def connected(self, target: Address) -> Iterator[socket.socket]:
        """A connection to another server. Raises ``OSError``."""
        with self._inside():
            sock = socket.create_connection(target, timeout=5)
        sock.settimeout(None)
        with self._held(sock):
            yield sock

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # it was shut down
            threading.Thread(target=self._run, args=(client,), daemon=True).start()

    def _run(self, client: socket.socket) -> None:
        try:
            with self._held(client):
                if not self._is_shut:
                    self._serve(client)
        except (OSError, EOFError):
            return  # one of both has gone, or the test is over

    @contextmanager
    def _held(self, sock: socket.socket) -> Iterator[None]:
        """For as long as it is used; it can be cut meanwhile."""
        with sock:
            with self._lock:
                self._open.add(sock)
            if self._is_shut:
                end(sock)
            try:
                yield
            finally:
                with self._lock:
                    self._open.remove(sock)

    def _inside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._namespace is None else self._namespace.entered()


def end(sock: socket.socket) -> None:
    """Whoever waits in it, here or at the other end, learns that it is over."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was over already
