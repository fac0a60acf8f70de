"""What there is to see of a running daemon: its parts, as they come into being.

Whoever looks is another thread than those that work. So what is read here is a counter, a value that is
replaced and never changed, or copied in one step; nobody ever waits for whoever looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flanneld import clock
from flanneld.config import Config
from flanneld.counters import StoreCounters
from flanneld.errors import Retryable
from flanneld.events import Events
from flanneld.keeper import Keeper
from flanneld.model import Event, Snapshot
from flanneld.options import Options
from flanneld.reconcile import Reconciler
from flanneld.subnet.manager import SubnetManager

if TYPE_CHECKING:
    from flanneld.firewall import Firewall  # neither is needed by everybody
    from flanneld.probes import Prober

#: The calls of a store that ask something and come back.
_REQUESTS = ("network_config", "stored", "acquire", "renew")


class Sight:
    """The parts, None as long as they are not there.

    ``overdue`` has a line for each task that is late, ``missing`` what is missing to be ready; both may be
    called from any thread.
    """

    def __init__(
        self,
        options: Options,
        events: Events,
        overdue: Callable[[], list[str]],
        missing: Callable[[], list[str]],
    ) -> None:
        self.options = options
        self.events = events
        self.overdue = overdue
        self.missing = missing
        self.started = time.time()
        self.store = StoreCounters()
        self.manager: SubnetManager | None = None
        self.config: Config | None = None
        self.keeper: Keeper | None = None
        self.reconciler: Reconciler | None = None
        self.firewall: Firewall | None = None
        self.prober: Prober | None = None

    @property
    def store_is_up(self) -> bool:
        """Whether the store answers, as far as that is known: it may say so itself, by ``is_down``."""
        return self.store.is_up and not getattr(self.manager, "is_down", False)

    @property
    def cached(self) -> str:
        """Where the leases are from while they are not the store's; else empty."""
        return self.reconciler.peers.cached if self.reconciler else ""

    def observe(self, manager: SubnetManager) -> None:
        """Count what is asked of a store and what it tells.

        In place, because a store may offer more than its contract says.
        """
        self.manager = manager
        for name in _REQUESTS:
            setattr(manager, name, _counted(getattr(manager, name), self.store, name))
        watch, reread = manager.watch, manager.reread

        def counted_watch(deliver: Callable[[list[Event]], None], alive: Callable[[], None]) -> None:
            def pass_on(events: list[Event]) -> None:
                self.store.told(len(events), sum(isinstance(event, Snapshot) for event in events))
                deliver(events)

            watch(pass_on, alive)

        def counted_reread() -> None:
            self.store.was_asked = True
            reread()

        for name, counted in (("watch", counted_watch), ("reread", counted_reread)):
            setattr(manager, name, counted)


def _counted(ask: Callable[..., Any], counters: StoreCounters, name: str) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        result = "error"
        began = clock.now()
        try:
            answer = ask(*args)
            result, counters.is_up = "ok", True
        except Retryable:
            counters.errors += 1
            counters.is_up = False
            raise
        finally:
            counters.requests.observe(clock.now() - began)
            if name == "renew":
                counters.renewed(result)
        return answer

    return counted
