"""Store on one etcd API: ``<prefix>/config`` and ``<prefix>/subnets/<key>``.

Keys, values and TTLs are those of Go flanneld: of 0.12 in v2, of 0.20 and later in v3. So both share one
network. Two differences are intended:

- A lease is only overwritten if it is unchanged since it was read.
- A lease with another public IP is never taken over.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Iterable
from ipaddress import IPv4Network, IPv6Network

from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.config import Config, SubnetRange
from flanneld.errors import LEASES_END, Cancelled, Retryable
from flanneld.model import (
    FAMILIES,
    Event,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseAttrs,
    LeaseKey,
    Removed,
    contests,
    name_of,
    overlap,
)
from flanneld.runtime import clock
from flanneld.runtime.clock import randrange
from flanneld.runtime.logs import Once
from flanneld.subnet.allocation import choose, fits, public_ips_in, unfollowed
from flanneld.subnet.codec import format_attrs
from flanneld.subnet.etcd.keys import (
    Conflict,
    KeyClient,
    KeyReply,
    NotFound,
    Position,
    StoredKey,
    config_key,
    key_of,
    name_in,
    read_config,
    watch_keys,
)
from flanneld.subnet.etcd.leases import (
    LeaseReader,
    Listing,
    OwnLeaseNews,
    contradict,
    node_address,
    say_allocated,
    say_found,
    say_kept,
)
from flanneld.subnet.list_watch import ListWatch, Watches
from flanneld.subnet.store import NO_FACTS, Deliver, LocalFacts

log = logging.getLogger(__name__)

#: Seconds that a lease lasts without renewal.
SUBNET_TTL = 86400
#: Attempts to write a lease while other nodes are writing, too.
TRIES = 10
#: Keys that a line of the log names, at most.
_NAMED = 5


class LeaseTaken(Retryable):
    """Error for our lease if another node has it now. It is not overwritten."""


#: Function that returns the client to use, the given or another one, and the network config.
Choose = Callable[[KeyClient], tuple[KeyClient, Config]]


class EtcdStore:
    """``Store`` on one API of etcd. The constructor connects to nothing.

    ``store`` and ``name`` are for the log; a watch that failed goes on after ``pause_time``, in seconds;
    ``randrange`` chooses among free subnets, see ``allocation.choose``; ``is_elsewhere`` looks for a key in
    the other API, for a better complaint; ``addresses`` returns those of all servers. With ``choose`` the
    API is a result of ``network_config``; ``on_first_list`` is called with its client once a watch
    has delivered the leases.
    """

    def __init__(
        self,
        client: KeyClient,
        prefix: str,
        store: str,
        *,
        pause_time: float,
        randrange: Callable[[int], int] = randrange,
        is_elsewhere: Callable[[str], bool] = lambda _: False,
        choose: Choose | None = None,
        on_first_list: Callable[[KeyClient], None] = lambda _: None,
        name: str = "",
        addresses: Callable[[], frozenset[IPAddress]] = frozenset,
    ) -> None:
        self._prefix = prefix
        self._store = store
        self._use(client, name or (f"etcd at {store} under {prefix}" if choose else ""))
        #: None once the API is known.
        self._choose = choose
        self._on_first_list: Callable[[KeyClient], None] | None = on_first_list
        self._pause_time = pause_time
        self._randrange = randrange
        self._is_elsewhere = is_elsewhere
        self._addresses = addresses
        self._once = Once()
        self._closed = False
        self._watches = Watches()
        #: The leases as last read, until a watch starts from them. ``_known`` is valid until we write.
        self._known: Listing | None = None
        self._unwatched: Listing | None = None
        #: The subnet we chose.
        self._chosen: LeaseKey | None = None
        #: The subnet we wrote last without an answer. A stale read may not show that write yet.
        self._unsure: LeaseKey = (None, None)
        #: Values sent for our lease, also if no answer came. A lease with one is ours, as after a restore.
        self._sent: set[str] = set()
        self.local = NO_FACTS

    def _use(self, client: KeyClient, name: str = "") -> None:
        root = client.root(self._prefix)
        self.api = client.api
        self.config_key = config_key(client, self._prefix)
        self._reader = LeaseReader(posixpath.join(root, "subnets"), is_ordered=client.api != "v2")
        self._endpoints = posixpath.join(root, "endpoints")
        self._requests = client
        self.name = name or f"etcd {client.api} at {self._store} under {root}"

    @property
    def addresses(self) -> frozenset[IPAddress]:
        return self._addresses()

    def network_config(self) -> Config:
        if self._choose is None:
            return read_config(self._requests, self._prefix, self._is_elsewhere)
        client, config = self._choose(self._requests)
        self._use(client)
        self._choose = None
        log.info("The network config is in %s", self.name)
        return config

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        return next((lease.attrs for _, lease in self.listing().with_public_ip(public_ip)), None)

    def read_leases(self) -> Iterable[Lease]:
        return self.listing().leases.values()

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        self.local = local
        for _ in range(TRIES):
            listing = self.listing()
            self._known = None
            try:
                found = lease = self._reuse(config, attrs, previous, listing)
                if lease is None:
                    self._chosen = self.pick(config, previous, listing, local.connected)
                    lease = self._create(self._chosen, attrs)
                if lease.key == self._chosen:
                    self.yield_to_earlier(lease)
            except (Conflict, LeaseTaken) as lost:
                log.log(V(1), "Another node was quicker, trying again: %s", lost)
            else:
                if found is None:
                    say_allocated(lease)
                return lease
        raise Retryable(f"other nodes were quicker {TRIES} times in a row", "wait: it is tried again")

    def listing(self, *, fresh: bool = False) -> Listing:
        """Return all leases, read at most ``FRESH`` seconds ago, or by a new request."""
        if self._closed:
            raise Cancelled
        if self._choose is not None:
            raise Retryable("it is not known yet which API of etcd to use", "read the network config first")
        if fresh:
            self._known = None
        listing = self._known
        if listing is None or not listing.is_fresh():
            listing = self._known = self._unwatched = self._reader.read_all(self._requests)
        return listing

    def yield_to_earlier(self, lease: Lease) -> None:
        """Remove our new lease if an earlier one overlaps it. Raises ``LeaseTaken`` then.

        A dual-stack lease and a single-stack lease have different keys, so etcd accepts both even if their
        subnets overlap. Both nodes list the leases after writing, and the later one yields.
        """
        if None in lease.key:
            return
        others = self.listing(fresh=True).leases.values()
        self._known = None
        for other in others:
            if other.asof < lease.asof and contests(other.key, lease.key):
                self.give_back(lease)
                raise LeaseTaken(f"{lease} overlaps {other} of node {node_address(other.attrs)}")

    def give_back(self, lease: Lease) -> None:
        """Remove our lease. Raises ``Conflict`` if it has changed since ``asof``."""
        path = self._reader.key_of(lease.key)
        try:
            self._requests.remove(path, lease.asof)
        except NotFound:
            log.log(V(1), "%s had already expired", path)

    def remember(self, lease: Lease) -> None:
        """Take note of our lease as it may be in the store, so that a renewal recognises it."""
        self._sent.add(self._value(lease.key, lease.attrs))

    def forget(self) -> None:
        """Forget what is known of our lease: a lease server acts for another node each time."""
        self.local = NO_FACTS
        self._sent.clear()

    def renew(self, lease: Lease) -> Lease:
        for _ in range(TRIES):
            try:
                return self._renew_once(lease)
            except Conflict as lost:
                log.log(V(1), "The lease %s has just changed, trying again: %s", lease, lost)
        raise Retryable(f"the lease {lease} changes all the time", "give each node its own -public-ip")

    def publish_endpoints(self, name: str, text: str) -> None:
        path = posixpath.join(self._endpoints, key_of(name, self.api))
        try:
            node = self._requests.fetch(path).node
        except NotFound:
            self._requests.create(path, text, SUBNET_TTL)
        else:
            self._requests.replace(path, text, SUBNET_TTL, node.modified if node else 0)

    def endpoints(self) -> dict[str, str]:
        try:
            found = self._requests.fetch(self._endpoints, recursive=True).children
        except NotFound:
            return {}
        return {name_in(each.key): each.value for each in found}

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        def beat() -> None:
            self._reader.complain()
            alive()

        def tell(events: list[Event]) -> None:
            deliver(events)
            on_first_list, self._on_first_list = self._on_first_list, None
            if on_first_list:
                on_first_list(self._requests)

        self._watches.run(self.lease_watch(), tell, beat)

    def lease_watch(self) -> ListWatch[Position]:
        """Return the state machine of ``watch``."""

        def start(client: KeyClient) -> tuple[list[Event], Position]:
            listing, self._unwatched, self._known = self._unwatched, None, None
            if listing is None or not listing.is_fresh():
                listing = self._reader.read_all(client)
            return [listing.snapshot()], listing.at

        return watch_keys(
            self._requests, self._reader.path, start, self._reader.news, recursive=True, pace=self._pause_time
        )

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        self._watches.run(self.own_watch(lease), deliver, alive)

    def own_watch(self, lease: Lease) -> ListWatch[Position]:
        """Return the state machine of ``watch_own``."""
        path = self._reader.key_of(lease.key)

        def is_ours(node: StoredKey) -> bool:
            found = self._reader.lease(node, lease.key)
            return found is not None and self._is_ours(node.value, found, lease.attrs)

        news = OwnLeaseNews(self._reader, lease.key, is_ours)

        def start(client: KeyClient) -> tuple[list[Event], Position]:
            try:
                reply = client.fetch(path)
            except NotFound as missing:
                return [Removed(lease.key)], missing.at
            return news.listed(reply), reply.at

        return watch_keys(self._requests, path, start, news.changed, recursive=False, pace=self._pause_time)

    def reread(self) -> None:
        self._watches.reread()

    @property
    def problem(self) -> Retryable | None:
        """The current failure of a watch, or None."""
        return self._watches.problem

    def reconnect(self) -> None:
        self._requests.reconnect()
        self._watches.reconnect()

    def close(self) -> None:
        self._closed = True
        self._watches.close()
        self._requests.cancel()

    # ---- acquiring ---------------------------------------------------------------------------

    def _reuse(self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, listing: Listing) -> Lease | None:
        """Take the lease that is ours by identity or by proof; remove one that no longer fits the config.

        If there are several, the previous one is taken: others may hold anything.
        """

        def is_ours(theirs: LeaseAttrs) -> bool:
            return self.local.is_self(theirs, attrs)

        mine = listing.of(is_ours)
        moved = [each for each in listing.written_by(self.local) if each not in mine]
        mine = [*moved, *mine]
        fitting = [
            (path, lease)
            for path, lease in mine
            if fits(config, lease.key)
            and (lease.key == previous or not listing.has_older_twin(lease, is_ours))
        ]
        fitting.sort(key=lambda item: item[1].key != previous)
        for path, lease in fitting:
            self._compare_identity(lease, attrs)
            if (path, lease) in moved:
                say_kept(lease)
            is_reserved = lease.expires is None
            renewed = self._replace(path, lease.key, attrs, reserved=is_reserved, modified=lease.asof)
            if (path, lease) not in moved:
                say_found(renewed)
            return renewed
        for path, lease in mine[:1]:
            is_fit = fits(config, lease.key)
            why = "another node had its subnet before" if is_fit else "it does not fit the network config"
            log.info("Releasing the lease %s: %s", lease, why)
            self.give_back(lease)
            # One of its subnets may fit and be free now, as after a change to one family.
            listing.leases.pop(path)
        return None

    def _compare_identity(self, lease: Lease, attrs: LeaseAttrs) -> None:
        if contradict(lease.attrs, attrs):
            self._once.warn(
                log,
                "identity",
                f"The lease {lease} of our address {node_address(attrs)} has other backend data than ours;"
                " normal after a reinstall, else another node has this address: give each its own -public-ip",
            )

    def pick(
        self, config: Config, previous: LeaseKey, listing: Listing, connected: tuple[IPNetwork, ...] = ()
    ) -> LeaseKey:
        """Return a free lease: the previous one, else one without ``connected`` and nodes' public IPs."""
        taken = self._taken(config, listing)
        avoid = (*connected, *public_ips_in(config, listing.leases.values()))
        subnet, ipv6_subnet = (
            self._pick_subnet(pool, wanted, unsure, listing, taken, avoid) if pool else None
            for pool, wanted, unsure in zip(map(config.range, FAMILIES), previous, self._unsure, strict=True)
        )
        assert not isinstance(subnet, IPv6Network)
        assert not isinstance(ipv6_subnet, IPv4Network)
        return (subnet, ipv6_subnet)

    def _taken(self, config: Config, listing: Listing) -> list[IPNetwork]:
        """Return the leased subnets that a new one must not overlap."""
        keys = listing.lease_keys()
        unled = unfollowed(config, keys)
        if not unled:
            return listing.networks()
        paths = sorted({self._reader.key_of(key) for key in keys if unled.intersection(key)})
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        self._once.warn(
            log,
            "unled",
            f"Not counted as leased: {', '.join(paths[:_NAMED])}{more}, as no node follows a subnet around"
            " all or around others; Go's daemons count it and may find none free: remove it from the store",
        )
        return [net for net in listing.networks() if net not in unled]

    def _pick_subnet(
        self,
        pool: SubnetRange,
        previous: IPNetwork | None,
        unsure: IPNetwork | None,
        listing: Listing,
        taken: list[IPNetwork],
        avoid: tuple[IPNetwork, ...],
    ) -> IPNetwork:
        if previous is not None:
            if not pool.contains(previous):
                problem = "does not fit the network config"
            elif any(overlap(previous, net) for net in taken):
                problem = f"belongs to another node now{self._holders(previous, listing)}"
            else:
                self._say("previous", f"Found previously leased subnet ({previous}), reusing")
                return previous
            self._once.warn(log, "previous", f"The subnet {previous} of the subnet file {problem}")
        if unsure is not None and pool.contains(unsure) and not any(overlap(unsure, net) for net in taken):
            return unsure
        self._say(pool.family, f"Picking subnet in range {pool.subnet_min} ... {pool.subnet_max}")
        subnet = choose(pool, taken, self._randrange, avoid)
        if subnet is None:
            raise Retryable(
                f"no subnet from {pool.subnet_min} to {pool.subnet_max} is free, {len(taken)} are leased",
                f"enlarge the network in {self.config_key}; {LEASES_END}",
            )
        return subnet

    def _say(self, key: object, line: str) -> None:
        """Log once: while the store refuses writes, a subnet is chosen again and again."""
        self._once.warn(log, key, line, logging.INFO)

    def _holders(self, previous: IPNetwork, listing: Listing) -> str:
        """Return the keys of the leases that overlap our previous subnet, for the operator."""
        found = [
            f"{self._reader.key_of(lease.key)} (public IP {node_address(lease.attrs)})"
            for lease in listing.leases.values()
            if any(net is not None and overlap(previous, net) for net in lease.key)
        ]
        if not found:
            return ""
        return (
            f": {', '.join(found)}; if that is a former lease of this node, which nothing here proves,"
            " it ends by itself"
        )

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
        # What is older than our last write is from a backup: it shows who had the subnet before us.
        is_known = node.modified <= lease.asof
        if found and not is_known and not self._is_ours(node.value, found, lease.attrs):
            owner = node_address(found.attrs)
            raise LeaseTaken(f"the lease {lease} belongs to node {owner} now", "restart to get another")
        reserved = node.ttl is None
        if found and node.value == self._value(lease.key, lease.attrs):
            if reserved:
                return found
            lasts = self._requests.prolong(path, node.modified)
            if lasts is not None:
                return replace(found, expires=clock.now() + lasts)
        return self._replace(path, lease.key, lease.attrs, reserved=reserved, modified=node.modified)

    def _is_ours(self, value: str, found: Lease, attrs: LeaseAttrs) -> bool:
        """Return True if a lease is ours by identity, or by what we wrote: our address may have changed."""
        return value in self._sent or self.local.wrote(found) or self.local.is_self(found.attrs, attrs)

    def _create(self, key: LeaseKey, attrs: LeaseAttrs, *, reserved: bool = False) -> Lease:
        ttl = None if reserved else SUBNET_TTL
        value = self._value(key, attrs)
        self._sent.add(value)
        before, self._unsure = self._unsure, key
        try:
            reply = self._requests.create(self._reader.key_of(key), value, ttl)
        except Conflict:
            # Somebody's, unless an earlier write of ours was without an answer.
            self._unsure = before if before == key else (None, None)
            raise
        self._unsure = (None, None)
        return self._written(key, reply)

    def _replace(
        self, path: str, key: LeaseKey, attrs: LeaseAttrs, *, reserved: bool, modified: int
    ) -> Lease:
        ttl = None if reserved else SUBNET_TTL
        value = self._value(key, attrs)
        self._sent.add(value)
        return self._written(key, self._requests.replace(path, value, ttl, modified))

    def _value(self, key: LeaseKey, attrs: LeaseAttrs) -> str:
        return format_attrs(attrs, with_ipv6=self._requests.names_ipv6 or key[1] is not None)

    def _written(self, key: LeaseKey, reply: KeyReply) -> Lease:
        """Return the lease as other nodes read it: etcd may store fewer attributes than were given."""
        lease = self._reader.lease(reply.node, key) if reply.node else None
        if lease is None:
            raise Retryable(f"etcd stored something else for the lease {name_of(key)}", "is that etcd?")
        return lease
