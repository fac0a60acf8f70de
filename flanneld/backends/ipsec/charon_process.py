"""charon as a child process: lookup, start bound to the daemon's life, and stop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from flanneld.errors import Fatal, Retryable, cause_of
from flanneld.runtime import waits

#: Paths used by distributions, in upstream's order, tried after PATH.
FOLDERS = ("/usr/lib/strongswan", "/usr/lib/ipsec", "/usr/libexec/strongswan", "/usr/libexec/ipsec")
#: charon refuses to start while a process with the pid in this file lives, of any program. The path is fixed.
_PID_FILE = Path("/var/run/charon.pid")
#: Seconds for charon to notify its peers of its end while the daemon stops.
_END_LIMIT = 0.7
#: Seconds until a killed process is gone, and between two checks.
_KILL_LIMIT, _LOOK = 5.0, 0.01
#: Bytes of its output to read at a time.
_OUTPUT = 64 << 10
#: Kills charon when the thread that started it ends, as upstream does. linux/prctl.h: PR_SET_PDEATHSIG is 1.
_WRAPPER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
#: Variables of our environment that charon gets: others may contain passwords.
_PASSED = ("PATH", "LANG", "LD_LIBRARY_PATH", "STRONGSWAN_CONF", "LEAK_DETECTIVE_DISABLE", "TZ")


def find() -> str:
    """Return charon's path. Raises ``Fatal`` if it is not installed."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *FOLDERS))
    found = shutil.which("charon", path=path)
    if found is None:
        problem = f"charon is neither in PATH nor in {', '.join(FOLDERS)}"
        remedy = "install strongSwan with its VICI plug-in: strongswan-charon strongswan-swanctl on Debian"
        raise Fatal(problem, remedy)
    return found


class CharonProcess:
    """charon as our child. Its output before the first answer is kept to report why it does not start."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = -1

    @property
    def pid(self) -> int:
        """Return its pid, 0 if it does not run."""
        running = self._process
        return running.pid if running is not None and running.poll() is None else 0

    @property
    def status(self) -> int | None:
        """Return its exit status, or the negative number of the signal that ended it; None if it runs."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start it. Raises ``Fatal`` if it is not installed, ``Retryable`` if it does not start."""
        self.kill()
        path = find()
        _remove_stale_pid_file()
        output = self._new_output()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={name: value for name, value in os.environ.items() if name in _PASSED},
                cwd="/",
                # A signal for the daemon, such as a terminal's Ctrl-C, must not reach charon directly.
                start_new_session=True,
            )
        except OSError as failure:
            raise Retryable(f"charon does not start: {cause_of(failure)}") from None
        finally:
            os.close(output)

    def _is_over(self) -> bool:
        return self.pid == 0

    def output(self) -> str:
        """Return the last line of output since the last call; empty without one."""
        data = b""
        with suppress(BlockingIOError):
            while self._output >= 0 and (piece := os.read(self._output, _OUTPUT)):
                data = piece
        lines = data.decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def _new_output(self) -> int:
        """Return the write end of a pipe that never blocks charon: excess output is lost.

        charon buffers up to 4 KiB of its output, even in mid-line. So our log does not use it.
        """
        if self._output >= 0:
            os.close(self._output)
        self._output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return output

    def kill(self) -> None:
        """Send SIGKILL if it runs, without a notice to its peers."""
        if self._process is not None:
            self._process.kill()
            waits.until(self._is_over, within=_KILL_LIMIT, every=_LOOK)

    def end(self) -> None:
        """Send SIGTERM, and wait at most 0.7 s for the exit."""
        if self._process is not None:
            self._process.terminate()
            waits.until(self._is_over, within=_END_LIMIT, every=_LOOK)
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def _remove_stale_pid_file() -> None:
    """Remove the pid file if its pid now belongs to another program, as after a container's restart."""
    with suppress(OSError, ValueError):
        pid = int(_PID_FILE.read_text())
        with suppress(FileNotFoundError):
            if "charon" in Path(f"/proc/{pid}/comm").read_text():
                return
        _PID_FILE.unlink()
