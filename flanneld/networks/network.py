"""One of several networks: runs its daemon, restarts it after a failure, and removes the network."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from flanneld.diagnostics.cleanup import sweep_network
from flanneld.errors import Cancelled, FlannelError
from flanneld.runtime import waits
from flanneld.runtime.process import Notifier
from flanneld.runtime.supervisor import Supervisor
from flanneld.runtime.waits import Backoff

log = logging.getLogger(__name__)

#: First word of a status line while startup waits.
_HELD_UP = "waiting for"


class NetworkNotifier(Notifier):
    """Substitute for the service manager's notifier in the daemon of one network."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self.is_ready = False
        self.text = ""
        self._changed = changed

    def ready(self) -> None:
        self.is_ready = True
        self._changed()

    def status(self, text: str) -> None:
        self.text = text
        self._changed()

    def watchdog(self) -> None:
        """Do nothing: the daemon of all networks feeds the watchdog."""

    def stopping(self) -> None:
        self.is_ready = False


#: Serves a network until its supervisor stops; the exit status is ignored.
Serve = Callable[["Network"], object]


class Network:
    """Network with its name. ``changed`` is called when its state may have changed."""

    def __init__(self, name: str, subnet_file: Path, serve: Serve, changed: Callable[[], None]) -> None:
        self.name = name
        self.subnet_file = subnet_file
        self.notifier = NetworkNotifier(changed)
        self.supervisor = Supervisor(quiet=(Cancelled,))
        self.problem = ""
        self._serve = serve
        self._changed = changed
        self._stop = threading.Event()
        self.is_removed = False
        self.has_ended = False

    @property
    def is_settled(self) -> bool:
        """Return True if the network is up, or has given a reason why it is not."""
        return self.notifier.is_ready or bool(self.problem) or self.notifier.text.startswith(_HELD_UP)

    @property
    def missing(self) -> str:
        """Reason why the network is not up; empty if it is."""
        if self.notifier.is_ready:
            return ""
        return f"network {self.name}: {self.problem or self.notifier.text or 'not up yet'}"

    def run(self) -> None:
        """Serve until ``stop``. Restart after each failure, with growing pauses."""
        backoff = Backoff(first=1.0, longest=15.0)
        while not self._stop.is_set():
            self._run_once()
            self.notifier.stopping()
            self._changed()
            if waits.pause(self._stop, backoff.pause()):
                break
            self.supervisor = Supervisor(quiet=(Cancelled,))
        if self.is_removed:
            self._sweep()
        self.has_ended = True
        self._changed()

    def stop(self, *, remove: bool = False) -> None:
        """End ``run``; with ``remove`` also remove the network's objects on this host. From any thread."""
        self.is_removed = self.is_removed or remove
        self._stop.set()
        self.supervisor.request_stop(f"the network {self.name} was removed" if remove else "the daemon ends")

    def _run_once(self) -> None:
        try:
            if not self._stop.is_set():
                self._serve(self)
            failure = self.supervisor.failure
            self.problem = str(failure) if failure else ""
        except Cancelled:
            self.problem = ""
        except FlannelError as failure:
            self.problem = str(failure)
            log.error("Network %s: %s", self.name, failure)  # noqa: TRY400 - it says all
        except Exception as failure:
            # A failure of one network must not end the others.
            self.problem = str(failure) or type(failure).__name__
            log.exception("Network %s failed", self.name)

    def _sweep(self) -> None:
        log.info("Removing all objects of network %s from this host", self.name)
        sweep(self.subnet_file)


def sweep(subnet_file: Path) -> None:
    """Remove devices, routes, rules and files of a network without a daemon."""

    def say(line: str) -> None:
        if not line.startswith("left "):
            log.info("%s", line[0].upper() + line[1:])

    try:
        sweep_network(subnet_file, (), say)
    except (OSError, FlannelError) as failure:
        log.error(  # noqa: TRY400 - it says all
            "Cannot remove all of %s: %s; try flanneld -cleanup", subnet_file, failure
        )
