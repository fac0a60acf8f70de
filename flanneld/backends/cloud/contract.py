"""Contract between a cloud's tables and the client of its API: resources, and the clients' options (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from ipaddress import IPv4Address, IPv4Network
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from msgspec import Struct, field

from flanneld.backends.contract import Option
from flanneld.compat.json import Fields
from flanneld.errors import Fatal, Retryable, install_command
from flanneld.state.resources import Key, Kind

#: Names of the tables.
ROUTES, FORWARDING = "cloud-routes", "cloud-forwarding"


class ErrorKind(Enum):
    """Kind of an error. Each cloud has its own codes for it."""

    THROTTLED = "throttled"
    DENIED = "denied"
    CREDENTIALS = "credentials"
    FULL = "full"
    NO_TABLE = "no table"
    #: The object to remove or replace does not exist.
    ABSENT = "absent"
    #: The object to make exists already.
    EXISTS = "exists"
    #: The cloud still executes an earlier call.
    BUSY = "busy"
    OTHER = "other"


class CloudError(Retryable):
    """Error for a call that a cloud refused or did not answer."""

    def __init__(self, trouble: ErrorKind, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.trouble = trouble


class ApiCall(Struct, frozen=True, eq=False):
    """Call of a cloud's API. ``permission`` is the required right if it differs from the action's name."""

    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    permission: str = ""

    def __str__(self) -> str:
        return " ".join([self.action, *(f"{name}={value}" for name, value in self.parameters.items())])


class Health(Enum):
    """State of a route in a cloud's table."""

    ACTIVE = "active"
    #: The cloud is still creating it.
    PENDING = "pending"
    #: It carries no packets: its next hop is gone or switched off.
    DEAD = "dead"


class CloudTableEntry(Struct, frozen=True, gc=False):
    """Route in a cloud's table, as the cloud describes it.

    ``hop`` is the next hop as the cloud names it, ``name`` the route's own name or number if it has one.
    """

    table: str
    destination: IPv4Network
    hop: str
    health: Health = Health.ACTIVE
    name: str = ""


class CloudNode(Struct, frozen=True, gc=False):
    """This node, as the cloud describes it.

    ``hop`` is the next hop that leads to it. ``forwards`` is True if packets of other addresses than its
    own may pass. ``scope`` is the VPC or network.
    """

    tables: tuple[str, ...]
    hop: str
    instance: str
    scope: str = ""
    forwards: bool = True


class Cloud(Protocol):
    """Client of one cloud's API. Each method except the pure ones blocks, and raises ``CloudError``.

    The methods about forwarding are for clouds with such a setting.
    """

    #: True if the cloud by default drops packets of other addresses than an instance's own.
    filters_addresses: bool = False

    def place(self, address: IPv4Address) -> CloudNode:
        """Find this node by an address of its uplink."""
        ...

    def entries(self, place: CloudNode) -> list[CloudTableEntry]:
        """Return all IPv4 routes in the node's tables, from all pages."""
        ...

    def gone(self, place: CloudNode, entries: Sequence[CloudTableEntry]) -> list[CloudTableEntry]:
        """Return the ``entries`` whose next hop no longer exists."""
        ...

    def ask(self, call: ApiCall) -> Mapping[str, Any]:
        """Make a call to its end and return the answer."""
        ...

    def put_calls(
        self, place: CloudNode, entry: CloudTableEntry, was: CloudTableEntry | None
    ) -> list[ApiCall]:
        """Return the calls that make a route, or replace ``was`` by it (pure)."""
        ...

    def drop_calls(self, entry: CloudTableEntry) -> list[ApiCall]:
        """Return the calls that remove a route (pure)."""
        ...

    def forwarding_calls(self, place: CloudNode) -> list[ApiCall]:
        """Return the calls that allow packets of other addresses; none if only an operator can (pure)."""
        del place
        return []

    def forwarding_remedy(self, place: CloudNode) -> str:
        """Return the operator's remedy if the daemon cannot change the setting (pure)."""
        del place
        return ""


class CloudTerms(Struct, frozen=True):
    """Terms of one cloud for messages, and meanings of its error codes."""

    cloud: str
    #: Kinds of errors by the code or its prefix.
    codes: Mapping[str, ErrorKind]
    credentials: str
    quota: str
    #: Format of a permission's name: ``ec2:{}``.
    permission: str
    table_option: str = ""

    def error(self, call: ApiCall, code: str) -> CloudError:
        """Return the error for a code. The cloud's own message is left out: it may contain signed text."""
        trouble = self._trouble(code)
        right = call.permission or self.permission.format(call.action)
        match trouble:
            case ErrorKind.THROTTLED:
                return CloudError(
                    trouble, f"{self.cloud} throttles {call.action} ({code})", "it is asked less often now"
                )
            case ErrorKind.DENIED:
                remedy = f"allow {right} to the role or key that flanneld uses"
                return CloudError(trouble, f"{self.cloud} denies {right} ({code})", remedy)
            case ErrorKind.CREDENTIALS:
                problem = f"{self.cloud} does not accept the credentials for {call.action} ({code})"
                return CloudError(trouble, problem, self.credentials)
            case ErrorKind.FULL:
                return CloudError(trouble, f"the route table of {self.cloud} is full ({code})", self.quota)
            case ErrorKind.NO_TABLE:
                named = f"Backend.{self.table_option}" if self.table_option else "the network"
                problem = f"{self.cloud} knows no such route table ({code})"
                return CloudError(trouble, problem, f"correct {named}; it must be one of this node's region")
            case ErrorKind.BUSY:
                problem = f"{self.cloud} is still busy with an earlier change ({code})"
                return CloudError(trouble, problem, "it is tried again")
        return CloudError(
            trouble,
            f"{self.cloud} answers {call.action} with {code}",
            "look the code up in its documentation",
        )

    def no_answer(self, call: ApiCall, reason: str) -> CloudError:
        """Return the error for a call without an answer."""
        return CloudError(
            ErrorKind.OTHER,
            f"{self.cloud} does not answer {call.action}: {reason}",
            "see whether this node reaches its API, directly or by HTTPS_PROXY",
        )

    def _trouble(self, code: str) -> ErrorKind:
        known = self.codes.get(code)
        if known is not None:
            return known
        return next(
            (trouble for start, trouble in self.codes.items() if code.startswith(f"{start}.")),
            ErrorKind.OTHER,
        )


def check_scope(table: str, scope: str, place: CloudNode, option: str) -> None:
    """Raise ``CloudError`` for a table of another VPC than this node's."""
    if scope != place.scope:
        problem = f"{table} is a table of {scope}, this node is in {place.scope}"
        raise CloudError(ErrorKind.NO_TABLE, problem, f"correct Backend.{option}")


def missing_extra(cloud: str, package: str) -> Fatal:
    """Return the error for a cloud whose SDK is not installed."""
    return Fatal(f"the backend for {cloud} needs the package {package}", install_command(cloud))


class CloudRoute(Struct, frozen=True, gc=False):
    """Route in a cloud's table. ``table`` is empty for the table of the node's own subnet.

    ``via`` is this node's address, or the cloud's name of another next hop.
    """

    kind: ClassVar[Kind] = Kind.REMOTE
    destination: IPv4Network
    via: str
    table: str = ""

    @property
    def key(self) -> Key:
        return (ROUTES, self.table, str(self.destination))

    def __str__(self) -> str:
        where = f"in {self.table}" if self.table else "in this node's table"
        return f"cloud route {self.destination} via {self.via} {where}"


class Forwarding(Struct, frozen=True, gc=False):
    """Permission of a cloud for this node to send and receive packets of containers."""

    kind: ClassVar[Kind] = Kind.REMOTE
    address: IPv4Address
    allowed: bool = True

    @property
    def key(self) -> Key:
        return (FORWARDING, "allowed")

    def __str__(self) -> str:
        return f"permission to forward at {self.address}" + ("" if self.allowed else ", which is not given")


# ---- options in ``Backend`` that several clouds share --------------------------------------------

_REMEDY = "correct Backend in the network config"
#: Option that replaces the URL of a cloud's API: for private endpoints.
ENDPOINT = "Endpoint"
#: Option that replaces the URL of a metadata service: for private editions of a cloud.
METADATA = "MetadataEndpoint"
#: Options with an access key. Their fields are the variables that replace them, both as in upstream.
ACCESS_KEY = (Option("AccessKeyID", "ACCESS_KEY_ID", ""), Option("AccessKeySecret", "ACCESS_KEY_SECRET", ""))


def table_option(name: str) -> Option:
    """Return an option that names tables: one, several or none. Its errors are upstream's."""

    def made(value: Any) -> tuple[str, ...]:
        if isinstance(value, str | None):
            return (value,) if value else ()
        if not isinstance(value, list):
            raise Fatal(f"Unexpected {name} type. Must be string or array of strings", _REMEDY)
        if not all(isinstance(each, str) and each for each in value):
            raise Fatal(f"Unexpected type in {name} slice. Must be strings", _REMEDY)
        return tuple(dict.fromkeys(value))

    return Option(name, "tables", (), made=made)


def access_keys(options: Fields, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return id and secret of an access key; None if the SDK must find credentials.

    As in upstream, both come from the environment if one of the options is empty.
    """
    given = [each.of(options) for each in ACCESS_KEY]
    if not all(given):
        given = [environ.get(each.field, "") for each in ACCESS_KEY]
    return (given[0], given[1]) if all(given) else None


def url_option(name: str) -> Option:
    """Return an option that replaces the URL of a server; empty if it does not."""

    def made(url: str) -> str:
        try:
            parts = urlsplit(url)
            is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
        except ValueError:
            is_fine = False
        if url and not is_fine:
            remedy = f"{_REMEDY}: https://HOST or https://HOST:PORT"
            raise Fatal(f"Backend.{name} is no URL of a server", remedy)
        return url

    return Option(name, name, "", made=made)


def endpoint(options: Fields, name: str = ENDPOINT) -> str:
    """Return such a URL, or an empty text, for a cloud that declares no options. Raises ``Fatal``."""
    return str(url_option(name).of(options))


TABLES = table_option("RouteTableID")
API, METADATA_API, INSTANCE_API = map(url_option, (ENDPOINT, METADATA, "InstanceEndpoint"))
