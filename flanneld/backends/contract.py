"""Contract between the daemon and its backends, which decide how packets travel between nodes.

A backend decides and never acts. It is built anew when the uplink changes, so it holds no state.
``docs/backends.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, runtime_checkable

from msgspec import Struct

from flanneld.config import Config
from flanneld.errors import Refused
from flanneld.model import Family, IPAddress, IPNetwork, Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Resource
from flanneld.state.table import Table

#: Addresses that are no host's, as numbers: none, everybody, IPv6's loopback. And the first octets of others,
#: which are loopback or multicast.
_NO_HOST: dict[Family, frozenset[int]] = {4: frozenset({0, 0xFFFF_FFFF}), 6: frozenset({0, 1})}
_OF_NO_HOST: dict[Family, frozenset[int]] = {4: frozenset({127, *range(224, 240)}), 6: frozenset({0xFF})}


class ReadSecret(Protocol):
    """Reads a key file, which gets what ``make`` returns if it is not there, durably and with mode 0400.

    The file is in the daemon's directory of keys, unless an environment ``variable`` names another one.
    Raises ``Fatal`` for a file that others can write, ``Retryable`` for one that cannot be read or made.
    """

    def __call__(
        self, name: str, make: Callable[[], bytes] | None = None, *, variable: str = ""
    ) -> bytes: ...


def _absent(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("this Host was made without that service")


class Host(Struct, frozen=True):
    """What a backend may know of its host, and may not reach for by itself."""

    uplink: Uplink
    #: What this node announced before, if the store still knows it.
    stored: LeaseAttrs | None
    #: The MAC of an existing device, None when there is no such device.
    mac_of: Callable[[str], str | None]
    #: The device on whose link an address is, None when it is behind a gateway or unreachable.
    link_to: Callable[[IPAddress], str | None]
    random_bytes: Callable[[int], bytes]
    #: The name for a TUN device that leads to this network: that of the one an earlier run has made,
    #: else the first that is free.
    tun_for: Callable[[IPNetwork], str] = lambda _: "flannel0"
    secret: ReadSecret = _absent
    #: What ``HasIdentity.identity`` has returned in this run, None before that.
    identity: Any = None


class OtherBackend(Refused):
    """The lease is sound, but its node runs another backend: nothing can lead there."""


class Backend(Protocol):
    """Decides what the kernel should hold; never touches it."""

    @property
    def mtu(self) -> int:
        """What is left for a container's packet, in bytes."""
        ...

    def attributes(self) -> LeaseAttrs:
        """What other nodes must know to reach this one."""
        ...

    def local(self, own: Lease) -> Iterable[Resource]:
        """Devices and addresses that are needed even without peers."""
        ...

    def peer(self, own: Lease, lease: Lease, /) -> Iterable[Resource]:
        """Return what leads from this node to one peer.

        Raises ``Refused`` for a lease that makes no sense: what led to the peer before stays. Raises
        ``Unsafe`` for one that would harm this host: what led to the peer is withdrawn.
        """
        ...


@runtime_checkable
class HasIdentity(Protocol):
    """Optional part of a backend: what tells this node from others, as MACs, a key or a command's output.

    It is asked for once a run, before ``attributes``, and is ``Host.identity`` of the backend that is then
    built, and of each that is built after the uplink has moved.
    """

    def identity(self) -> Any:
        """Decide it, by ``Host``'s services if need be. Raises ``Retryable`` if that has to wait."""
        ...


def has_peers(backend: Backend) -> bool:
    """Return False for a backend that leads to no peer, which its attribute ``has_peers`` says.

    The daemon then watches no lease but its own, and is complete without the peers' leases.
    """
    return bool(getattr(backend, "has_peers", True))


def encrypts(backend: Backend) -> bool:
    """Return True for a backend that must never let packets out in the clear, which ``encrypts`` says.

    Routes that an earlier run left into the network, past the backend's devices, are removed at the start.
    """
    return bool(getattr(backend, "encrypts", False))


@runtime_checkable
class HasTables(Protocol):
    """What a backend offers besides, if the kernel's tables are not all that it changes."""

    def tables(self) -> Iterable[Table]:
        """Its tables, for the whole run: asked for once, also if the uplink moves and another is built.

        The table of a resource is the one that the first item of its key names.
        """
        ...


Factory = Callable[[Config, Host], Backend]


# ---- what backends ask of a peer's lease --------------------------------------------------------


def require_type(lease: Lease, backend_type: str) -> None:
    """Raises ``OtherBackend`` for the lease of a node that runs another one."""
    if lease.attrs.backend_type != backend_type:
        raise OtherBackend(
            f"{lease} is a {lease.attrs.backend_type or 'nameless'} node, we run {backend_type}",
            "run one Backend.Type on all nodes",
        )


def peers_public_ip(lease: Lease, family: Family, uplink: Uplink) -> IPAddress:
    """Raises ``Refused`` when the peer announces none, no host's, or ours, from where all would come back.

    240.0.0.0/4 is reserved, and in use on many private networks: Linux and upstream take it for any other.
    """
    public_ip = lease.attrs.public(family)
    if public_ip is None:
        raise Refused(f"{lease} announces no public IPv{family} address", "check the peer's --public-ip")
    number = int(public_ip)
    if number in _NO_HOST[family] or number >> (public_ip.max_prefixlen - 8) in _OF_NO_HOST[family]:
        raise Refused(f"{lease} announces {public_ip}, which is no host's", "check the peer's --public-ip")
    if public_ip == uplink.public(family):
        raise Refused(
            f"{lease} announces our own public IP {public_ip}",
            "if it is no former lease of this node, give each node its own --public-ip",
        )
    return public_ip
