"""Contract between the daemon and its backends, which choose the path of packets between nodes.

A backend declares the desired state and never acts. It is stateless: a change of the uplink rebuilds it.
``docs/CONTRIBUTING.md`` shows how to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from flanneld.config import Config
from flanneld.errors import Refused, Retryable, shown
from flanneld.model import Family, IPAddress, IPNetwork, Lease, LeaseAttrs, Uplink, is_a_hosts
from flanneld.state.resources import Resource
from flanneld.state.table import Table

if TYPE_CHECKING:
    from flanneld.runtime.command import Finished
    from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

Result = TypeVar("Result")


class ReadSecret(Protocol):
    """Reader of a key file. A missing file is created durably with the result of ``make`` and mode 0400.

    The file is in the daemon's directory of keys, unless an environment ``variable`` names another file.
    Raises ``Fatal`` for a file that other users can write, ``Retryable`` if it cannot be read or created.
    """

    def __call__(
        self, name: str, make: Callable[[], bytes] | None = None, *, variable: str = ""
    ) -> bytes: ...


class DryRun(Retryable):
    """Error for an action that a dry run does not perform."""


class RunCommand(Protocol):
    """Runner of a command, given as words or as a text for the shell; ``env`` extends the environment.

    The command and its children are killed after ``timeout`` seconds, and when the daemon stops unless
    ``at_exit``. With ``clean`` the environment is ``env`` alone, with ``merged`` stderr is part of
    ``output``. ``name`` replaces the command in messages and the log. Raises ``Retryable`` if the command
    does not start or is killed, ``DryRun`` in a dry run. It blocks: never call it in the kernel's worker.
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
    """Caller of a blocking library function in a thread of its own, for at most ``timeout`` seconds.

    Raises the function's exceptions, and ``Retryable`` after the timeout or when the daemon stops. ``what``
    is for the message. A dry run makes such calls, too, so they must not change anything then.
    """

    def __call__(self, what: str, act: Callable[[], Result], timeout: float, /) -> Result: ...


def _absent(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("this Host was made without that service")


class HostServices(Struct, frozen=True, kw_only=True):
    """Services of the host for a backend and its tables, which must use no others."""

    secret: ReadSecret = _absent
    run: RunCommand = _absent
    #: Makes a blocking request, bounded in time and size. Raises ``Retryable`` without an answer.
    http: Callable[[HttpRequest], HttpAnswer] = _absent
    #: Calls a blocking library function.
    call: MakeCall = _absent
    #: Returns the path of this daemon's file with a suffix, beside subnet.env, for data of the next run.
    beside: Callable[[str], Path] = _absent
    #: The kernel's boot ID; empty if it cannot be read.
    boot_id: Callable[[], str] = _absent
    #: Returns True if another node's lease announces what a predicate looks for, and no lease of ours does.
    is_others: Callable[[Callable[[LeaseAttrs], bool]], bool] = lambda _announces: False
    #: UDP port for this node alone; 0 for the network config's.
    listen_port: int = 0
    #: True if the CPU is to compute the checksums of what the tunnel sends, instead of the uplink.
    cpu_checksums: bool = False


NO_SERVICES = HostServices()


class Host(HostServices, frozen=True):
    """Facts and services of the host for a backend, which must use no others."""

    uplink: Uplink
    #: Attributes that this node announced before, if the store still has them.
    stored: LeaseAttrs | None
    #: Returns the MAC of a device, None if it does not exist.
    mac_of: Callable[[str], str | None]
    #: Returns the device on whose link an address is, None if it is behind a gateway or unreachable.
    link_to: Callable[[IPAddress], str | None]
    random_bytes: Callable[[int], bytes]
    #: Returns the name for a TUN device that leads to this network: that of an earlier run's, else the
    #: first free one.
    tun_for: Callable[[IPNetwork], str] = lambda _: "flannel0"
    #: Result of ``HasIdentity.identity`` in this run, None before the call.
    identity: Any = None
    #: True if another backend runs beside this one: peers may send by either.
    is_shared: bool = False


class OtherBackend(Refused):
    """Error for a valid lease of a node with another backend, which is unreachable from here."""


class Backend(Protocol):
    """Backend: declares the desired objects of the kernel, and never writes them."""

    @property
    def mtu(self) -> int:
        """MTU for containers, in bytes."""
        ...

    def attributes(self) -> LeaseAttrs:
        """Return the lease attributes, which other nodes need to reach this one."""
        ...

    def local(self, own: Lease) -> Iterable[Resource]:
        """Return the devices and addresses that are needed even without peers."""
        ...

    def peer(self, own: Lease, lease: Lease, /) -> Iterable[Resource]:
        """Return the objects that lead from this node to one peer.

        Raises ``Refused`` for an invalid lease: the peer's former objects stay. Raises ``Unsafe`` for a
        lease that would harm this host: the peer's objects are removed.
        """
        ...


@runtime_checkable
class HasIdentity(Protocol):
    """Optional part of a backend: this node's identity, such as MACs, a key or a command's output.

    It is requested once a run, before ``attributes``. Each later backend of this run, also after a move of
    the uplink, gets it as ``Host.identity``.
    """

    def identity(self) -> Any:
        """Return the identity, with ``Host``'s services if needed. Raises ``Retryable`` if it must wait."""
        ...


def has_peers(backend: Backend) -> bool:
    """Return False for a backend without routes to peers, as its attribute ``has_peers`` declares.

    The daemon then watches only its own lease, and is ready without the peers' leases.
    """
    return bool(getattr(backend, "has_peers", True))


def encrypts(backend: Backend) -> bool:
    """Return True for a backend that must never send packets unencrypted, as ``encrypts`` declares.

    An earlier run's routes into the network that bypass the backend's devices are removed at the start.
    """
    return bool(getattr(backend, "encrypts", False))


def makes_routes(backend: Backend) -> bool:
    """Return True for a backend whose commands make devices and routes, as ``makes_routes`` declares.

    Then no device or route counts as flannel's for its name.
    """
    return bool(getattr(backend, "makes_routes", False))


def stands_alone(backend: Backend) -> bool:
    """Return True for a backend that cannot run beside another, as ``stands_alone`` declares.

    A backend without routes to peers cannot either.
    """
    return bool(getattr(backend, "stands_alone", False)) or not has_peers(backend)


@runtime_checkable
class Switches(Protocol):
    """Optional part of a backend that takes over from another backend.

    Routes of the other backend serve until all peers are known.
    """

    def clear_devices(self, own: Lease, /) -> frozenset[str]:
        """Return our devices that send packets unencrypted though the backend encrypts."""
        ...


@runtime_checkable
class RecognizesItself(Protocol):
    """Optional part of a backend: recognition of this node's lease.

    Without it a lease belongs to this node if it has our public IP, in the first family of the network.
    """

    def is_self(self, attrs: LeaseAttrs, /) -> bool:
        """Return True if these attributes belong to this node's lease, also with a former public IP."""
        ...


@runtime_checkable
class HasClaims(Protocol):
    """Optional part of a backend: resources of this host that only one network can use."""

    def claims(self) -> Iterable[str]:
        """Return a name for each, such as ``VNI 1`` or ``UDP port 8285``. Equal names are one resource."""
        ...


def claims_of(backend: Backend) -> tuple[str, ...]:
    """Return the resources that only one network can use; none for a backend that declares none."""
    return tuple(backend.claims()) if isinstance(backend, HasClaims) else ()


class ExitPolicy(Enum):
    """Treatment of the resources in a backend's own tables when the daemon ends."""

    #: They stay: a restart interrupts nothing.
    KEEP = "keep"
    #: They are removed: other nodes must not rely on a node without a daemon.
    REMOVE = "remove"


def exit_policy(backend: Backend) -> ExitPolicy:
    """Return the backend's attribute ``exit_policy``; the default is ``KEEP``."""
    policy: ExitPolicy = getattr(backend, "exit_policy", ExitPolicy.KEEP)
    return policy


@runtime_checkable
class HasTables(Protocol):
    """Optional part of a backend: tables of its own, for objects outside the kernel's tables."""

    def tables(self) -> Iterable[Table]:
        """Return the tables. Called once a run: they outlive a rebuild of the backend for a new uplink.

        The first item of a resource's key names its table.
        """
        ...


Factory = Callable[[Config, Host], Backend]


# ---- a second backend in a lease ------------------------------------------------------------------

#: Key of the backend data with the second backend of a node: its type, and the data of a lease of this type.
#: Go flannel does not know the key and ignores it:
#: {"VNI": 1, "VtepMAC": "...", "Also": {"Type": "wireguard", "Data": {"PublicKey": "...", "Port": 51820}}}
KEY = "Also"


def with_also(first: LeaseAttrs, second: LeaseAttrs) -> LeaseAttrs:
    """Return the attributes of a node with two backends; the data of the first are an object or None."""
    also: dict[str, Any] = {"Type": second.backend_type}
    if second.backend_data is not None:
        also["Data"] = second.backend_data
    if second.backend_v6_data is not None:
        also["V6Data"] = second.backend_v6_data
    if first.public_ip:
        return replace(first, backend_data={**(first.backend_data or {}), KEY: also})
    return replace(first, backend_v6_data={**(first.backend_v6_data or {}), KEY: also})


def announced(attrs: LeaseAttrs, backend_type: str) -> LeaseAttrs | None:
    """Return the attributes of a lease of this type; None if the node does not announce the type."""
    if attrs.backend_type == backend_type:
        return attrs
    for data in (attrs.backend_data, attrs.backend_v6_data):
        also = data.get(KEY) if isinstance(data, dict) else None
        if isinstance(also, dict) and also.get("Type") == backend_type:
            return replace(
                attrs,
                backend_type=backend_type,
                backend_data=also.get("Data"),
                backend_v6_data=also.get("V6Data"),
            )
    return None


#: Characters of the longest name of a backend that is believed.
_LONGEST_TYPE = 64

# ---- checks of a peer's lease --------------------------------------------------------------------


def require_type(lease: Lease, backend_type: str) -> Lease:
    """Return the lease with the attributes for this type, also if it is announced as a second type.

    Raises ``OtherBackend`` for a node that announces only other types, and ``Refused`` for a type that no
    backend has: it tells nothing, so what is known of the node stays.
    """
    attrs = announced(lease.attrs, backend_type)
    if attrs is None:
        other = lease.attrs.backend_type
        if len(other) > _LONGEST_TYPE or not other.isprintable():
            raise Refused(f"{lease} has a backend type that is none: {shown(other)}", "restart its node")
        raise OtherBackend(
            f"{lease} is a {other or 'nameless'} node, we run {backend_type}",
            "run one Backend.Type on all nodes",
        )
    return lease if attrs is lease.attrs else replace(lease, attrs=attrs)


def peers_public_ip(lease: Lease, family: Family, uplink: Uplink) -> IPAddress:
    """Return a peer's public IP. Raises ``Refused`` if it is missing, invalid for a host, or ours."""
    public_ip = lease.attrs.public(family)
    if public_ip is None:
        raise Refused(f"{lease} announces no public IPv{family} address", "check the peer's --public-ip")
    if not is_a_hosts(public_ip):
        raise Refused(f"{lease} announces {public_ip}, which is no host's", "check the peer's --public-ip")
    if public_ip == uplink.public(family):
        raise Refused(
            f"{lease} announces our own public IP {public_ip}",
            "if it is no former lease of this node, give each node its own --public-ip",
        )
    return public_ip
