"""Notifications to the service manager by systemd's protocol (sd_notify(3), sd_watchdog_enabled(3))."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

from flanneld.compat.flags import quoted

log = logging.getLogger(__name__)

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

    def ready(self) -> None:
        self._send("READY=1")

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

    def _send(self, message: str) -> None:
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        try:
            from sdnotify import SystemdNotifier

            # One connection per message, so that a restart of the receiver does no harm.
            manager = SystemdNotifier(debug=True)
            with manager.socket:
                manager.socket.settimeout(SEND_TIME)
                manager.notify(message)
        except (ImportError, OSError) as error:
            self._complain(message, error)

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
