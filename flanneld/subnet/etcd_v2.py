"""Leases in etcd's v2 API: ``<prefix>/config`` and ``<prefix>/subnets/<key>``.

Keys, values and requests are those of Go flanneld 0.12, so both share one network. Two things differ on
purpose: a lease is overwritten only if it still is what was read, and a lease with another public IP is
never taken over.
"""

from __future__ import annotations

import logging
import posixpath
import random
import threading
from collections.abc import Callable
from ipaddress import IPv4Network, IPv6Network

from flanneld import clock
from flanneld.config import Config, SubnetRange, parse
from flanneld.errors import Retryable
from flanneld.glog import Once, V
from flanneld.model import (
    FAMILIES,
    Added,
    Event,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseAttrs,
    LeaseKey,
    Removed,
    name_of,
)
from flanneld.subnet.allocate import choose
from flanneld.subnet.codec import format_attrs
from flanneld.subnet.etcd_answers import Conflict, NotFound, Position, Reply
from flanneld.subnet.etcd_client import Client, Timeouts
from flanneld.subnet.etcd_endpoints import EtcdOptions, Servers
from flanneld.subnet.etcd_leases import LeaseReader, Listing
from flanneld.subnet.etcd_watch import Follower, News, Start
from flanneld.subnet.manager import Cancelled, Deliver

__all__ = ["SUBNET_TTL", "EtcdOptions", "EtcdV2Manager", "LeaseTaken", "Timeouts"]

log = logging.getLogger(__name__)

#: Seconds that a lease lasts without renewal.
SUBNET_TTL = 86400
#: How often to try again because somebody else was quicker.
TRIES = 10
#: Seconds for which a list of all leases need not be read again.
FRESH = 10.0

_EXAMPLE = '{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}'


def _nothing() -> None:
    pass


class LeaseTaken(Retryable):
    """Another node has our lease; it is not overwritten."""


class EtcdV2Manager:
    """``SubnetManager`` on etcd v2. Building one connects to nothing; bad options raise ``Fatal``.

    ``randrange`` chooses among free subnets, as ``allocate.choose`` says.
    """

    def __init__(
        self,
        options: EtcdOptions,
        timeouts: Timeouts | None = None,
        randrange: Callable[[int], int] = random.randrange,
    ) -> None:
        prefix = "/" + posixpath.normpath(f"/{options.prefix}").lstrip("/")
        self._config_key = posixpath.join(prefix, "config")
        self._reader = LeaseReader(posixpath.join(prefix, "subnets"))
        self._servers = Servers(options)
        self._timeouts = timeouts or Timeouts()
        self._requests = Client(self._servers, self._timeouts)
        self._randrange = randrange
        self._once = Once()
        self._lock = threading.Lock()
        self._is_closed = False
        self._followers: set[Follower] = set()
        #: The leases as last read: for us until we write ourselves, and for a watch to start from.
        self._known: Listing | None = None
        self._unwatched: Listing | None = None
        self.name = f"etcd v2 at {self._servers.name} under {prefix}"

    def network_config(self) -> Config:
        try:
            reply = self._requests.fetch(self._config_key)
        except NotFound:
            raise Retryable(
                f"etcd has no network config at {self._config_key}",
                f"write it: ETCDCTL_API=2 etcdctl set {self._config_key} '{_EXAMPLE}'"
                " (what is written through the v3 API cannot be seen here)",
            ) from None
        return parse(reply.node.value if reply.node else "")

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        return next((lease.attrs for _, lease in self._list().of(public_ip)), None)

    def acquire(self, config: Config, attrs: LeaseAttrs, previous: LeaseKey) -> Lease:
        for _ in range(TRIES):
            listing = self._list()
            self._known = None
            try:
                lease = self._reuse(config, attrs, listing)
                return lease or self._create(self._pick(config, previous, listing), attrs)
            except Conflict as lost:
                log.log(V(1), "Another node was quicker, trying again: %s", lost)
        raise Retryable(f"other nodes were quicker {TRIES} times in a row", "nothing to do but wait")

    def renew(self, lease: Lease) -> Lease:
        for _ in range(TRIES):
            try:
                return self._renew_once(lease)
            except Conflict as lost:
                log.log(V(1), "The lease %s has just changed, trying again: %s", lease, lost)
        raise Retryable(f"the lease {lease} changes all the time", "give each node its own -public-ip")

    def watch(self, deliver: Deliver, alive: Callable[[], None] = _nothing) -> None:
        def start(client: Client) -> tuple[list[Event], Position]:
            listing, self._unwatched = self._unwatched, None
            if listing is None or not _is_fresh(listing):
                listing = self._reader.read_all(client)
            return [listing.snapshot()], listing.at

        self._follow(self._reader.path, start, self._reader.news, deliver, alive, recursive=True)

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None] = _nothing) -> None:
        path = self._reader.key_of(lease.key)

        def start(client: Client) -> tuple[list[Event], Position]:
            try:
                reply = client.fetch(path)
            except NotFound as missing:
                return [Removed(lease.key)], missing.at
            return news(reply), reply.at

        def news(reply: Reply) -> list[Event]:
            events = self._reader.news_of(lease.key, reply)
            if events or reply.node is None:
                return events
            # Garbage in our own lease is as foreign as another node's attributes.
            return [Added(Lease(LeaseAttrs(), *lease.key, asof=reply.node.modified))]

        self._follow(path, start, news, deliver, alive, recursive=False)

    def reread(self) -> None:
        with self._lock:
            for follower in self._followers:
                follower.reread()

    @property
    def is_down(self) -> bool:
        """Whether a watch gets no answer now."""
        with self._lock:
            return any(follower.is_down for follower in self._followers)

    def reconnect(self) -> None:
        with self._lock:
            self._requests.reconnect()
            for follower in self._followers:
                follower.reconnect()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for follower in self._followers:
                follower.cut()
            self._requests.cut()

    # ---- reading -----------------------------------------------------------------------------

    def _list(self) -> Listing:
        if self._is_closed:
            raise Cancelled
        listing = self._known
        if listing is None or not _is_fresh(listing):
            listing = self._known = self._unwatched = self._reader.read_all(self._requests)
        return listing

    def _follow(
        self,
        path: str,
        start: Start,
        news: News,
        deliver: Deliver,
        alive: Callable[[], None],
        *,
        recursive: bool,
    ) -> None:
        follower = Follower(self._servers, self._timeouts, path, recursive=recursive)
        with self._lock:
            if self._is_closed:
                raise Cancelled
            self._followers.add(follower)
        try:
            follower.run(start, news, deliver, alive)
        finally:
            with self._lock:
                self._followers.discard(follower)

    # ---- acquiring ---------------------------------------------------------------------------

    def _reuse(self, config: Config, attrs: LeaseAttrs, listing: Listing) -> Lease | None:
        """Take the lease that is ours by its public IP; one that no longer fits is given back."""
        mine = listing.of(_address(attrs))
        fitting = [(path, lease) for path, lease in mine if _fits(config, lease.key)]
        for path, lease in fitting:
            self._compare_identity(lease, attrs)
            return self._replace(path, lease.key, attrs, reserved=lease.expires is None, modified=lease.asof)
        for path, lease in mine[:1]:
            log.info("The lease %s does not fit the network config, giving it back", lease)
            self._remove(path)
        return None

    def _compare_identity(self, lease: Lease, attrs: LeaseAttrs) -> None:
        same_type = lease.attrs.backend_type == attrs.backend_type
        if same_type and any(_differ(lease.attrs.data(each), attrs.data(each)) for each in FAMILIES):
            self._once.warn(
                log,
                "identity",
                f"The lease {lease} of our address {_address(attrs)} has other backend data than ours;"
                " normal after a reinstall, else another node has this address: give each its own -public-ip",
            )

    def _remove(self, path: str) -> None:
        """Without a condition: Go flanneld 0.12 cannot digest the event of a conditional removal."""
        try:
            self._requests.remove(path)
        except NotFound:
            log.log(V(1), "%s has gone by itself", path)

    def _pick(self, config: Config, previous: LeaseKey, listing: Listing) -> LeaseKey:
        taken = listing.networks()
        wanted = dict(zip(FAMILIES, previous, strict=True))
        found = {pool.family: self._pick_subnet(pool, wanted[pool.family], taken) for pool in config.ranges}
        subnet, ipv6_subnet = found.get(4), found.get(6)
        assert not isinstance(subnet, IPv6Network)
        assert not isinstance(ipv6_subnet, IPv4Network)
        return (subnet, ipv6_subnet)

    def _pick_subnet(
        self, pool: SubnetRange, previous: IPNetwork | None, taken: list[IPNetwork]
    ) -> IPNetwork:
        if previous is not None:
            if not pool.contains(previous):
                problem = "does not fit the network config"
            elif any(_overlap(previous, net) for net in taken):
                problem = "belongs to another node now"
            else:
                return previous
            self._once.warn(log, "previous", f"The subnet {previous} of the subnet file {problem}")
        subnet = choose(pool, taken, self._randrange)
        if subnet is None:
            raise Retryable(
                f"no subnet from {pool.subnet_min} to {pool.subnet_max} is free, {len(taken)} are leased",
                f"enlarge the network in {self._config_key}, or remove the leases of nodes that are gone"
                f" from {self._reader.path}",
            )
        return subnet

    # ---- writing -----------------------------------------------------------------------------

    def _renew_once(self, lease: Lease) -> Lease:
        path = self._reader.key_of(lease.key)
        try:
            node = self._requests.fetch(path).node
        except NotFound:
            return self._create(lease.key, lease.attrs, reserved=lease.expires is None)
        if node is None:
            raise Conflict(path)
        found = self._reader.lease(node, lease.key)
        owner = _address(found.attrs) if found else None
        # Whoever knows what was written last may overwrite it; so a node's own address may change.
        if found and owner != _address(lease.attrs) and node.modified != lease.asof:
            raise LeaseTaken(f"the lease {lease} belongs to node {owner} now", "restart to get another")
        reserved = node.ttl is None
        if found and reserved and node.value == _value(lease.key, lease.attrs):
            return found
        return self._replace(path, lease.key, lease.attrs, reserved=reserved, modified=node.modified)

    def _create(self, key: LeaseKey, attrs: LeaseAttrs, *, reserved: bool = False) -> Lease:
        ttl = None if reserved else SUBNET_TTL
        reply = self._requests.create(self._reader.key_of(key), _value(key, attrs), ttl)
        return self._written(key, reply)

    def _replace(
        self, path: str, key: LeaseKey, attrs: LeaseAttrs, *, reserved: bool, modified: int
    ) -> Lease:
        ttl = None if reserved else SUBNET_TTL
        return self._written(key, self._requests.replace(path, _value(key, attrs), ttl, modified))

    def _written(self, key: LeaseKey, reply: Reply) -> Lease:
        """The lease as everybody reads it now: fewer attributes may be stored than were given."""
        lease = self._reader.lease(reply.node, key) if reply.node else None
        if lease is None:
            raise Retryable(f"etcd stored something else for the lease {name_of(key)}", "is that etcd?")
        return lease


def _is_fresh(listing: Listing) -> bool:
    return clock.now() - listing.read_at <= FRESH


def _differ(stored: object, ours: object) -> bool:
    """Whether a node announced something else; older versions announce less."""
    if isinstance(stored, dict) and isinstance(ours, dict):
        return any(ours.get(key) != value for key, value in stored.items())
    return stored != ours


def _address(attrs: LeaseAttrs) -> IPAddress | None:
    """The address that identifies a node."""
    return attrs.public_ip or attrs.public_ipv6


def _value(key: LeaseKey, attrs: LeaseAttrs) -> str:
    return format_attrs(attrs, with_ipv6=key[1] is not None)


def _fits(config: Config, key: LeaseKey) -> bool:
    """Whether a lease has one subnet in each range of the config, and no other."""
    for family, net in zip(FAMILIES, key, strict=True):
        pool = config.range(family)
        if (pool is None) != (net is None) or (pool and net and not pool.contains(net)):
            return False
    return True


def _overlap(one: IPNetwork, other: IPNetwork) -> bool:
    if isinstance(one, IPv4Network):
        return isinstance(other, IPv4Network) and one.overlaps(other)
    return isinstance(other, IPv6Network) and one.overlaps(other)
