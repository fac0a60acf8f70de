"""Something that listens where etcd should be, and is none."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

from tests.lab.etcd import PORT
from tests.lab.namespace import Namespace


class Impostor:
    """Gives every request the same answer; an empty one means to take everything and say nothing."""

    def __init__(self, namespace: Namespace, address: str, answer: bytes = b"", port: int = PORT) -> None:
        #: How many requests have been answered so far, if each was small.
        self.asked = 0
        self._answer = answer
        with namespace.entered():
            self._listener = socket.create_server((address, port), backlog=64)
        self._clients: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self._listener)
        self._thread.join(5)
        self._listener.close()
        for client in self._clients:
            _end(client)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # it was shut down
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                while client.recv(65536):
                    client.sendall(self._answer)
                    self.asked += 1
        except OSError:
            return  # the client has gone, or the test is over


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was over already
