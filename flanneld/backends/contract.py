"""Contract between the daemon and its backends, which decide how packets travel between nodes.

A backend decides and never acts. It is rebuilt when the uplink changes, so it holds no state.
``docs/backends.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from flanneld.backends.announcement import announced
from flanneld.config import Config
from flanneld.errors import Refused, Retryable
from flanneld.model import Family, IPAddress, IPNetwork, Lease, LeaseAttrs, Uplink
from flanneld.state.resources import Resource
from flanneld.state.table import Table

if TYPE_CHECKING:
    from flanneld.runtime.command_runner import Finished
    from flanneld.runtime.http_client import HttpAnswer, HttpRequest

Result = TypeVar("Result")

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


class DryRun(Retryable):
    """A dry run does not do what a backend asks for."""


class RunCommand(Protocol):
    """Runs a command, a text by the shell, to its end; ``env`` adds to the daemon's environment.

    It is killed with all it started after ``timeout`` seconds, and when the daemon stops unless ``at_exit``.
    With ``clean`` its environment is ``env`` alone, with ``merged`` what it writes to stderr is part of
    ``output``. ``name`` stands for it in messages and the log. Raises ``Retryable`` if it does not start or
    was killed, ``DryRun`` if nothing is to be run. It blocks: never in the kernel's worker.
    """

    def __call__(
        self,
        command: Sequence[str] | str,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout: float = 10.0,
        *,
        at_exit: bool = False,
        clean: bool = False,
        merged: bool = False,
        name: str = "",
    ) -> Finished: ...


class MakeCall(Protocol):
    """Calls a function that blocks in a library, in a thread of its own, for at most ``timeout`` seconds.

    Raises what the function raises, and ``Retryable`` after that time or when the daemon stops. ``what`` is
    for the message. A dry run makes such calls, too: they must change nothing there.
    """

    def __call__(self, what: str, act: Callable[[], Result], timeout: float, /) -> Result: ...


def _absent(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("this Host was made without that service")


class HostServices(Struct, frozen=True, kw_only=True):
    """Services of the host for a backend and its tables, which use no others."""

    secret: ReadSecret = _absent
    run: RunCommand = _absent
    #: Makes a request, bounded in time and size. Raises ``Retryable`` without an answer. It blocks, too.
    http: Callable[[HttpRequest], HttpAnswer] = _absent
    #: Calls a function of a library that blocks.
    call: MakeCall = _absent
    #: The path of this daemon's file with a suffix, beside subnet.env, for what the next run has to know.
    beside: Callable[[str], Path] = _absent
    #: The kernel's identity of this boot; empty if it cannot be read.
    boot_id: Callable[[], str] = _absent
    #: The UDP port for this node alone; 0 for that of the network config.
    listen_port: int = 0


NO_SERVICES = HostServices()


class Host(HostServices, frozen=True):
    """Facts and services of the host for a backend, which uses no others."""

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
    #: What ``HasIdentity.identity`` has returned in this run, None before that.
    identity: Any = None


class OtherBackend(Refused):
    """The lease is sound, but its node runs another backend: nothing can lead there."""


class Backend(Protocol):
    """Decides what the kernel should hold; never touches it."""

    @property
    def mtu(self) -> int:
        """Bytes that are left for a container's packet."""
        ...

    def attributes(self) -> LeaseAttrs:
        """Return what other nodes must know to reach this one."""
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


def stands_alone(backend: Backend) -> bool:
    """Return True for a backend that cannot run beside another one, which ``stands_alone`` says.

    One that leads to no peer cannot either.
    """
    return bool(getattr(backend, "stands_alone", False)) or not has_peers(backend)


@runtime_checkable
class Switches(Protocol):
    """Optional part of a backend that takes over from another one.

    Routes of that other one serve until all peers are known.
    """

    def clear_devices(self, own: Lease, /) -> frozenset[str]:
        """Return our devices whose packets can be read on the way, though the backend encrypts."""
        ...


@runtime_checkable
class RecognizesItself(Protocol):
    """Optional part of a backend: its answer to whether a lease is this node's.

    Without it a lease is this node's if it has our public IP, in the first family that the network uses.
    """

    def is_self(self, attrs: LeaseAttrs, /) -> bool:
        """Return True if a lease with these attributes is this node's, also under a former public IP."""
        ...


@runtime_checkable
class HasClaims(Protocol):
    """Optional part of a backend: what of this host only one network can have."""

    def claims(self) -> Iterable[str]:
        """Name each for an operator, as ``VNI 1`` or ``UDP port 8285``; equal names are one thing."""
        ...


def claims_of(backend: Backend) -> tuple[str, ...]:
    """Return what only one network of this host can have; nothing for a backend that does not say."""
    return tuple(backend.claims()) if isinstance(backend, HasClaims) else ()


class ExitPolicy(Enum):
    """Fate of the resources in a backend's own tables when the daemon ends."""

    #: They stay: a restart interrupts nothing.
    KEEP = "keep"
    #: They are removed: a node without a daemon must not be relied on.
    REMOVE = "remove"


def exit_policy(backend: Backend) -> ExitPolicy:
    """Return the policy that a backend declares as its attribute ``exit_policy``; the default is ``KEEP``."""
    policy: ExitPolicy = getattr(backend, "exit_policy", ExitPolicy.KEEP)
    return policy


@runtime_checkable
class HasTables(Protocol):
    """Optional part of a backend: tables of its own, if the kernel's are not all that it changes."""

    def tables(self) -> Iterable[Table]:
        """Its tables, for the whole run: asked for once, also if the uplink moves and another is built.

        The table of a resource is the one that the first item of its key names.
        """
        ...


Factory = Callable[[Config, Host], Backend]


# ---- what backends ask of a peer's lease --------------------------------------------------------


def require_type(lease: Lease, backend_type: str) -> Lease:
    """Return the lease as a node of this type has it, be this type announced beside another one.

    Raises ``OtherBackend`` for the lease of a node that announces others only.
    """
    attrs = announced(lease.attrs, backend_type)
    if attrs is None:
        raise OtherBackend(
            f"{lease} is a {lease.attrs.backend_type or 'nameless'} node, we run {backend_type}",
            "run one Backend.Type on all nodes",
        )
    return lease if attrs is lease.attrs else replace(lease, attrs=attrs)


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
