"""What there is to see of a running daemon: its parts, as they come into being.

Whoever looks is another thread than those that work. So what is read here is a counter, a value that is
replaced and never changed, or copied in one step; nobody ever waits for whoever looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from flanneld.config import Config
from flanneld.errors import NoAnswer, Retryable
from flanneld.model import Event, Snapshot
from flanneld.options import Options
from flanneld.reconcile.counters import StoreCounters
from flanneld.reconcile.kernel_reconciler import KernelReconciler
from flanneld.runtime import clock
from flanneld.runtime.event_log import Events
from flanneld.subnet.lease_keeper import LeaseKeeper
from flanneld.subnet.manager import SubnetManager

if TYPE_CHECKING:
    from flanneld.diagnostics.probes import Prober
    from flanneld.reconcile.firewall import Firewall  # neither is needed by everybody

#: The calls of a store that ask something and come back.
_REQUESTS = ("network_config", "public_ips", "stored", "acquire", "renew")


class Components:
    """The parts, None as long as they are not there.

    ``overdue`` has a line for each task that is late, ``missing`` what is missing to be ready, ``waiting``
    what the start waits for, ``of_host`` the conditions of this host by the part of the daemon that looks
    at them. All may be called from any thread.
    """

    def __init__(
        self,
        options: Options,
        events: Events,
        overdue: Callable[[], list[str]],
        missing: Callable[[], list[str]],
        waiting: Callable[[], list[str]] = list,
        of_host: Callable[[], Iterable[tuple[str, Iterable[str]]]] = tuple,
    ) -> None:
        self.options = options
        self.events = events
        self.overdue = overdue
        self.missing = missing
        self.waiting = waiting
        self.of_host = of_host
        self.started = clock.wall()
        self.store = StoreCounters()
        self.manager: SubnetManager | None = None
        self.config: Config | None = None
        self.lease_keeper: LeaseKeeper | None = None
        self.reconciler: KernelReconciler | None = None
        self.firewall: Firewall | None = None
        self.prober: Prober | None = None

    @property
    def store_problem(self) -> Retryable | None:
        """Why the store is of no use now: the last failure of a watch, by ``problem``, or of a request."""
        of_watch: Retryable | None = getattr(self.manager, "problem", None)
        return of_watch or next(iter(self.store.problems.values()), None)

    @property
    def store_is_up(self) -> bool:
        """Return True if the store answers, be it with a refusal; False also before the first request."""
        return any(self.store.requests.counts) and not isinstance(self.store_problem, NoAnswer)

    @property
    def cached(self) -> str:
        """Where the leases are from while they are not the store's; else empty."""
        return self.reconciler.peers.cached if self.reconciler else ""

    def observe(self, manager: SubnetManager) -> None:
        """Count what is asked of a store and what it tells.

        In place, because a store may offer more than its contract says.
        """
        self.manager = manager
        for name in filter(partial(hasattr, manager), _REQUESTS):
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
            result = "ok"
            counters.answered(name)
        except Retryable as reason:
            counters.failed(name, reason)
            raise
        finally:
            counters.requests.observe(clock.now() - began)
            if name == "renew":
                counters.renewed(result)
        return answer

    return counted
