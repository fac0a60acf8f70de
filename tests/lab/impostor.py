"""Something that listens where etcd should be, and is none."""

from __future__ import annotations

import socket

from tests.lab.etcd import PORT
from tests.lab.listener import Listener
from tests.lab.namespace import Namespace


class Impostor(Listener):
    """Gives every request the same answer; an empty one means to take everything and say nothing."""

    def __init__(self, namespace: Namespace, address: str, answer: bytes = b"") -> None:
        super().__init__(self._give, (address, PORT), namespace)
        #: How many requests have been answered so far, if each was small.
        self.asked = 0
        self._answer = answer

    def _give(self, client: socket.socket) -> None:
        while client.recv(65536):
            client.sendall(self._answer)
            self.asked += 1


def http(status: str, body: str, *headers: str) -> bytes:
    """A whole answer; ``status`` has a number and a word, a header a name and a value."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", body]).encode()
