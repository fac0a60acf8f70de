"""Watchdog of the udp proxy. It kills a proxy that hangs, but not one that is slow.

On a busy machine a healthy process may be silent for seconds, while it waits for CPU or disk. So
silence alone proves nothing. A proxy hangs if it sleeps all the time, or if it gets CPU time and still does
not answer.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from flanneld.backends.udp import control
from flanneld.runtime import clock, waits

log = logging.getLogger(__name__)

#: Seconds between two requests, and between two checks of a proxy that owes an answer.
PERIOD, _LOOK = 2.0, 1.0
#: Seconds of silence allowed to a proxy that sleeps, and to one that runs.
IDLE_FOR, BUSY_FOR = 5.0, 15.0
#: Consecutive checks that must agree.
_LOOKS = 3
_TICKS = os.sysconf("SC_CLK_TCK")
#: Seconds that the kernel may take to end a process.
_END_PATIENCE = 5.0


class Activity(Struct, frozen=True, gc=False):
    """Sample of a process: the states of its threads (proc(5)), and its CPU time in seconds."""

    at: float
    states: str
    cpu: float

    @property
    def sleeps(self) -> bool:
        """True if no thread waits for CPU or disk."""
        return not set(self.states) & {"R", "D"}


def activity(pid: int, now: float) -> Activity:
    """Return a sample of a process. Raises ``OSError`` if it is gone."""
    rows = [
        (task / "stat").read_text().rpartition(")")[2].split() for task in Path(f"/proc/{pid}/task").iterdir()
    ]
    return Activity(
        now, "".join(row[0] for row in rows), sum(int(row[11]) + int(row[12]) for row in rows) / _TICKS
    )


def verdict(silent: float, looks: list[Activity]) -> str:
    """Return why a process silent for ``silent`` seconds counts as hanging, else an empty text (pure)."""
    last = looks[-_LOOKS:]
    if len(last) < _LOOKS:
        return ""
    if silent >= IDLE_FOR and all(each.sleeps for each in last) and last[0].cpu == last[-1].cpu:
        return "is stopped" if "T" in last[-1].states else "does nothing"
    asleep = sum(each.sleeps for each in looks)
    runs = looks[-1].cpu - looks[0].cpu >= (looks[-1].at - looks[0].at) / 2
    if silent >= BUSY_FOR and (runs or 2 * asleep > len(looks)):
        return "does other things"
    return ""


def end(pidfd: int) -> None:
    """Kill a process and wait for its end, which frees its resources."""
    with suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    waits.readable(pidfd, _END_PATIENCE)


class ProxyWatchdog:
    """Watchdog with a connection of its own, which never blocks. For one thread."""

    def __init__(self, tun: str) -> None:
        self._tun = tun
        self.next_look = clock.now() + PERIOD
        self._connection: socket.socket | None = None
        self._pid = 0
        self._asked = 0.0
        self._looks: list[Activity] = []

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def look(self) -> bool:
        """Send a request, or check for its answer. Return True if the proxy is gone."""
        now = clock.now()
        self.next_look = now + PERIOD
        if self._connection is None:
            self._connect()
            return False
        try:
            if self._connection.recv(control.LONGEST, socket.MSG_DONTWAIT):
                self._ask(now)
                return False
        except BlockingIOError:
            return self._suspect(now)
        except OSError:
            pass  # Gone: treated like an empty message.
        self.close()
        return True

    def _connect(self) -> None:
        """Connect to the first trusted proxy; on failure the next check tries again."""
        for address in control.addresses_of(self._tun):
            connection = control.new_socket()
            try:
                connection.setblocking(False)
                connection.connect(address)
                pid, trusted = control.other_end(connection)
                if trusted:
                    self._pid, self._connection = pid, connection
                    self._ask(clock.now())
                    return
            except OSError:
                self.close()
            connection.close()

    def _ask(self, now: float) -> None:
        assert self._connection
        self._connection.send(control.HELLO, socket.MSG_DONTWAIT)
        self._asked = now
        self._looks.clear()

    def _suspect(self, now: float) -> bool:
        self.next_look = now + _LOOK
        with suppress(OSError):  # the next check finds that it is gone
            self._looks.append(activity(self._pid, now))
        reason = verdict(now - self._asked, self._looks)
        if not reason:
            return False
        if self._end():
            silent = now - self._asked
            log.warning(
                "Killed the udp proxy of %s, process %d: no answer for %.0f s, and %s",
                self._tun, self._pid, silent, reason,
            )  # fmt: skip
        self.close()
        return True

    def _end(self) -> bool:
        """Kill the proxy if it is still there and silent. Return True if it was."""
        assert self._connection
        try:
            pidfd = os.pidfd_open(self._pid)
        except OSError:
            return False
        try:
            # While it holds its end of the connection, its pid cannot be reused.
            self._connection.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            end(pidfd)
            return True
        except OSError:
            return False
        finally:
            os.close(pidfd)
        return False
