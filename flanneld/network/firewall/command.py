"""Running the firewall's commands: one at a time, each with a time limit, and with a full account of a failure."""

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

log = logging.getLogger(__name__)

#: Seconds for one command; waiting for a lock is a part of it.
TIME_LIMIT = 15.0
#: Where Debian keeps these commands; the PATH of an ordinary user lacks it.
_SYSTEM_PATHS = "/usr/sbin:/sbin"


class CommandFailed(Retryable):
    """A command did not do what it should. It keeps all there is to know, for the log at ``-v 2``."""

    def __init__(self, argv: Sequence[str], stdin: str, status: int | None, stderr: str, remedy: str) -> None:
        end = "did not end in time" if status is None else f"ended with status {status}"
        said = " ".join(stderr.split())
        super().__init__(f"{' '.join(argv)} {end}{f': {said}' if said else ''}", remedy)
        self.argv = tuple(argv)
        self.stdin = stdin
        self.status = status
        self.stderr = stderr


def find(program: str) -> str | None:
    """The path of a program, None when it is not installed."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}")


class Commands:
    """Runs commands, for one thread; any other may cancel."""

    def __init__(self, limit: float = TIME_LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """What the command wrote to stdout. Raises ``CommandFailed``."""
        log.log(V(6), "Running %s with %r", argv, stdin)
        process = self._start(argv, stdin)
        try:
            output, stderr = process.communicate(stdin, timeout=self._limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            output, stderr, status = "", "", None
        finally:
            with self._lock:
                self._running = None
            _close(process)
        if status == 0:
            return output
        remedy = "try it by hand" if status is None else "its input is in the log at -v 6"
        raise CommandFailed(argv, stdin, status, stderr, remedy)

    def cancel(self) -> None:
        """End the command that runs, and start no other."""
        with self._lock:
            self._cancelled = True
            if self._running:
                _kill(self._running)

    def _start(self, argv: Sequence[str], stdin: str) -> subprocess.Popen[str]:
        path = find(argv[0])
        with self._lock:
            if self._cancelled or path is None:
                why = "was cancelled" if self._cancelled else "is not installed"
                raise CommandFailed(argv, stdin, 127, why, "install the Debian package iptables")
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
                raise CommandFailed(argv, stdin, 126, str(error), f"see what {path} is") from error
            return self._running


def _close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with suppress(OSError):
                pipe.close()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the command and whatever it has started itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
