"""When the rules of the packet filter are made: some before the first packet, others after the routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flanneld.readiness import Readiness
from flanneld.runtime import clock, waits
from flanneld.runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from flanneld.reconcile.firewall import Firewall

#: How long and how often to look whether the peers are known, before the rules that can wait, in seconds.
_SYNC_PATIENCE, _SYNC_LOOK = 5.0, 0.02
_TASK = "firewall"


def masquerade_now(make: Callable[[], Firewall], supervisor: Supervisor) -> None:
    """A container must not be seen outside with an address that nobody there can answer."""
    wall = make()
    wall.start()
    supervisor.start(_TASK, wall.run, wall.cancel)


def forward_soon(make: Callable[[], Firewall], supervisor: Supervisor, readiness: Readiness) -> None:
    """Rules that only let traffic through come after the routes on which it goes."""
    walls: list[Firewall] = []

    def run() -> None:
        deadline = clock.now() + _SYNC_PATIENCE
        while not readiness.knows_peers() and clock.now() < deadline:
            if waits.pause(supervisor.stop, _SYNC_LOOK):
                return
        walls.append(make())
        walls[0].start_and_run()

    def cancel() -> None:
        for wall in walls:
            wall.cancel()

    supervisor.start(_TASK, run, cancel)
