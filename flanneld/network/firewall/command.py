"""Running the firewall's commands: one at a time, each with a time limit."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from flanneld.compat.flags import quoted
from flanneld.compat.glog import V
from flanneld.errors import Retryable
from flanneld.network.firewall.driver import Rejected, Unavailable
from flanneld.runtime import clock, waits

log = logging.getLogger(__name__)

#: Seconds for one command; waiting for a lock is a part of it.
TIME_LIMIT = 10.0
_LOOK_AT_STOP = 0.1
#: Where Debian keeps these commands; the PATH of an ordinary user lacks it.
_SYSTEM_PATHS = "/usr/sbin:/sbin"


class CommandFailed(Rejected):
    """A command ended with another status than 0; all there is to know about it is kept here."""

    def __init__(self, argv: Sequence[str], stdin: str, status: int, stderr: str) -> None:
        said = " ".join(stderr.split()) or "it says nothing"
        super().__init__(
            f"{' '.join(argv)} ended with status {status}: {said}", "its input is in the log at -v=6"
        )
        self.argv = tuple(argv)
        self.stdin = stdin
        self.status = status
        self.stderr = stderr


class CommandHung(Retryable):
    """A command did not end in time, or the daemon is to stop, and so it was killed."""

    def __init__(self, argv: Sequence[str], stdin: str, limit: float) -> None:
        super().__init__(f"{' '.join(argv)} did not end within {limit:g} s", "try it by hand")
        self.argv = tuple(argv)
        self.stdin = stdin


def find(program: str) -> str | None:
    """The path of a program, None when it is not installed."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}")


class Commands:
    """Runs commands until ``stop``, which ends one that runs and lets no other begin."""

    def __init__(self, stop: threading.Event, limit: float = TIME_LIMIT) -> None:
        self._stop = stop
        self._limit = limit

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """What the command writes to stdout. Raises ``CommandFailed``, ``CommandHung``, ``Unavailable``."""
        log.log(V(6), "Running %s, input %s", " ".join(argv), quoted(stdin))
        process = _start(argv)
        try:
            output, stderr = self._communicate(process, argv, stdin)
        finally:
            _end(process)
        if process.returncode:
            raise CommandFailed(argv, stdin, process.returncode, stderr)
        return output

    def _communicate(
        self, process: subprocess.Popen[str], argv: Sequence[str], stdin: str
    ) -> tuple[str, str]:
        deadline = clock.now() + self._limit
        given: str | None = stdin
        while not self._stop.is_set() and clock.now() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(given, timeout=_LOOK_AT_STOP)
            given = None  # Further calls go on with what was given to the first.
        raise CommandHung(argv, stdin, self._limit)


def _start(argv: Sequence[str]) -> subprocess.Popen[str]:
    path = find(argv[0])
    if path is None:
        raise Unavailable(f"{argv[0]} is not installed", "install the Debian package iptables")
    try:
        return subprocess.Popen(
            argv,
            executable=path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(f"{path} does not start: {error.strerror}", "see what it is") from error


def _end(process: subprocess.Popen[str]) -> None:
    """Leave no process and no pipe behind, whatever the command itself has started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        waits.reap(process)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with suppress(OSError):
                pipe.close()
