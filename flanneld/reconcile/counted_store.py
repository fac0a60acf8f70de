"""Wrapper of the store that counts requests, their failures, and the events of the watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import TypeVar

from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import Event, IPAddress, Lease, LeaseAttrs, LeaseKey, Snapshot
from flanneld.reconcile.counters import StoreCounters
from flanneld.runtime import clock
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts, NodeStore, Store

Result = TypeVar("Result")


class CountedStore:
    """``Store`` that forwards every call. ``counters`` may be read from any thread."""

    def __init__(self, manager: Store) -> None:
        self.counters = StoreCounters()
        self._manager = manager

    @property
    def name(self) -> str:
        return self._manager.name

    @property
    def problem(self) -> Retryable | None:
        return self._manager.problem

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._manager.addresses

    def network_config(self) -> Config:
        return self._count("network_config", self._manager.network_config)

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        return self._count("stored", partial(self._manager.stored, public_ip))

    def read_leases(self) -> Iterable[Lease]:
        return self._count("read_leases", self._manager.read_leases)

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        return self._count("acquire", partial(self._manager.acquire, config, attrs, previous, local))

    def renew(self, lease: Lease) -> Lease:
        result = "error"
        try:
            renewed = self._count("renew", partial(self._manager.renew, lease))
            result = "ok"
        finally:
            self.counters.renewed(result)
        return renewed

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        def pass_on(events: list[Event]) -> None:
            self.counters.told(len(events), sum(isinstance(event, Snapshot) for event in events))
            deliver(events)

        self._manager.watch(pass_on, alive)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        self._manager.watch_own(lease, deliver, alive)

    def reread(self) -> None:
        self.counters.was_asked = True
        self._manager.reread()

    def reconnect(self) -> None:
        self._manager.reconnect()

    def close(self) -> None:
        self._manager.close()

    def _count(self, name: str, ask: Callable[[], Result]) -> Result:
        began = clock.now()
        try:
            answer = ask()
            self.counters.answered(name)
        except Retryable as reason:
            self.counters.failed(name, reason)
            raise
        finally:
            self.counters.requests.observe(clock.now() - began)
        return answer


class CountedNodeStore(CountedStore):
    """``CountedStore`` for a store that is also a ``NodeStore``. Both arguments are the same object."""

    def __init__(self, manager: Store, node_store: NodeStore) -> None:
        super().__init__(manager)
        self._node_store = node_store

    def public_ips(self) -> tuple[IPv4Address | None, IPv6Address | None]:
        return self._count("public_ips", self._node_store.public_ips)

    def watch_node(self, alive: Callable[[], None]) -> None:
        self._node_store.watch_node(alive)

    def mark_available(self) -> None:
        self._node_store.mark_available()

    def report(self, reason: str) -> None:
        self._node_store.report(reason)


def counted(manager: Store) -> CountedStore:
    """Return a wrapper with the interfaces of ``manager``."""
    return CountedNodeStore(manager, manager) if isinstance(manager, NodeStore) else CountedStore(manager)
