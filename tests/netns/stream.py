"""A TCP stream from one container to another, whose content is checked."""

from __future__ import annotations

import random
import socket
import threading

from tests.lab import Container
from tests.lab.wait import PATIENCE

PORT = 8081
CONTENT = random.Random(1).randbytes(1 << 20)
DEADLINE = 20 * PATIENCE


def check_stream(source: Container, target: Container) -> None:
    """Send a megabyte and see that it arrives whole, in order and unchanged, from the container itself."""
    with target.namespace.entered():
        server = socket.create_server((target.address, PORT))
    with server:
        server.settimeout(DEADLINE)
        with source.namespace.entered():
            sender = socket.create_connection((target.address, PORT), timeout=DEADLINE)
        with sender:
            receiver, (caller, _) = server.accept()
            receiver.settimeout(DEADLINE)
            thread = threading.Thread(target=_send, args=(sender,))
            thread.start()
            with receiver, receiver.makefile("rb") as arriving:
                arrived = arriving.read()
            thread.join()
    assert caller == source.address
    assert arrived == CONTENT, f"{len(arrived)} bytes arrived, or others than were sent"


def _send(sender: socket.socket) -> None:
    sender.sendall(CONTENT)
    sender.shutdown(socket.SHUT_WR)
