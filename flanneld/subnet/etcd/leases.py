"""Reader of leases in etcd, one key each. Invalid keys and values are logged once."""

from __future__ import annotations

import logging
import math
import posixpath
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from flanneld.errors import Refused, Retryable
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
    Snapshot,
    family_of,
)
from flanneld.runtime import clock
from flanneld.runtime.logs import BatchedWarnings
from flanneld.subnet.codec import format_key, parse_attrs, parse_key
from flanneld.subnet.etcd.keys import KeyClient, KeyReply, NotFound, Position, StoredKey
from flanneld.subnet.list_watch import RelistNeeded
from flanneld.subnet.store import LocalFacts

log = logging.getLogger(__name__)

#: Seconds for which a list of all leases need not be read again.
FRESH = 10.0

#: Actions that remove a key. No flannel of Go's uses compareAndDelete, but an operator may.
GONE = frozenset({"delete", "expire", "compareAndDelete"})


class Listing(Struct, frozen=True, gc=False):
    """All leases by their key in etcd, as of ``at``.

    ``unreadable`` are the lease keys with invalid values. ``read_at`` is the local time of the read.
    """

    at: Position
    leases: dict[str, Lease] = field(default_factory=dict)
    unreadable: frozenset[LeaseKey] = frozenset()
    read_at: float = field(default_factory=clock.now)

    def is_fresh(self) -> bool:
        """Return True if the list need not be read again yet."""
        return clock.now() - self.read_at <= FRESH

    def with_public_ip(self, public_ip: IPAddress | None) -> list[tuple[str, Lease]]:
        """Return the leases with a public IP, lowest subnet first."""
        if public_ip is None:
            return []
        family = family_of(public_ip)
        return self.of(lambda attrs: attrs.public(family) == public_ip)

    def of(self, is_owner: Callable[[LeaseAttrs], bool]) -> list[tuple[str, Lease]]:
        """Return the leases of a node, lowest subnet first."""
        found = [item for item in self.leases.items() if is_owner(item[1].attrs)]
        return sorted(found, key=lambda item: [_order(net) for net in item[1].key])

    def written_by(self, local: LocalFacts) -> list[tuple[str, Lease]]:
        """Return the leases that this host wrote."""
        return [item for item in self.leases.items() if local.wrote(item[1])]

    def has_older_twin(self, lease: Lease, is_owner: Callable[[LeaseAttrs], bool]) -> bool:
        """Return True if another node took one of the lease's subnets before its owner did.

        A restored store may hold a dual-stack lease that its owner has given back for that reason.
        """
        return any(
            0 < other.created < lease.created
            and any(net is not None and net in other.key for net in lease.key)
            and not is_owner(other.attrs)
            for other in self.leases.values()
        )

    def lease_keys(self) -> list[LeaseKey]:
        """Return the keys of all leases, readable or not."""
        return [*(lease.key for lease in self.leases.values()), *self.unreadable]

    def networks(self) -> list[IPNetwork]:
        """Return all leased subnets."""
        return [net for key in self.lease_keys() for net in key if net is not None]

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(self.leases.values()), self.unreadable)


def node_address(attrs: LeaseAttrs) -> IPAddress | None:
    """Return the address that identifies a node."""
    return attrs.public_ip or attrs.public_ipv6


def say_found(lease: Lease) -> None:
    """Log that a lease with our public IP is taken again."""
    log.info("Found lease (%s) for current IP (%s), reusing", lease, node_address(lease.attrs))


def say_allocated(lease: Lease) -> None:
    """Log that a new lease was written."""
    log.info("Allocated lease (%s) to current node (%s)", lease, node_address(lease.attrs))


def contradict(stored: LeaseAttrs, ours: LeaseAttrs) -> bool:
    """Return True if stored backend data contradict ours. Fields missing in older versions are ignored."""
    return stored.backend_type == ours.backend_type and any(
        _differ(stored.data(each), ours.data(each)) for each in FAMILIES
    )


def _differ(stored: object, ours: object) -> bool:
    if isinstance(stored, dict) and isinstance(ours, dict):
        return any(ours.get(key) != value for key, value in stored.items())
    return stored != ours


def say_kept(lease: Lease) -> None:
    """Log that a lease with another public IP than ours was recognised as ours."""
    log.info(
        "Keeping the lease %s of our former public IP %s: its attributes are as we wrote them, on this"
        " hardware",
        lease,
        node_address(lease.attrs),
    )


class LeaseReader:
    """Reader of the directory ``path``, in which each key is a lease. Threads may share it.

    ``is_ordered`` is True if the creation of a key tells when a node took the lease.
    """

    def __init__(self, path: str, *, is_ordered: bool = True) -> None:
        self.path = path
        self._is_ordered = is_ordered
        self._complaints = BatchedWarnings(
            log, "Ignoring {key} in etcd: {reason}", "Ignoring {count} keys in etcd"
        )

    def key_of(self, lease_key: LeaseKey) -> str:
        return posixpath.join(self.path, format_key(lease_key))

    def read_all(self, client: KeyClient) -> Listing:
        """Read all leases in one request. A missing directory yields none. Raises ``Retryable``."""
        try:
            reply = client.fetch(self.path, recursive=True)
        except NotFound as missing:
            return Listing(missing.at)
        if reply.node is None or not reply.node.is_dir:
            raise Retryable(f"{self.path} in etcd is no directory", "remove it; flanneld will make it")
        leases: dict[str, Lease] = {}
        unreadable: dict[str, LeaseKey | None] = {}
        for node in reply.children:
            key = self.lease_key(node)
            lease = self.lease(node, key) if key else None
            if lease:
                leases[node.key] = lease
            else:
                unreadable[node.key] = key
        self._complaints.retain(unreadable)
        self.complain()
        return Listing(reply.at, leases, frozenset(filter(None, unreadable.values())))

    def news(self, replies: Sequence[KeyReply]) -> list[Event]:
        """Return the events of changes in the directory.

        Raises ``RelistNeeded`` if the directory itself changed.
        """
        events: list[Event] = []
        for reply in replies:
            if reply.node is None:
                continue
            if reply.node.is_dir:
                raise RelistNeeded("the directory of the leases was changed or removed")
            key = self.lease_key(reply.node)
            if reply.action in GONE:
                self._complaints.clear(reply.node.key)
            events += self.news_of(key, reply) if key else ()
            self._complaints.flush()  # the next change may settle it
        return events

    def news_of(self, key: LeaseKey, reply: KeyReply) -> list[Event]:
        """Return the events of a change to this lease, or to the directory that holds it."""
        if reply.action in GONE:
            return [Removed(key)]
        lease = self.lease(reply.node, key) if reply.node else None
        return [Added(lease)] if lease else []

    def lease_key(self, node: StoredKey) -> LeaseKey | None:
        """Return the lease key of a key in etcd; None, with a log line, if it has none."""
        if node.is_dir or node.key.rpartition("/")[0] != self.path:
            self._complaints.note(node.key, "it is a directory, or in one of its own; remove it")
            return None
        try:
            return parse_key(node.key)
        except Refused as reason:
            self._complaints.note(node.key, reason)
            return None

    def lease(self, node: StoredKey, key: LeaseKey) -> Lease | None:
        """Return the lease in a key; None, with a log line, if its value is invalid."""
        try:
            attrs = parse_attrs(node.value)
        except Refused as reason:
            self._complaints.note(node.key, reason)
            return None
        self._complaints.clear(node.key)
        # One object for the infinite TTLs of a list.
        expires = node.ttl if node.ttl is None or node.ttl == math.inf else clock.now() + node.ttl
        # The same for its two indexes, which are equal until the value changes.
        created = node.modified if node.created == node.modified else node.created
        created = created if self._is_ordered else 0
        return Lease(attrs, *key, expires=expires, asof=node.modified, created=created)

    def complain(self) -> None:
        """Log invalid keys, at most one line a minute. To be called periodically."""
        self._complaints.flush()


class OwnLeaseNews:
    """Events of our own lease. A removal without a watch is told if another node has taken it since.

    ``is_ours`` returns True for a key with a value of ours.
    """

    def __init__(self, reader: LeaseReader, key: LeaseKey, is_ours: Callable[[StoredKey], bool]) -> None:
        self._reader = reader
        self._key = key
        self._is_ours = is_ours
        #: Index of the last change that is known; 0 before the first one.
        self._known = 0

    def listed(self, reply: KeyReply) -> list[Event]:
        """Return the events of a read."""
        known, node = self._known, reply.node
        events = self.changed((reply,))
        if node is None or not 0 < known < node.created or self._is_ours(node):
            return events
        # Nodes overwrite a lease with conditional writes, which keep the index of its creation.
        return [Removed(self._key)]

    def changed(self, replies: Sequence[KeyReply]) -> list[Event]:
        """Return the events of changes."""
        events: list[Event] = []
        for reply in replies:
            if reply.node is not None:
                self._known = reply.node.modified
                # An invalid value in our own lease counts as overwritten by another node.
                events += self._reader.news_of(self._key, reply) or [
                    Added(Lease(LeaseAttrs(), *self._key, asof=self._known))
                ]
        return events


def _order(net: IPNetwork | None) -> tuple[int, int]:
    return (int(net.network_address), net.prefixlen) if net is not None else (-1, 0)
