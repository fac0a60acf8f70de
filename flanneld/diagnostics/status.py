"""The status document that the daemon sends on its status socket, as structs.

A key that is absent is UNSET, null is None: the store and a host alone know less than a daemon. A reader
ignores keys that it does not know. Addresses and objects are texts here, and parsed when they are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from flanneld.findings import Condition
from flanneld.model import IPAddress, IPNetwork
from flanneld.network import resource_json
from flanneld.network.resource_json import parse_address, parse_network
from flanneld.state.resources import Resource

Value = TypeVar("Value")
Part = TypeVar("Part", bound=Struct)
#: Peers per piece of the document.
_PEERS_AT_A_TIME = 100
#: Types of the fields of an object in JSON.
_SCALARS = frozenset({str, int, float, bool, type(None)})
#: Errors of parsers.
_STRANGE = (AttributeError, LookupError, TypeError, ValueError)


class NotUnderstood(ValueError):
    """A text in the document that cannot be parsed, as of another version's daemon."""


class RangeStatus(Struct, frozen=True, gc=False):
    """A cluster network, and the length of a node's subnet in it."""

    network: str
    subnet_len: int


class NetworkStatus(Struct, frozen=True, gc=False):
    """Network config: networks, backend, and the one that it is switched to or from."""

    ranges: tuple[RangeStatus, ...] = ()
    backend: str | None = None
    port: int | UnsetType | None = UNSET
    also: str | UnsetType | None = UNSET


class StoreStatus(Struct, frozen=True, gc=False):
    """The store; ``last_event`` is in seconds since the epoch."""

    name: str
    answers: bool
    problem: str | UnsetType | None = UNSET
    remedy: str | UnsetType | None = UNSET
    cache: str | None = None
    requests: int | UnsetType = UNSET
    errors: int | UnsetType = UNSET
    last_event: float | UnsetType | None = UNSET
    resyncs: dict[str, int] | UnsetType = UNSET


class HealthStatus(Struct, frozen=True, gc=False):
    """Readiness, and what is wrong."""

    ready: bool = True
    missing: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] | UnsetType = UNSET


class LeaseStatus(Struct, frozen=True, gc=False):
    """Our lease; ``expires`` is absent by the subnet file and null for a reservation.

    ``macs`` are the VXLAN devices' MACs that peers know.
    """

    subnets: tuple[str, ...]
    expires: float | UnsetType | None = UNSET
    public_ips: tuple[str, ...] | UnsetType = UNSET
    macs: tuple[str, ...] | UnsetType = UNSET
    renewals: dict[str, int] | UnsetType = UNSET


class UplinkStatus(Struct, frozen=True, gc=False):
    """The external interface, with its own addresses and those that peers are told."""

    name: str
    mtu: int
    addresses: tuple[str, ...] = ()
    public_ips: tuple[str, ...] = ()
    usable: bool | UnsetType = UNSET


class ObjectStatus(Struct, frozen=True, gc=False):
    """A desired object as text and as a value; that is null for one of a backend's own ``table``."""

    kind: str
    text: str
    value: dict[str, Any] | None
    in_kernel: bool
    table: str | UnsetType = UNSET

    @property
    def resource(self) -> Resource | None:
        """The object; None for one of a backend's own table. Raises ``NotUnderstood``."""
        if not self.value:
            return None
        try:
            if not _SCALARS.issuperset(map(type, self.value.values())):
                raise TypeError("a field of an object is a list or an object")
            found = resource_json.decode(self.value)
            hash(found.key)  # null in the place of an address is found here, and not where it is compared
        except _STRANGE as error:
            raise NotUnderstood(f"{type(error).__name__}: {error}") from None
        return found


class RepairStatus(Struct, frozen=True, gc=False):
    """Repairs of objects of one kind, by cause."""

    kind: str
    cause: str
    number: int


class RefusalStatus(Struct, frozen=True, gc=False):
    """An object that the kernel, or a backend's table, refuses."""

    object: str
    reason: str
    errno: int = 0
    remedy: str = ""
    table: str = ""


class GuardStatus(Struct, frozen=True, gc=False):
    """The removal guard, and how often it has held removals back."""

    holds: bool
    number: int = 0


class RuleRepairStatus(Struct, frozen=True, gc=False):
    """Repairs of rules through a driver, by the program that removed them."""

    through: str
    by: str
    number: int


class FirewallStatus(Struct, frozen=True, gc=False):
    """Our rules: their place, what they do, and the families for which they are not in place."""

    place: str
    masquerade: bool = False
    forward: bool = False
    not_in_place: tuple[str, ...] = ()
    fights: bool = False
    repairs: tuple[RuleRepairStatus, ...] = ()


class EventStatus(Struct, frozen=True, gc=False):
    """A line of the log, at ``time`` in seconds since the epoch."""

    time: float
    severity: str
    source: str
    text: str


class SessionStatus(Struct, frozen=True, gc=False):
    """An encrypted session; ``handshake`` is in seconds since the epoch, null for none yet."""

    subnet: str
    state: str = "idle"
    handshake: float | None = None
    rx_bytes: int = 0
    tx_bytes: int = 0
    protocol: str = "wireguard"
    endpoint: str = ""
    encapsulated: bool = False
    problem: str = ""
    #: UDP port of this node; only known to flannelctl.
    port: int | UnsetType = UNSET


class ProbeStatus(Struct, frozen=True, gc=False):
    """The last ICMP echo to a peer; ``rtt`` is in seconds, null without an answer."""

    target: str
    time: float
    rtt: float | None


class PeerStatus(Struct, frozen=True, gc=False):
    """Another node's lease with its desired objects.

    ``vnis`` are numbers; daemons before them told anything that a lease has there.
    """

    subnets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    public_ips: tuple[str, ...] = ()
    macs: tuple[str, ...] = ()
    vnis: tuple[Any, ...] = ()
    expires: float | None = None
    backend: str | None = None
    state: str = ""
    reason: str = ""
    code: str = ""
    conflicts: tuple[str, ...] = ()
    #: The node's name, if the store tells it.
    node: str | UnsetType = UNSET
    #: Type of the backend that it runs beside the first, if it announces one.
    also: str | UnsetType = UNSET
    objects: tuple[ObjectStatus, ...] = ()
    sessions: tuple[SessionStatus, ...] | UnsetType = UNSET
    probe: ProbeStatus | UnsetType | None = UNSET

    @property
    def name(self) -> str:
        """The subnets, and the node's name if it is known."""
        return ",".join(self.subnets) + (f" ({self.node})" if self.node else "")

    @property
    def place(self) -> str:
        """The subnets, and the name or else the public IP of the node."""
        return self.name if self.node or not self.public_ips else f"{self.name} ({self.public_ips[0]})"

    @property
    def segments(self) -> set[int]:
        """Its VNIs, without what is no number."""
        return {each for each in self.vnis if type(each) is int}

    @property
    def networks(self) -> list[IPNetwork]:
        """Its subnets. Raises ``NotUnderstood``."""
        return networks(self.subnets)

    @property
    def addresses(self) -> list[IPAddress]:
        """Its public IPs. Raises ``NotUnderstood``."""
        return addresses(self.public_ips)


class Status(Struct, frozen=True, gc=False):
    """The document. A daemon tells all but the data plane before it has a lease; ``mtu`` is in bytes."""

    version: str | UnsetType = UNSET
    pid: int | UnsetType = UNSET
    time: float | UnsetType = UNSET
    started: float | UnsetType = UNSET
    flags: str | UnsetType = UNSET
    subnet_file: str | UnsetType = UNSET
    kube_subnet_mgr: bool | UnsetType = UNSET
    answer_port: int | UnsetType = UNSET
    store: StoreStatus | UnsetType = UNSET
    health: HealthStatus | UnsetType = UNSET
    network: NetworkStatus | UnsetType | None = UNSET
    lease: LeaseStatus | UnsetType | None = UNSET
    uplink: UplinkStatus | UnsetType = UNSET
    mtu: int | UnsetType = UNSET
    mtu_lowered_from: int | UnsetType = UNSET
    devices: tuple[str, ...] | UnsetType = UNSET
    local: tuple[ObjectStatus, ...] | UnsetType = UNSET
    synced: bool | UnsetType = UNSET
    last_sync: float | UnsetType | None = UNSET
    repairs: tuple[RepairStatus, ...] | UnsetType = UNSET
    fights: bool | UnsetType = UNSET
    lost_notifications: int | UnsetType = UNSET
    refused: tuple[RefusalStatus, ...] | UnsetType = UNSET
    removal_guard: GuardStatus | UnsetType = UNSET
    firewall: FirewallStatus | UnsetType | None = UNSET
    events: tuple[EventStatus, ...] | UnsetType = UNSET
    peers: tuple[PeerStatus, ...] | UnsetType = UNSET

    @property
    def ranges(self) -> list[tuple[IPNetwork, int]]:
        """The cluster networks, each with the length of a node's subnet. Raises ``NotUnderstood``."""
        network = known(self.network)
        return [(networks([each.network])[0], each.subnet_len) for each in network.ranges] if network else []

    @property
    def backend(self) -> str | None:
        network = known(self.network)
        return network.backend if network else None

    @property
    def backends(self) -> set[str | None]:
        """Type of the network's backend, and of the one that it switches to or from."""
        network = known(self.network)
        return {network.backend, known(network.also)} if network else {None}

    @property
    def own_subnets(self) -> list[IPNetwork]:
        """The subnets of our lease. Raises ``NotUnderstood``."""
        lease = known(self.lease)
        return networks(lease.subnets) if lease else []

    @property
    def uplink_name(self) -> str:
        """Name of the external interface; empty if it is unknown."""
        uplink = known(self.uplink)
        return uplink.name if uplink else ""

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions of the daemon; none if they are unknown."""
        health = known(self.health)
        return (known(health.conditions) or ()) if health else ()

    @property
    def each_peer(self) -> tuple[PeerStatus, ...]:
        """The peers; none if they are unknown."""
        return known(self.peers) or ()

    @property
    def knows_peers(self) -> bool:
        """True if all leases are known, so that an object missing from the document has no owner."""
        has_all = UNSET not in (self.local, self.peers)
        return has_all and self.synced is not False


# ---- as JSON ------------------------------------------------------------------------------------

#: Six times as fast as the standard library, which counts with thousands of peers.
_encode = msgspec.json.Encoder().encode


def pieces(summary: Status, peers: Iterable[PeerStatus]) -> Iterator[bytes]:
    """Yield the document in pieces, so that other work goes on while a long list of peers is written."""
    yield encoded(summary)[:-1]
    yield b',"peers":['
    separator = b""
    known = iter(peers)
    while some := list(islice(known, _PEERS_AT_A_TIME)):
        yield separator + b",\n".join(map(encoded, some))
        separator = b",\n"
    yield b"]}\n"


def encoded(value: Struct) -> bytes:
    """Return the document, or a part of it, as JSON."""
    try:
        return _encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, out of a lease
        return json.dumps(msgspec.to_builtins(value)).encode()


def plain(said: bytes) -> dict[str, Any]:
    """Parse a document as it is, with the keys of any version. Raises ``ValueError`` for anything else."""
    try:
        document = msgspec.json.decode(said)
    except msgspec.DecodeError as error:
        try:
            document = json.loads(said)  # takes half a surrogate pair, as in a path that is no UTF-8
        except ValueError:
            raise ValueError(f"what answers is no daemon: {error}") from None
    if not isinstance(document, dict):
        raise ValueError("what answers is no daemon")  # noqa: TRY004 - it is the value that is wrong
    return document


_decode = msgspec.json.Decoder(Status).decode


def decoded(said: bytes) -> tuple[Status, list[str]]:
    """Return the document, without the parts that another version tells otherwise; these are named.

    Raises ``ValueError`` for anything but a document.
    """
    try:
        told = _decode(said)
    except msgspec.DecodeError:
        return understood(Status, plain(said))
    # Every daemon names its version: an object without it is another program's, or not whole.
    return told, [] if told.version else ["it names no version"]


def understood(kind: type[Part], document: Mapping[str, Any]) -> tuple[Part, list[str]]:
    """Return a struct of the parts that have the expected types, and why others are left out."""
    with suppress(msgspec.ValidationError):
        return msgspec.convert(document, kind), []
    parts: dict[str, Any] = {}
    problems = []
    for each in msgspec.structs.fields(kind):
        if each.name in document:
            try:
                parts[each.name] = msgspec.convert(document[each.name], each.type)
            except msgspec.ValidationError as error:
                problems.append(f"{each.name}: {error}")
    return kind(**parts), problems


# ---- values -------------------------------------------------------------------------------------


def known(value: Value | UnsetType | None) -> Value | None:
    """Return a value of the document, None if it is absent or null."""
    return None if isinstance(value, UnsetType) else value


def networks(texts: Iterable[str]) -> list[IPNetwork]:
    """Parse subnets. Raises ``NotUnderstood``."""
    return [_parsed(parse_network, text) for text in texts]


def addresses(texts: Iterable[str]) -> list[IPAddress]:
    """Parse addresses. Raises ``NotUnderstood``."""
    return [_parsed(parse_address, text) for text in texts]


def resources(objects: Iterable[ObjectStatus] | UnsetType | None) -> Iterator[Resource]:
    """Yield the objects' values, except those of backends' own tables. Raises ``NotUnderstood``."""
    return (found for each in known(objects) or () if (found := each.resource) is not None)


def _parsed(parse: Callable[[Any], Value], told: object) -> Value:
    try:
        return parse(told)
    except _STRANGE as error:
        raise NotUnderstood(f"{type(error).__name__}: {error}") from None


def store_kind(name: str) -> str:
    """Return the kind of store, the first word of its name, without its address; for etcd with its API."""
    if apis := re.findall(r"\betcd (v[23]) at ", name):
        return f"etcd {'+'.join(sorted(apis))}"
    first = name.partition(" ")[0].lower()
    return {"flannel": "remote", "store": "file"}.get(first, first)
