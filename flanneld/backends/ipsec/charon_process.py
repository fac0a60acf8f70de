"""charon as a process that outlives the daemon: lookup, start, recognition by the next run, and end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flanneld.errors import Fatal, Retryable, cause_of
from flanneld.network.ipsec_traces import CHARON_PID_FILE
from flanneld.runtime import waits

if TYPE_CHECKING:
    from flanneld.runtime.command import LastingProcess

#: Paths used by distributions, in upstream's order, tried after PATH.
FOLDERS = ("/usr/lib/strongswan", "/usr/lib/ipsec", "/usr/libexec/strongswan", "/usr/libexec/ipsec")
#: Variable in the environment of a charon that a daemon has started: a digest of the settings then.
_MARK = "FLANNELD_CHARON"
#: Seconds for charon to notify its peers of its end, then until a killed process is gone; and between checks.
_END_LIMIT, _KILL_LIMIT, _LOOK = 2.0, 5.0, 0.01
#: Bytes of its output to read at a time.
_OUTPUT = 64 << 10
#: Variables of our environment that charon gets: others may contain passwords.
_PASSED = ("PATH", "LANG", "LD_LIBRARY_PATH", "STRONGSWAN_CONF", "LEAK_DETECTIVE_DISABLE", "TZ")


def find() -> str:
    """Return charon's path. Raises ``Fatal`` if it is not installed."""
    import shutil  # other backends only look for a charon that runs

    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *FOLDERS))
    found = shutil.which("charon", path=path)
    if found is None:
        problem = f"charon is neither in PATH nor in {', '.join(FOLDERS)}"
        remedy = (
            "install strongSwan with its VICI plug-in; on Debian: apt-get install strongswan-charon"
            " strongswan-swanctl libstrongswan-standard-plugins"
        )
        raise Fatal(problem, remedy)
    return found


def running() -> int:
    """Return the pid of a charon that a daemon of this host has started, 0 if there is none."""
    with suppress(OSError, ValueError):
        pid = int(CHARON_PID_FILE.read_text())
        return pid if _mark_of(pid) is not None else 0
    return 0


class CharonProcess:
    """charon as started by this run or an earlier one. ``mark`` is a digest of the present settings.

    Its output before the first answer is kept to report why it does not start.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._pid = 0
        self._child: LastingProcess | None = None
        self._output = -1

    @property
    def pid(self) -> int:
        """Return its pid, 0 if it does not run."""
        if self._child is not None and self._child.pid == self._pid:
            # A child that ends loses its environment first. Until it is reaped, no other charon starts.
            return self._pid if self._child.status is None else 0
        return self._pid if self._pid and _mark_of(self._pid) is not None else 0

    @property
    def status(self) -> int | None:
        """Return its exit status, or the negative number of the signal that ended it; None if unknown."""
        return self._child.status if self._child else None

    def find_running(self) -> None:
        """Look for a charon of an earlier run, unless ours runs."""
        self._pid = self.pid or running()

    def is_outdated(self) -> bool:
        """Return True if it runs with other settings, or an upgrade has replaced its program."""
        pid = self.pid
        if not pid:
            return False
        with suppress(OSError):
            if str(Path(f"/proc/{pid}/exe").readlink()).endswith(" (deleted)"):
                return True
        return _mark_of(pid) != self._mark

    def start(self) -> None:
        """Start it. Raises ``Fatal`` if it is not installed, ``Retryable`` if it does not start."""
        from flanneld.runtime.command import LastingProcess

        path = find()
        _remove_stale_pid_file()
        output = self._new_output()
        environment = {name: value for name, value in os.environ.items() if name in _PASSED}
        try:
            self._child = LastingProcess([path], environment | {_MARK: self._mark}, output)
        except OSError as failure:
            raise Retryable(f"charon does not start: {cause_of(failure)}") from None
        finally:
            os.close(output)
        self._pid = self._child.pid

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
        self.close()
        self._output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return output

    def kill(self) -> None:
        """Send SIGKILL if it runs, without a notice to its peers."""
        if _send(self.pid, signal.SIGKILL):
            waits.until(self._is_over, within=_KILL_LIMIT, every=_LOOK)

    def end(self) -> None:
        """Send SIGTERM, so that charon ends its SAs; kill it if it is still there after 2 s."""
        if _send(self.pid, signal.SIGTERM) and not waits.until(self._is_over, within=_END_LIMIT, every=_LOOK):
            self.kill()

    def close(self) -> None:
        """Release the pipe. The process goes on: charon ignores SIGPIPE."""
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _is_over(self) -> bool:
        return self.pid == 0


def end_running(pid: int) -> bool:
    """Send SIGTERM to a charon that ``running`` has found. Return False if it cannot be sent."""
    return _mark_of(pid) is None or _send(pid, signal.SIGTERM)


def _send(pid: int, number: signal.Signals) -> bool:
    with suppress(OSError):
        if pid:
            os.kill(pid, number)
            return True
    return False


def _mark_of(pid: int) -> str | None:
    """Return the mark in a process's environment; None without one, and for a process that has ended."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == _MARK.encode():
                return value.decode(errors="replace")
    return None


def _remove_stale_pid_file() -> None:
    """Remove the pid file if its pid now belongs to another program, as after a container's restart."""
    with suppress(OSError, ValueError):
        pid = int(CHARON_PID_FILE.read_text())
        with suppress(FileNotFoundError):
            if "charon" in Path(f"/proc/{pid}/comm").read_text():
                return
        CHARON_PID_FILE.unlink()
