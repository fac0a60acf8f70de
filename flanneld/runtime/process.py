"""Process setup: standard streams, file descriptor limit, interpreter settings; the service manager.

It is notified by systemd's protocol (sd_notify(3), sd_watchdog_enabled(3)).
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Mapping

from flanneld.compat.flags import quoted
from flanneld.errors import Fatal

log = logging.getLogger(__name__)

#: File descriptors needed: the daemon holds 15, a request or a command takes 10 more.
_NEEDED = 64
#: File descriptors of a daemon with 64 networks, 20 each, and the connections of its servers.
_WANTED = 4096
#: Seconds until a running thread yields. An event passes two threads to the kernel, so Python's 5 ms are too
#: long.
_SWITCH_INTERVAL = 0.0001


def open_standard_streams() -> None:
    """Open /dev/null for closed standard streams: otherwise a socket could get their number, and the log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    # Python sets them to None for streams closed at start.
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def ensure_descriptors() -> None:
    """Raise the soft limit of file descriptors if it is low. Raises ``Fatal`` if the hard limit is, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= _WANTED:
        return
    wanted = _WANTED if hard == unlimited else min(_WANTED, hard)
    if wanted < _NEEDED:
        raise Fatal(
            f"this process may have {wanted} file descriptors, and flanneld needs {_NEEDED}",
            "raise the limit: ulimit -n, or LimitNOFILE= of the service",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tune_interpreter() -> None:
    """Shorten the thread switch interval, and exempt all modules from garbage collection."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.freeze()


def trim_memory() -> None:
    """Return unused memory of the C library's heap to the kernel, where the library can (malloc_trim(3)).

    Lists of all leases and dumps of the kernel's tables leave a heap that is large and mostly empty.
    """
    from ctypes import CDLL  # rarely needed, and takes 1 MiB

    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


#: Seconds: limit for a service manager that does not read.
SEND_TIME = 0.5
#: Characters of a status. systemd takes no message above 4096 bytes.
STATUS_LENGTH = 1000


class Notifier:
    """Notifier of the service manager; does nothing without $NOTIFY_SOCKET.

    No call raises: a message that cannot be sent is lost, and the first loss is logged.
    """

    def __init__(self) -> None:
        self._complained = False
        self._status = ""
        #: True until the service manager has been told that we are ready.
        self._owes_ready = False

    def ready(self) -> None:
        self._owes_ready = not self._send("READY=1")

    def try_again(self) -> None:
        """Send ``ready`` again if it was lost: without it the service manager ends this daemon in time."""
        if self._owes_ready:
            self.ready()

    def status(self, text: str) -> None:
        """Send one line for ``systemctl status``. Non-ASCII text is escaped: sdnotify would lose it."""
        line = " ".join(text.split()).encode("unicode_escape").decode("ascii")[:STATUS_LENGTH]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        """Send a message. Return False if it is lost."""
        if not os.environ.get("NOTIFY_SOCKET"):
            return True
        try:
            from sdnotify import SystemdNotifier

            # One connection per message, so that a restart of the receiver does no harm.
            manager = SystemdNotifier(debug=True)
            with manager.socket:
                manager.socket.settimeout(SEND_TIME)
                manager.notify(message)
        except (ImportError, OSError) as error:
            self._complain(message, error)
            return False
        return True

    def _complain(self, message: str, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            address = os.environ.get("NOTIFY_SOCKET")
            log.warning("cannot send %s to the service manager at %s: %s", message, address, error)


def watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Return half the watchdog timeout of the service manager in seconds, None if it has none."""
    usec = environ.get("WATCHDOG_USEC", "")
    if not usec or environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (usec.isascii() and usec.isdigit() and len(usec) <= 20 and int(usec) > 0):
        log.warning("no watchdog: WATCHDOG_USEC is %s, which is no number of microseconds", quoted(usec))
        return None
    return min(int(usec) / 2_000_000, threading.TIMEOUT_MAX)
