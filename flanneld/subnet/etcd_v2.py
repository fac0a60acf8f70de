"""Leases in etcd's v2 API: ``<prefix>/config`` and ``<prefix>/subnets/<key>``, as Go flanneld has them."""

from __future__ import annotations

import logging
import posixpath
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from flanneld import clock
from flanneld.config import Config, parse
from flanneld.errors import Refused, Retryable
from flanneld.glog import Once, V
from flanneld.model import (
    FAMILIES,
    Added,
    Event,
    Family,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseAttrs,
    LeaseKey,
    Removed,
    Snapshot,
    name_of,
)
from flanneld.subnet.allocate import choose
from flanneld.subnet.codec import format_attrs, format_key, parse_attrs, parse_key
from flanneld.subnet.etcd_answers import Conflict, ListAgain, Node, NotFound, Position, Reply
from flanneld.subnet.etcd_client import Client, Timeouts
from flanneld.subnet.etcd_endpoints import EtcdOptions, Servers
from flanneld.subnet.manager import Cancelled, Deliver

__all__ = ["SUBNET_TTL", "EtcdOptions", "EtcdV2Manager", "LeaseTaken", "Timeouts"]

log = logging.getLogger(__name__)

#: Seconds that a lease lasts without renewal.
SUBNET_TTL = 86400
#: How often ``acquire`` tries to be the first before it gives up.
TRIES = 10
#: Seconds for which a list of all leases may be used again instead of reading another.
FRESH = 10.0
#: Seconds before a watch that failed goes on.
PAUSE = 1.0

_GONE = frozenset({"delete", "expire", "compareAndDelete"})
_EXAMPLE = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'
_OWN_IP = "give each node its own address with -public-ip"


class LeaseTaken(Retryable):
    """Another node has our lease; it is left as it is."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """All leases by the key that holds them."""

    at: Position
    leases: Mapping[str, Lease] = field(default_factory=dict)
    unreadable: frozenset[LeaseKey] = frozenset()
    read_at: float = field(default_factory=clock.now)

    def is_fresh(self) -> bool:
        return clock.now() - self.read_at <= FRESH

    def of(self, public_ip: IPAddress | None) -> list[tuple[str, Lease]]:
        """The leases of a node, lowest subnet first."""
        if public_ip is None:
            return []
        family: Family = 4 if public_ip.version == 4 else 6
        found = [item for item in self.leases.items() if item[1].attrs.public(family) == public_ip]
        return sorted(found, key=lambda item: [_order(net) for net in item[1].key])

    def networks(self) -> list[IPNetwork]:
        keys = [*(lease.key for lease in self.leases.values()), *self.unreadable]
        return [net for key in keys for net in key if net is not None]

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(self.leases.values()), self.unreadable)


class _Trouble:
    """What is wrong with a watch, for the log: each problem once, and once that it is over."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._is_down = False

    def tell(self, text: str, *, is_down: bool) -> None:
        if text not in self._told:
            self._told.add(text)
            self._is_down = self._is_down or is_down
            log.warning("Watching the leases: %s", text)

    def answered(self) -> None:
        if self._is_down:
            self._is_down = False
            log.info("Watching the leases: etcd is back")

    def settled(self) -> None:
        self._told.clear()


class EtcdV2Manager:
    """``SubnetManager`` on etcd v2. Building it connects to nothing; raises ``Fatal`` for bad options.

    ``randrange`` chooses among free subnets, see ``allocate.choose``.
    """

    def __init__(
        self,
        options: EtcdOptions,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
        randrange: Callable[[int], int] = random.randrange,
    ) -> None:
        prefix = "/" + posixpath.normpath(f"/{options.prefix}").lstrip("/")
        self._config_key = posixpath.join(prefix, "config")
        self._subnets = posixpath.join(prefix, "subnets")
        self._servers = Servers(options)
        self._timeouts = timeouts
        self._randrange = randrange
        self._once = Once()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._clients: set[Client] = set()
        self._requests = self._open_client(lambda: None)
        #: The last list of all leases: until we write, and until a watch starts from it.
        self._for_acquire: _Listing | None = None
        self._for_watch: _Listing | None = None
        self.name = f"etcd v2 at {self._servers.name} under {prefix}"

    def network_config(self) -> Config:
        try:
            node = self._requests.fetch(self._config_key).node
        except NotFound:
            raise Retryable(
                f"etcd has no network config at {self._config_key}",
                f"write it with the v2 API: ETCDCTL_API=2 etcdctl set {self._config_key} '{_EXAMPLE}'",
            ) from None
        return parse(node.value if node else "")

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        for _, lease in self._recent().of(public_ip):
            return lease.attrs
        return None

    def acquire(self, config: Config, attrs: LeaseAttrs, previous: LeaseKey) -> Lease:
        for _ in range(TRIES):
            listing = self._recent()
            self._for_acquire = None  # what follows writes
            try:
                return self._acquire_once(config, attrs, previous, listing)
            except Conflict as lost:
                log.log(V(1), "Another node was quicker, trying again: %s", lost)
        raise Retryable(f"other nodes were quicker {TRIES} times in a row", "wait; the next attempt may succeed")

    def renew(self, lease: Lease) -> Lease:
        key = self._key_of(lease.key)
        value = _value(lease.key, lease.attrs)
        for _ in range(TRIES):
            try:
                return self._renew_once(lease, key, value)
            except Conflict as lost:
                log.log(V(1), "The lease %s changed meanwhile, trying again: %s", lease, lost)
        raise Retryable(f"the lease {lease} changes all the time", _OWN_IP)

    def watch(self, deliver: Deliver) -> None:
        def start(client: Client) -> tuple[list[Event], Position]:
            listing, self._for_watch = self._for_watch, None
            if listing is None or not listing.is_fresh():
                listing = self._list(client)
                self._for_watch = None
            return [listing.snapshot()], listing.at

        self._follow(self._subnets, start, self._news, deliver)

    def watch_own(self, lease: Lease, deliver: Deliver) -> None:
        path = self._key_of(lease.key)

        def start(client: Client) -> tuple[list[Event], Position]:
            try:
                reply = client.fetch(path)
            except NotFound as missing:
                return [Removed(lease.key)], missing.at
            return news(reply), reply.at

        def news(reply: Reply) -> list[Event]:
            if reply.action in _GONE:
                return [Removed(lease.key)]
            return [Added(found) for found in self._readable(reply.node, lease.key)]

        self._follow(path, start, news, deliver)

    def close(self) -> None:
        self._stop.set()
        with self._lock:
            for client in self._clients:
                client.cut()

    # ---- leases ------------------------------------------------------------------------------

    def _recent(self) -> _Listing:
        if self._for_acquire is None or not self._for_acquire.is_fresh():
            return self._list(self._requests)
        return self._for_acquire

    def _list(self, client: Client) -> _Listing:
        try:
            reply = client.fetch(self._subnets, recursive=True)
        except NotFound as missing:
            listing = _Listing(missing.at)
        else:
            listing = self._read_listing(reply)
        self._for_acquire = self._for_watch = listing
        return listing
