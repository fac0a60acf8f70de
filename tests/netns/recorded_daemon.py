"""The daemon with a record of its effects: ``python -m tests.netns.recorded_daemon FILE FLAGS``.

Python's own functions for files, netlink sockets and threads tell of them, so nothing of the daemon is
replaced.
Each line of the file, in their order, is a kind of effect and its object.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from flanneld.main import main

#: Where the health server answers, and the thread before whose start it is asked about readiness.
HEALTH_PORT, ASKED_BEFORE = 8471, "reconciler"
# linux/netlink.h
_SOL_NETLINK, _ADD_MEMBERSHIP, _DUMP = 270, 1, 0x300


class Recorder(logging.Handler):
    """Writer of log lines and of effects."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        self.note("log", record.getMessage())

    def note(self, kind: str, what: object) -> None:
        os.write(self._file, f"{kind} {what}\n".encode())

    def install(self) -> None:
        """Begin to record."""
        logging.getLogger("flanneld").addHandler(self)
        sys.addaudithook(self._audit)
        start, send, set_option = threading.Thread.start, socket.socket.send, socket.socket.setsockopt
        send_all = socket.socket.sendall

        def started(thread: threading.Thread) -> None:
            if thread.name == ASKED_BEFORE:
                self.note("unready", "; ".join(unready().splitlines()))
            self.note("thread", thread.name)
            start(thread)

        def sent(sock: socket.socket, data: Any, *rest: Any) -> int:
            if sock.family == socket.AF_NETLINK and struct.unpack_from("=H", data, 6)[0] & _DUMP == _DUMP:
                self.note("netlink", "dump")
            return send(sock, data, *rest)

        def all_sent(sock: socket.socket, data: Any, *rest: Any) -> None:
            if sock.family == socket.AF_UNIX and bytes(data[:6]) == b"READY=":
                self.note("manager", data.decode())
            send_all(sock, data, *rest)

        def option_set(sock: socket.socket, level: int, option: int, *value: Any) -> None:
            if (level, option) == (_SOL_NETLINK, _ADD_MEMBERSHIP):
                self.note("netlink", "listens")
            set_option(sock, level, option, *value)

        threading.Thread.start = started  # type: ignore[method-assign, assignment]
        socket.socket.send = sent  # type: ignore[method-assign, assignment]
        socket.socket.sendall = all_sent  # type: ignore[method-assign, assignment]
        socket.socket.setsockopt = option_set  # type: ignore[method-assign, assignment]

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            self.note("file", Path(os.fsdecode(arguments[1])).name)


def unready() -> str:
    """Return what the health server says about readiness."""
    try:
        with urlopen(f"http://127.0.0.1:{HEALTH_PORT}/readyz", timeout=20) as answer:
            return str(answer.read().decode())
    except HTTPError as refusal:
        return refusal.read().decode()


if __name__ == "__main__":
    Recorder(sys.argv.pop(1)).install()
    main()
