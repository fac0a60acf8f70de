"""Interface of a store of the cluster's leases; Go flannel calls it subnet manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import Event, IPAddress, IPNetwork, Lease, LeaseAttrs, LeaseKey, is_same_node

#: Callback for the events of one read, in order.
Deliver = Callable[[list[Event]], None]


LONGEST_SILENCE = 180.0
#: Backends whose data no other node has: that of vxlan is the MAC of its device.
_TELLING = frozenset({"vxlan"})


#: Function that returns True if the node with the second attributes owns a lease with the first.
IsSelf = Callable[[LeaseAttrs, LeaseAttrs], bool]


# With the collector: it refers to parts of a node that refer to it.
class LocalFacts(Struct, frozen=True):
    """Local facts for acquiring a lease, besides ``subnet.env``.

    - ``written`` is our last lease as we wrote it, if this host can prove that it is ours. It stays ours
      under another public IP.
    - ``connected`` are networks of this host's interfaces and addresses of the store, which a new subnet
      avoids.
    - ``is_self`` is the backend's test for our own leases, also used in renewals.
    - ``earlier`` are attributes of ``written`` that we wrote before its last ones.
    """

    written: Lease | None = None
    connected: tuple[IPNetwork, ...] = ()
    is_self: IsSelf = is_same_node
    earlier: tuple[LeaseAttrs, ...] = ()

    def wrote(self, lease: Lease) -> bool:
        """Return True if a lease equals ``written`` in key, and in attributes now or earlier.

        A backup of the store shows where this node was before. With a backend whose data no other node has,
        it may have been anywhere.
        """
        if self.written is None or lease.key != self.written.key:
            return False
        theirs, ours = lease.attrs, self.written.attrs
        if ours.backend_type in _TELLING and (ours.backend_data or ours.backend_v6_data):
            theirs = replace(theirs, public_ip=ours.public_ip, public_ipv6=ours.public_ipv6)
        return theirs == ours or lease.attrs in self.earlier


NO_FACTS = LocalFacts()


class EndpointStore(Protocol):
    """Place for the endpoints of a mesh's nodes, apart from their leases."""

    def publish_endpoints(self, name: str, text: str) -> None:
        """Write where a node may be reached, for as long as a lease lasts.

        ``name`` is the node's public key in URL-safe base64. The text has endpoints with commas between them.
        """
        ...

    def endpoints(self) -> Mapping[str, str]:
        """Return what the nodes published, by name; perhaps without our own."""
        ...


class Store(EndpointStore, Protocol):
    """Store of leases. Every call may raise ``Retryable``, ``Fatal`` or ``Cancelled``."""

    @property
    def name(self) -> str:
        """Type and address of the store for the log, without passwords."""
        ...

    @property
    def problem(self) -> Retryable | None:
        """The current failure of a watch, None without one. May be read from any thread."""
        ...

    @property
    def addresses(self) -> frozenset[IPAddress]:
        """All addresses of all configured servers, as far as known. From any thread; never blocks."""
        ...

    def network_config(self) -> Config:
        """Read the network config. Raises ``Retryable`` if it is missing or invalid."""
        ...

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        """Return the last attributes of a node with this public IP, None if there are none."""
        ...

    def read_leases(self) -> Iterable[Lease]:
        """Return the leases of all nodes, read some seconds ago at most; perhaps without our own."""
        ...

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        """Return this node's lease, its previous one if possible.

        ``previous`` is the lease in ``subnet.env``, ``(None, None)`` without one.
        """
        ...

    def renew(self, lease: Lease) -> Lease:
        """Write the lease and its attributes for another full TTL. A reservation stays one."""
        ...

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Deliver a ``Snapshot`` and then changes, until ``close``. Raises ``Cancelled`` then.

        Lost connections and lost history end in a new ``Snapshot``. ``alive`` is called at least every
        ``LONGEST_SILENCE`` seconds.
        """
        ...

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Watch one lease: deliver ``Added`` when it is written, ``Removed`` when it is gone."""
        ...

    def reread(self) -> None:
        """Relist, and deliver a new ``Snapshot`` to all watches. May be called from any thread."""
        ...

    def reconnect(self) -> None:
        """Drop all connections, because this host's address changed. May be called from any thread."""
        ...

    def close(self) -> None:
        """End every blocked call within 0.5 s. May be called repeatedly, from any thread."""
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """Store that can predict this node's lease without writing, and can then be watched."""

    def foresee(self, config: Config, attrs: LeaseAttrs) -> Lease:
        """Return the lease that ``acquire`` would return. May raise the same errors."""
        ...


@runtime_checkable
class NodeStore(Protocol):
    """Store with further data about this node, as Kubernetes has."""

    def public_ips(self) -> tuple[IPv4Address | None, IPv6Address | None]:
        """Return the public IPs that the operator set for this node. May raise ``Retryable``."""
        ...

    def watch_node(self, alive: Callable[[], None]) -> None:
        """Watch our own node only, in place of ``watch``. ``watch_own`` delivers its events."""
        ...

    def mark_available(self) -> None:
        """Mark the node's network as available, as soon as possible. Returns at once."""
        ...

    def report(self, reason: str) -> None:
        """Report a health condition to operators, if the store can. Raises at most ``Cancelled``."""
        ...
