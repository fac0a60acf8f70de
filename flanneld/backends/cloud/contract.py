"""Contract between the route table of a cloud and the file that knows its API (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Protocol

from msgspec import Struct, field

from flanneld.errors import Fatal, Retryable


class Trouble(Enum):
    """Kind of an error, for which each cloud has its own codes."""

    THROTTLED = "throttled"
    DENIED = "denied"
    CREDENTIALS = "credentials"
    FULL = "full"
    NO_TABLE = "no table"
    #: What was to be removed or replaced is not there.
    ABSENT = "absent"
    #: What was to be made is there already.
    EXISTS = "exists"
    #: The cloud has not ended what it was told before.
    BUSY = "busy"
    OTHER = "other"


class CloudError(Retryable):
    """A cloud refused a call, or gave no answer."""

    def __init__(self, trouble: Trouble, problem: str, remedy: str = "") -> None:
        super().__init__(problem, remedy)
        self.trouble = trouble


class Call(Struct, frozen=True, eq=False):
    """A call of a cloud's API. ``permission`` is the right that it takes, if it is not the action itself."""

    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    permission: str = ""

    def __str__(self) -> str:
        return " ".join([self.action, *(f"{name}={value}" for name, value in self.parameters.items())])


class Health(Enum):
    """State of a route in a cloud's table."""

    ACTIVE = "active"
    #: The cloud is still about to make it.
    PENDING = "pending"
    #: It leads nowhere: its next hop is gone, or it is switched off.
    DEAD = "dead"


class Entry(Struct, frozen=True, gc=False):
    """A route in a cloud's table.

    ``hop`` is the next hop as the cloud names it, ``name`` the route's own name or number if it has one.
    """

    table: str
    destination: IPv4Network
    hop: str
    health: Health = Health.ACTIVE
    name: str = ""


class Place(Struct, frozen=True, gc=False):
    """This node as the cloud knows it.

    ``hop`` is the next hop that leads to it. ``forwards`` says whether packets of other addresses than its
    own may pass. ``scope`` is the VPC or network.
    """

    tables: tuple[str, ...]
    hop: str
    instance: str
    scope: str = ""
    forwards: bool = True


class Cloud(Protocol):
    """One cloud's API. Each method but the pure ones blocks, and raises ``CloudError``.

    Those about forwarding are for clouds that have such a setting.
    """

    #: Whether it drops packets of other addresses than an instance's own, unless it is told not to.
    filters_addresses: bool = False

    def place(self, address: IPv4Address) -> Place:
        """Find this node by an address of its uplink."""
        ...

    def entries(self, place: Place) -> list[Entry]:
        """Return all IPv4 routes of the node's tables, from all pages."""
        ...

    def gone(self, place: Place, entries: Sequence[Entry]) -> list[Entry]:
        """Return those of ``entries`` whose next hop does not exist any more."""
        ...

    def ask(self, call: Call) -> Mapping[str, Any]:
        """Make a call to its end and return the answer."""
        ...

    def put_calls(self, place: Place, entry: Entry, was: Entry | None) -> list[Call]:
        """Return the calls that make a route, or put it in place of ``was`` (pure)."""
        ...

    def drop_calls(self, entry: Entry) -> list[Call]:
        """Return the calls that remove a route (pure)."""
        ...

    def forwarding_calls(self, place: Place) -> list[Call]:
        """Return the calls that let packets of other addresses pass; none if only people can (pure)."""
        del place
        return []

    def forwarding_remedy(self, place: Place) -> str:
        """Return what an operator does if the daemon cannot change that (pure)."""
        del place
        return ""


class Words(Struct, frozen=True):
    """Terms of one cloud for messages, and the meaning of its error codes."""

    cloud: str
    #: By error code, or by what it begins with.
    codes: Mapping[str, Trouble]
    credentials: str
    quota: str
    #: The name of a right: ``ec2:{}``.
    permission: str
    table_option: str = ""

    def error(self, call: Call, code: str) -> CloudError:
        """Return the error for a code. A cloud's own message may hold what was signed: it is left out."""
        trouble = self._trouble(code)
        right = call.permission or self.permission.format(call.action)
        match trouble:
            case Trouble.THROTTLED:
                return CloudError(
                    trouble, f"{self.cloud} throttles {call.action} ({code})", "it is asked less often now"
                )
            case Trouble.DENIED:
                remedy = f"allow {right} to the role or key that flanneld uses"
                return CloudError(trouble, f"{self.cloud} denies {right} ({code})", remedy)
            case Trouble.CREDENTIALS:
                problem = f"{self.cloud} does not accept the credentials for {call.action} ({code})"
                return CloudError(trouble, problem, self.credentials)
            case Trouble.FULL:
                return CloudError(trouble, f"the route table of {self.cloud} is full ({code})", self.quota)
            case Trouble.NO_TABLE:
                named = f"Backend.{self.table_option}" if self.table_option else "the network"
                problem = f"{self.cloud} knows no such route table ({code})"
                return CloudError(trouble, problem, f"correct {named}; it must be one of this node's region")
            case Trouble.BUSY:
                problem = f"{self.cloud} is still busy with an earlier change ({code})"
                return CloudError(trouble, problem, "it is tried again")
        return CloudError(
            trouble,
            f"{self.cloud} answers {call.action} with {code}",
            "look the code up in its documentation",
        )

    def no_answer(self, call: Call, reason: str) -> CloudError:
        """Return the error for a call without an answer."""
        return CloudError(
            Trouble.OTHER,
            f"{self.cloud} does not answer {call.action}: {reason}",
            "see whether this node reaches its API, directly or by HTTPS_PROXY",
        )

    def _trouble(self, code: str) -> Trouble:
        known = self.codes.get(code)
        if known is not None:
            return known
        return next(
            (trouble for start, trouble in self.codes.items() if code.startswith(f"{start}.")), Trouble.OTHER
        )


def check_scope(table: str, scope: str, place: Place, option: str) -> None:
    """Raises ``CloudError`` for a table of another VPC than this node's."""
    if scope != place.scope:
        problem = f"{table} is a table of {scope}, this node is in {place.scope}"
        raise CloudError(Trouble.NO_TABLE, problem, f"correct Backend.{option}")


def missing_extra(cloud: str, package: str) -> Fatal:
    """Return the error for a cloud whose SDK is not installed."""
    return Fatal(
        f"the backend for {cloud} needs the package {package}", f"install it: pip install 'flanneld[{cloud}]'"
    )
