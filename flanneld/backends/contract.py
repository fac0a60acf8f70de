"""Contract between the daemon and its backends, which choose the path of packets between nodes.

A backend declares the desired state and never acts. It is stateless: a change of the uplink rebuilds it.
``docs/CONTRIBUTING.md`` shows how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.compat.json import Fields, GoJsonError
from flanneld.config import Config, SubnetRange
from flanneld.errors import Fatal, Refused, Retryable, shown
from flanneld.model import (
    FAMILIES,
    Family,
    IPAddress,
    IPNetwork,
    Lease,
    LeaseAttrs,
    Uplink,
    is_a_hosts,
    is_same_node,
)
from flanneld.state.resources import Resource
from flanneld.state.table import Table

if TYPE_CHECKING:
    from flanneld.runtime.command import Finished
    from flanneld.runtime.sockets.http_client import HttpAnswer, HttpRequest

Result = TypeVar("Result")

#: Bytes that every link must carry in one piece (RFC 791, RFC 8200).
_SMALLEST_MTU: dict[Family, int] = {4: 68, 6: 1280}
#: Characters of the longest name of a backend that is believed.
_LONGEST_TYPE = 64


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
    #: Result of ``Backend.identity`` in this run, None before the call.
    identity: Any = None
    #: True if another backend runs beside this one: peers may send by either.
    is_shared: bool = False


class OtherBackend(Refused):
    """Error for a valid lease of a node with another backend, which is unreachable from here."""


class ExitPolicy(Enum):
    """Treatment of the resources in a backend's own tables when the daemon ends."""

    #: They stay: a restart interrupts nothing.
    KEEP = "keep"
    #: They are removed: other nodes must not rely on a node without a daemon.
    REMOVE = "remove"


class Option(Struct, frozen=True):
    """Option in ``Backend`` of the network config, and the field of a backend's settings that gets it.

    Its type is that of ``default``, or any if that is ``()``: then ``made`` gets None for null and no value.
    ``made`` makes the field of the JSON value, and raises ``Fatal`` for an unusable one. A number is from
    ``least`` to ``most`` then.
    """

    name: str
    field: str
    default: bool | int | str | tuple[()]
    least: int = 0
    most: int = 65535
    made: Callable[[Any], Any] = lambda value: value

    def of(self, fields: Fields) -> Any:
        """Return the value of the field. Raises ``Fatal``, and ``GoJsonError`` for another type."""
        read: Any = {bool: fields.boolean, int: fields.integer, str: fields.string}.get(type(self.default))
        value = self.made(read(self.name, self.default) if read else fields.raw(self.name))
        if type(value) is int and not self.least <= value <= self.most:
            remedy = f"set it to a number from {self.least} to {self.most}"
            raise Fatal(f"Backend.{self.name} is {value}", remedy)
        return value


Overhead = Mapping[Family, int]


class OuterPackets(Struct, frozen=True):
    """Packets between two nodes that carry those of containers, or agree on their keys.

    ``protocol`` is a name as in iptables, ``port`` the UDP port of the receiver, unless ``option`` sets
    another. ``family`` is that of the containers' packets, 0 for both.
    """

    protocol: str
    port: int = 0
    option: str = ""
    family: Literal[0, 4, 6] = 0


class KernelFeature(Struct, frozen=True):
    """Part of the kernel that a backend needs beside its kinds of devices.

    It can be had if a netlink socket of the ``protocol`` can be opened; ``modules`` are those for modprobe.
    """

    name: str
    modules: str
    protocol: int


class Backend(ABC):
    """Backend: declares the desired objects of the kernel, and never writes them.

    All but the abstract parts have a default. A backend of another package need not be a subclass:
    ``complete`` adds the defaults.
    """

    #: Its options in the network config, for ``read_options``.
    options: ClassVar[tuple[Option, ...]] = ()
    #: Bytes of the outer headers at most, by the family of the containers' packets. It carries only these
    #: families; empty for all of them without such headers.
    overhead: ClassVar[Overhead] = {}
    #: True if it refuses a network with a family that it does not carry, instead of leaving that one out.
    refuses_others: bool = False
    #: What firewalls between the nodes must accept.
    flows: ClassVar[tuple[OuterPackets, ...]] = ()
    #: What the kernel must have beside the kinds of the devices in ``local``.
    kernel_features: ClassVar[tuple[KernelFeature, ...]] = ()
    #: False without routes to peers. The daemon then watches only its own lease, and is ready without theirs.
    has_peers: bool = True
    #: True if packets must never leave unencrypted. An earlier run's routes into the network that bypass the
    #: backend's devices are removed at the start.
    encrypts: bool = False
    #: True if its commands make devices and routes. Then none of them counts as flannel's for its name.
    makes_routes: bool = False
    #: True if it cannot run beside another backend. One without routes to peers cannot either.
    stands_alone: bool = False
    #: True if it takes over from another backend, whose routes serve until all peers are known.
    switches: bool = False
    exit_policy: ExitPolicy = ExitPolicy.KEEP

    @property
    @abstractmethod
    def mtu(self) -> int:
        """MTU for containers, in bytes."""

    @abstractmethod
    def attributes(self) -> LeaseAttrs:
        """Return the lease attributes, which other nodes need to reach this one."""

    def local(self, own: Lease, /) -> Iterable[Resource]:
        """Return the devices and addresses that are needed even without peers."""
        del own
        return ()

    @abstractmethod
    def peer(self, own: Lease, lease: Lease, /) -> Iterable[Resource]:
        """Return the objects that lead from this node to one peer.

        Raises ``Refused`` for an invalid lease: the peer's former objects stay. Raises ``Unsafe`` for a
        lease that would harm this host: the peer's objects are removed.
        """

    def identity(self) -> Any:
        """Return this node's identity, such as MACs, a key or a command's output; None if it has none.

        It is requested once a run, before ``attributes``. Each later backend of this run, also after a move
        of the uplink, gets it as ``Host.identity``. ``Host``'s services may be used. Raises ``Retryable`` if
        it must wait.
        """
        return None

    def is_self(self, attrs: LeaseAttrs, /) -> bool:
        """Return True if these attributes belong to this node's lease, also with a former public IP.

        By default they do if they have our public IP, in the first family of the network.
        """
        return is_same_node(attrs, self.attributes())

    def claims(self) -> Iterable[str]:
        """Return a name for each resource of this host that only one network can use.

        Such as ``VNI 1`` or ``UDP port 8285``: equal names are one resource.
        """
        return ()

    def tables(self) -> Iterable[Table]:
        """Return tables of its own, for objects outside the kernel's tables.

        Called once a run: they outlive a rebuild of the backend for a new uplink. The first item of a
        resource's key names its table.
        """
        return ()

    def clear_devices(self, own: Lease, /) -> frozenset[str]:
        """Return our devices that send packets unencrypted though the backend encrypts."""
        del own
        return frozenset()

    def gives(self, part: str) -> bool:
        """Return True if a method of this name is the backend's own, and not the default."""
        return getattr(type(self), part) is not getattr(Backend, part)


def complete(made: Any) -> Backend:
    """Return a backend with the defaults of ``Backend`` for all that it leaves out."""
    if isinstance(made, Backend):
        return made

    def of(name: str) -> property:
        return property(lambda _: getattr(made, name))

    parts = {name: of(name) for name in vars(Backend) if not name.startswith("_") and hasattr(made, name)}
    kind: Any = type("Completed", (Backend,), parts)
    kind.__abstractmethods__ = frozenset()  # a part that it lacks is missed when it is asked for
    backend: Backend = kind()
    return backend


def exit_policy(backend: Backend) -> ExitPolicy:
    """Return the exit policy of any backend, for tests of other packages."""
    return complete(backend).exit_policy


Factory = Callable[[Config, Host], Backend]


# ---- options and MTU --------------------------------------------------------------------------------


def carried(backend: type[Backend], config: Config) -> list[SubnetRange]:
    """Return the ranges that a backend carries. Raises ``Fatal`` for none, and for one that it refuses."""
    families = backend.overhead or FAMILIES
    found = [each for each in config.ranges if each.family in families]
    if not found or (backend.refuses_others and len(found) < len(config.ranges)):
        switches = " and ".join(f"EnableIPv{each} to {str(each in families).lower()}" for each in FAMILIES)
        remedy = f"set {switches}, or choose another Backend.Type"
        raise Fatal(f"{config.backend_type} carries IPv{' and IPv'.join(map(str, families))} only", remedy)
    return found


def ports(backend: Backend | type[Backend], config: Config) -> tuple[tuple[str, int], ...]:
    """Return protocol and port of a backend's packets, as the network config sets them; 0 for no port."""
    return tuple(
        (flow.protocol, (flow.option and config.backend.integer(flow.option, 0)) or flow.port)
        for flow in backend.flows
        if flow.family in (0, *config.families)
    )


def read_options(config: Config, options: Iterable[Option]) -> dict[str, Any]:
    """Return the fields of a backend's settings. Raises ``Fatal`` for an unusable value."""
    try:
        return {each.field: each.of(config.backend) for each in options}
    except GoJsonError as error:
        raise Fatal(f"the network config is wrong: {error}", "correct Backend in the store") from None


def inner_mtu(uplink: Uplink, overhead: int, family: Family, inside: str, option: int | None = None) -> int:
    """Return the MTU inside the outer headers. Raises ``Fatal`` if it is too small for the family.

    ``option`` is Backend.MTU, 0 if it is not set, None for a backend without it.
    """
    outer = option or uplink.mtu
    mtu = outer - overhead
    if mtu < _SMALLEST_MTU[family]:
        raise Fatal(
            f"an uplink MTU of {outer} leaves {mtu} bytes inside {inside}",
            f"raise the MTU of {uplink.name}{'' if option is None else ' or set Backend.MTU'}",
        )
    return mtu


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


def second(attrs: LeaseAttrs) -> dict[str, Any]:
    """Return what a node announces of its second backend; empty without one. Any value may be in it."""
    for data in (attrs.backend_data, attrs.backend_v6_data):
        also = data.get(KEY) if isinstance(data, dict) else None
        if isinstance(also, dict) and isinstance(also.get("Type"), str):
            return also
    return {}


def announced(attrs: LeaseAttrs, backend_type: str) -> LeaseAttrs | None:
    """Return the attributes of a lease of this type; None if the node does not announce the type."""
    if attrs.backend_type == backend_type:
        return attrs
    also = second(attrs)
    if also.get("Type") != backend_type:
        return None
    return replace(
        attrs,
        backend_type=backend_type,
        backend_data=also.get("Data"),
        backend_v6_data=also.get("V6Data"),
    )


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
    own = uplink.public(family)
    if public_ip.is_link_local and not (own and own.is_link_local):
        raise Refused(
            f"{lease} announces {public_ip}, which leads nowhere from here", "check the peer's --public-ip"
        )
    if public_ip == own:
        raise Refused(
            f"{lease} announces our own public IP {public_ip}",
            "if it is no former lease of this node, give each node its own --public-ip",
        )
    return public_ip
