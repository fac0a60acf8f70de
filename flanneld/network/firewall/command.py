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

from flanneld.errors import Retryable
from flanneld.glog import V
from flanneld.network.firewall.driver import Rejected, Unavailable

log = logging.getLogger(__name__)

#: Seconds for one command; waiting for a lock is a part of it.
TIME_LIMIT = 10.0
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
    """A command did not end in time, or the daemon is stopping, and so it was killed."""

    def __init__(self, argv: Sequence[str], stdin: str, limit: float) -> None:
        super().__init__(f"{' '.join(argv)} did not end within {limit:g} s", "try it by hand")
        self.argv = tuple(argv)
        self.stdin = stdin


def find(program: str) -> str | None:
    """The path of a program, None when it is not installed."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}")


class Commands:
    """Runs commands for one thread; any other may cancel."""

    def __init__(self, limit: float = TIME_LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """What the command writes to stdout. Raises ``CommandFailed``, ``CommandHung``, ``Unavailable``."""
        log.log(V(6), "Running %s, input %r", " ".join(argv), stdin)
        process = self._start(argv, stdin)
        try:
            output, stderr = process.communicate(stdin, timeout=self._limit)
        except subprocess.TimeoutExpired:
            raise CommandHung(argv, stdin, self._limit) from None
        finally:
            self._finish(process)
        if process.returncode:
            raise CommandFailed(argv, stdin, process.returncode, stderr)
        return output

    def cancel(self) -> None:
        """End the command that runs, and start no other."""
        with self._lock:
            self._cancelled = True
            if self._running:
                _kill(self._running)

    def _start(self, argv: Sequence[str], stdin: str) -> subprocess.Popen[str]:
        path = find(argv[0])
        if path is None:
            raise Unavailable(f"{argv[0]} is not installed", "install the Debian package iptables")
        with self._lock:
            if self._cancelled:
                raise CommandHung(argv, stdin, 0)
            try:
                self._running = subprocess.Popen(
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
            return self._running

    def _finish(self, process: subprocess.Popen[str]) -> None:
        """Leave no process and no pipe behind, whatever the command itself has started."""
        with self._lock:
            self._running = None
            if process.returncode is None:
                _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                with suppress(OSError):
                    pipe.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
