"""One run of a daemon: the command that starts it, its process, its log and its end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from tests.lab.namespace import Namespace
from tests.lab.wait import PATIENCE, WATCHED

ROOT = Path(__file__).resolve().parents[2]
#: By its API, the variable with the command of another implementation.
PEER_VARIABLES = {"v2": "FLANNELD_PEER", "v3": "FLANNELD_PEER_V3", "v0.6": "FLANNELD_PEER_V06"}
#: Variables of the caller that would steer a daemon.
FOREIGN = ("FLANNELD_", "KUBE", "NODE_NAME", "POD_NAME", "NOTIFY_SOCKET", "http_proxy", "https_proxy")


#: Lines of a failed daemon's log in the report of a wait for it.
LAST_LINES = 15


class Exit(NamedTuple):
    """How a daemon ended: its status (``-signal`` if one killed it) and how long that took, in seconds."""

    status: int
    seconds: float


def own_command() -> list[str]:
    """The daemon under test: ``FLANNELD_COMMAND``, else the one installed in ``.venv``."""
    return shlex.split(os.environ.get("FLANNELD_COMMAND", "")) or [str(ROOT / ".venv/bin/flanneld")]


def peer_command(api: str = "v2") -> list[str]:
    """Another implementation to share a network with, ``[]`` when there is none.

    ``FLANNELD_PEER`` speaks v2 of etcd's API, ``FLANNELD_PEER_V3`` speaks v3, and ``FLANNELD_PEER_V06`` is
    Go's v0.6.2, the last one that is a server of leases and its client.
    """
    return shlex.split(os.environ.get(PEER_VARIABLES[api], ""))


class Daemon:
    """A started daemon. ``environment`` is added to the caller's, cleaned of what would steer it."""

    def __init__(
        self, namespace: Namespace, command: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self._log = log
        with log.open("wb") as output:
            self._process = namespace.start(*command, output=output, environment=kept | (environment or {}))
        WATCHED.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def failure(self) -> str:
        """How it ended by itself with an error, and its last lines; "" unless it did."""
        status = self.status()
        if status in (None, 0, -signal.SIGTERM, -signal.SIGKILL):
            return ""
        lines = self.log().splitlines()[-LAST_LINES:]
        return "\n".join([f"the daemon with the log {self._log} ended by itself, status {status}:", *lines])

    def log(self) -> str:
        """What it wrote to stdout and stderr."""
        return self._log.read_text(errors="replace")

    def end(self, how: signal.Signals, deadline: float) -> Exit:
        """Send a signal and wait; raises ``AssertionError`` when it outlives the deadline (seconds)."""
        begin = time.monotonic()
        WATCHED.discard(self)
        self._process.send_signal(how)
        return self.wait(deadline, begin)

    def wait(self, deadline: float, begin: float | None = None) -> Exit:
        """Wait for it to end by itself."""
        deadline *= PATIENCE
        begin = time.monotonic() if begin is None else begin
        WATCHED.discard(self)
        try:
            status = self._process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the daemon still runs after {deadline:g} s; its log:\n{self.log()}"
            ) from None
        return Exit(status, time.monotonic() - begin)
