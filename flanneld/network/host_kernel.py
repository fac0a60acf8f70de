"""Contracts of a host's kernel and of its notifications, as the daemon's loops use them.

``rtnetlink`` implements them for this network namespace, and a simulator for hosts of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from flanneld.model import Family, IPAddress, IPNetwork
from flanneld.network.route_lookup import LookupResult, SeenHostRoute
from flanneld.network.rtnetlink.domain import Domain
from flanneld.network.rtnetlink.links import SeenLink
from flanneld.network.rtnetlink.messages import SeenAddress
from flanneld.network.rtnetlink.monitor import Notification
from flanneld.state.resources import Resource


class HostKernel(Protocol):
    """A host's interfaces, addresses and routes. Any method may raise ``OSError``.

    ``domain`` says what of them is ours.
    """

    domain: Domain

    def link(self, name: str) -> SeenLink | None:
        """Return the interface with a name, None without one."""
        ...

    def links(self) -> Sequence[SeenLink]:
        """Return all interfaces."""
        ...

    def names(self) -> Mapping[int, str]:
        """Return the name of each interface by its index."""
        ...

    def name_of(self, index: int) -> str | None:
        """Return the name of one interface, None if there is none with that index."""
        ...

    def addresses(self, family: Family, index: int = 0) -> Sequence[SeenAddress]:
        """Return the addresses of one interface, or of all."""
        ...

    def look_up_route(self, target: IPAddress) -> LookupResult | None:
        """Return which way the kernel would send a packet, None if it has no route."""
        ...

    def matching_route(self, target: IPAddress) -> SeenHostRoute | None:
        """Return the unicast route that a packet would take, None if there is none."""
        ...

    def default_routes(self, family: Family) -> Sequence[int]:
        """Return the interfaces of the main table's default routes, in the kernel's order."""
        ...

    def ways(self, family: Family, own: Iterable[int] = ()) -> Iterable[SeenHostRoute]:
        """Return unicast routes of the main table that are not flannel's; ``own`` interfaces are left out."""
        ...

    def local(self, family: Family) -> Iterable[tuple[int, IPNetwork, int]]:
        """Return type (RTN_*), network and interface of what the kernel delivers here or to a whole link."""
        ...

    def left_behind(self, domain: Domain) -> Sequence[Resource]:
        """Return the routes of any flanneld: marked ones, and unmarked ones as ``domain`` tells them."""
        ...


class HostMonitor(Protocol):
    """A host's notifications of changes."""

    @property
    def missed(self) -> bool:
        """Return True if notifications were not listened to for a while; ``read`` tells of it."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor to poll for notifications."""
        ...

    def read(self, name_of: Callable[[int], str | None]) -> Sequence[Notification]:
        """Return what was heard; ``name_of`` names the devices whose entries are of interest."""
        ...
