"""Commands with limits on time and output, killed when the daemon stops; processes that outlive it."""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from flanneld.compat.glog import V
from flanneld.errors import Retryable, cause_of
from flanneld.runtime import waits

log = logging.getLogger(__name__)

#: Seconds for one command, unless its caller sets another limit.
TIME_LIMIT = 10.0
#: Bytes on each of stdout and stderr. iptables-save writes tens of MB on a large Kubernetes node.
LONGEST_OUTPUT = 64 << 20
#: Seconds between checks of the stop event.
_LOOK_AT_STOP = 0.1
_PIECE = 64 << 10
#: Characters of a command in a message.
_LONGEST_NAME = 200
#: System commands of Debian, which an ordinary user's PATH lacks.
_SYSTEM_PATHS = "/usr/sbin:/sbin"


class Finished(Struct, frozen=True, gc=False):
    """Result of a command. A negative ``status`` is the signal that killed it."""

    status: int
    output: str
    errors: str


class NotStarted(Retryable):
    """Error for a program that is not installed or cannot be executed."""


class CommandHung(Retryable):
    """Error for a command killed on its timeout or at the daemon's stop."""


class TooMuchOutput(Retryable):
    """Error for a command killed because its output exceeded the limit."""


def find(program: str) -> str | None:
    """Return the path of a program, None if it is not installed."""
    # Not shutil.which, which would load bz2 and lzma. A folder without access makes is_file raise.
    places = f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}".split(":")
    paths = (Path(place, program) for place in places)
    return next((str(path) for path in paths if os.access(path, os.X_OK) and path.is_file()), None)


class CommandRunner:
    """Runner of commands for any thread. ``stop`` kills running ones and refuses further ones."""

    def __init__(self, stop: threading.Event, longest_output: int = LONGEST_OUTPUT) -> None:
        self._stop = stop
        self._longest_output = longest_output

    def run(
        self,
        command: Sequence[str] | str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout: float = TIME_LIMIT,
        *,
        at_exit: bool = False,
        clean: bool = False,
        merged: bool = False,
        name: str = "",
    ) -> Finished:
        """Run a command, a string through the shell, and return its result.

        - ``env`` is added to our environment, or replaces it with ``clean``.
        - ``at_exit`` is for commands during the daemon's stop: only ``timeout`` ends them.
        - ``merged`` redirects stderr to stdout.
        - ``name`` stands for a command in messages whose text may contain a key.

        Raises ``NotStarted``, ``CommandHung`` and ``TooMuchOutput``.
        """
        argv = ("sh", "-c", command) if isinstance(command, str) else tuple(command)
        log.log(V(6), "Running %s", name or " ".join(argv))
        name = name or named(argv)
        process = _start(argv, {**({} if clean else os.environ), **(env or {})}, merged=merged)
        deadline = time.monotonic() + timeout

        def check() -> None:
            if time.monotonic() >= deadline or (self._stop.is_set() and not at_exit):
                raise CommandHung(f"{name} did not end within {timeout:g} s", "try it by hand")

        try:
            check()
            output, errors = self._exchange(process, stdin.encode(), check)
            while process.poll() is None:
                check()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_AT_STOP)
        except _Overflow:
            problem = f"{name} writes more than {self._longest_output >> 20} MiB"
            raise TooMuchOutput(problem, "see what it writes") from None
        finally:
            _end(process)
        return Finished(process.returncode, output, errors)

    def _exchange(
        self, process: subprocess.Popen[bytes], stdin: bytes, check: Callable[[], None]
    ) -> tuple[str, str]:
        """Write stdin and read both outputs until the command closes them."""
        assert process.stdin
        taken = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr) if pipe}
        with selectors.DefaultSelector() as ready:
            for fd in taken:
                ready.register(fd, selectors.EVENT_READ)
            ready.register(process.stdin, selectors.EVENT_WRITE)
            while any(fd in ready.get_map() for fd in taken):
                check()
                for key, _ in ready.select(_LOOK_AT_STOP):
                    if key.fd in taken:
                        is_over = not self._take(key.fd, taken[key.fd])
                    else:
                        stdin, is_over = _give(key.fd, stdin)
                    if is_over:
                        ready.unregister(key.fileobj)
                        if key.fileobj is process.stdin:
                            process.stdin.close()
        output, *errors = (bytes(each).decode(errors="replace") for each in taken.values())
        return output, "".join(errors)

    def _take(self, fd: int, taken: bytearray) -> bool:
        piece = os.read(fd, _PIECE)
        taken += piece
        if len(taken) > self._longest_output:
            raise _Overflow
        return bool(piece)


class _Overflow(Exception):
    pass


def named(argv: Sequence[str]) -> str:
    """Return a command for a message, truncated: a script may be long."""
    text = " ".join(argv)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def _give(fd: int, stdin: bytes) -> tuple[bytes, bool]:
    """Write one piece. Return the rest, and True if it is empty or the command closed its stdin."""
    try:
        rest = stdin[os.write(fd, stdin[: select.PIPE_BUF]) :] if stdin else b""
    except BrokenPipeError:
        return b"", True
    return rest, not rest


def _start(argv: Sequence[str], env: Mapping[str, str], *, merged: bool) -> subprocess.Popen[bytes]:
    path = find(argv[0])
    if path is None:
        raise NotStarted(f"{argv[0]} is not installed", "install it")
    try:
        return subprocess.Popen(
            argv,
            executable=path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise NotStarted(f"{path} does not start: {cause_of(error)}", "see what it is") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a running command, and close its pipes."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with suppress(OSError):
                pipe.close()


class LastingProcess:
    """Process in a session of its own: a terminal's Ctrl-C for the daemon does not reach it.

    Its output goes to a descriptor, or into a pipe for ``said``. Raises ``OSError`` if it does not start.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], output: int = subprocess.PIPE
    ) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, or the negative number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def said(self, within: float) -> list[str]:
        """Return the lines that it writes before it closes its output or ends.

        It is killed if it writes nothing ``within`` seconds.
        """
        assert self._process.stdout
        with self._process.stdout as output:
            if waits.readable(output.fileno(), within):
                return output.read().decode(errors="replace").split("\n")[:-1]
        self._process.kill()
        return [f"it was not ready after {within:g} s"]
