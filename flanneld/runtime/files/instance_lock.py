"""Lock that keeps two daemons from serving one subnet file.

The kernel releases it when the process ends in any way. Child processes do not inherit it: the udp proxy
outlives the daemon.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from flanneld.errors import Cancelled, Fatal
from flanneld.runtime import clock

log = logging.getLogger(__name__)

#: Seconds. In a DaemonSet's surge update the old pod has 30 s to end, and takes less than one.
PATIENCE = 30.0
#: Seconds between attempts.
_PAUSE = 0.1


class InstanceLock:
    """Exclusive lock on ``path``, held until ``close`` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def wait(
        self, stop: threading.Event, within: float = PATIENCE, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        """Take the lock, waiting for another daemon to end; ``tell`` gets one line about it.

        Raises ``Fatal`` after ``within`` seconds, ``Cancelled`` on a stop. If the file cannot be created, as
        on a read-only file system, there is no lock.
        """
        deadline = clock.now() + within
        is_said = False
        while not self.try_take():
            if clock.now() >= deadline:
                raise Fatal(
                    f"another flanneld has held {self._path} for {within:g} s",
                    f"stop it (find it with: fuser {self._path}), or give this one its own -subnet-file",
                )
            if not is_said:
                line = f"Another flanneld holds {self._path}: waiting up to {within:g} s for it to end"
                log.warning("%s", line)
                tell(line)
                is_said = True
            if stop.wait(_PAUSE):
                raise Cancelled

    def try_take(self, *, create: bool = True) -> bool:
        """Take the lock now. Return False if another process holds it, True also if the file cannot exist."""
        while True:
            try:
                if create:
                    self._path.parent.mkdir(0o755, parents=True, exist_ok=True)
                descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT * create, 0o600)
            except FileNotFoundError:
                return True
            except OSError as error:
                log.warning("No lock at %s against a second daemon: %s", self._path, error.strerror)
                return True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                log.warning("No lock at %s against a second daemon: %s", self._path, error.strerror)
                return True
            if _is_at(self._path, descriptor):
                self._descriptor = descriptor
                return True
            os.close(descriptor)  # -cleanup removed it between our open and our lock

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))
