"""The contract between the daemon and the store in which the cluster keeps its leases."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol, runtime_checkable

from msgspec import Struct

from flanneld.config import Config
from flanneld.errors import Retryable
from flanneld.model import Event, IPAddress, IPNetwork, Lease, LeaseAttrs, LeaseKey, is_same_node

#: Takes the events of one reading of the store, in order.
Deliver = Callable[[list[Event]], None]


LONGEST_SILENCE = 180.0


#: Returns True if a lease with the first attributes is that of the node that announces the second.
IsSelf = Callable[[LeaseAttrs, LeaseAttrs], bool]


class LocalFacts(Struct, frozen=True, gc=False):
    """What this host knows when it acquires a lease, besides ``subnet.env``.

    ``written`` is our last lease as we wrote it, if this host proves that it is ours: it stays ours under
    another public IP. ``connected`` are networks of this host's interfaces, which a new subnet avoids.
    ``is_self`` is the backend's answer, which also decides in later renewals.
    """

    written: Lease | None = None
    connected: tuple[IPNetwork, ...] = ()
    is_self: IsSelf = is_same_node


NO_FACTS = LocalFacts()


class SubnetManager(Protocol):
    """Where leases come from. Every call may raise ``Retryable``, ``Fatal`` or ``Cancelled``."""

    @property
    def name(self) -> str:
        """For the log: which store, where. Never a password."""
        ...

    @property
    def problem(self) -> Retryable | None:
        """Why a watch fails now, None if none does. From any thread."""
        ...

    def network_config(self) -> Config:
        """Read the network config. ``Retryable`` when it is missing or wrong."""
        ...

    def stored(self, public_ip: IPAddress | None) -> LeaseAttrs | None:
        """What a node with this public IP announced last, if the store still knows."""
        ...

    def acquire(
        self, config: Config, attrs: LeaseAttrs, previous: LeaseKey, local: LocalFacts = NO_FACTS
    ) -> Lease:
        """Get this node's lease, the one it had before if possible.

        ``previous`` is what ``subnet.env`` remembers, ``(None, None)`` if nothing.
        """
        ...

    def renew(self, lease: Lease) -> Lease:
        """Write the lease with its attributes for another full term; a reservation stays one."""
        ...

    def watch(self, deliver: Deliver, alive: Callable[[], None]) -> None:
        """Deliver a ``Snapshot`` and then what changes, until ``close`` (raises ``Cancelled``).

        Survives everything in between: lost connections and lost history end in a new ``Snapshot``.
        ``alive`` is called at least every ``LONGEST_SILENCE`` seconds.
        """
        ...

    def watch_own(self, lease: Lease, deliver: Deliver, alive: Callable[[], None]) -> None:
        """The same for one lease: ``Added`` when it is written, ``Removed`` when it has gone."""
        ...

    def reread(self) -> None:
        """Deliver a new ``Snapshot`` as soon as the store lets us, to whoever watches. From any thread."""
        ...

    def reconnect(self) -> None:
        """This host's address has changed: connections made before may lead nowhere. From any thread."""
        ...

    def close(self) -> None:
        """End every blocked call within half a second. May be called from any thread, repeatedly."""
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """A store that tells which lease this node would acquire, and can be watched then. Writes nothing."""

    def foresee(self, config: Config, attrs: LeaseAttrs) -> Lease:
        """May raise what ``acquire`` does."""
        ...


@runtime_checkable
class NodeStore(Protocol):
    """A store that holds more about this node than its lease, as Kubernetes does."""

    def public_ips(self) -> tuple[IPv4Address | None, IPv6Address | None]:
        """At what addresses an operator says that other nodes reach this one. May raise ``Retryable``."""
        ...

    def watch_node(self, alive: Callable[[], None]) -> None:
        """Watch our own node and no other, in place of ``watch``. ``watch_own`` tells what happens to it."""
        ...

    def mark_available(self) -> None:
        """Have it said, as soon as possible, that containers can use the network here. Returns at once."""
        ...

    def report(self, reason: str) -> None:
        """Tell operators what is not well here, if there is a way to. Raises at most ``Cancelled``."""
        ...
