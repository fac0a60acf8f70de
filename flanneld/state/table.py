"""Contract of a table: one place that holds resources, maintained by the reconciler.

The kernel's links, a family's firewall rules, the peers of a proxy, a cloud's routes: each is a table. The
reconciler reads it, compares what it holds with the desired state, and has it apply the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct, field

from flanneld.model import IPNetwork
from flanneld.state.resources import Key, Resource


class Failure(Struct, frozen=True, gc=False):
    """A refused resource with the reason, and a remedy if one is known.

    ``is_taken`` means that another object may have the key; an audit will find it.
    """

    resource: Resource
    reason: str
    remedy: str = ""
    is_taken: bool = False
    #: Number of the system's error; 0 if it is none.
    errno: int = 0

    def __str__(self) -> str:
        return f"{self.resource}: {self.reason}"


class Report(Struct, gc=False):
    """Resources created, removed and refused by one change.

    ``pending`` were created but must be read again at once: they were changed back, or are not visible yet.
    ``details`` describe repairs by key.
    """

    made: list[Resource] = field(default_factory=list)
    removed: list[Resource] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    pending: list[Resource] = field(default_factory=list)
    details: dict[Key, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.made or self.removed or self.failed)

    def add(self, other: Report) -> None:
        self.made += other.made
        self.removed += other.removed
        self.failed += other.failed
        self.pending += other.pending
        self.details |= other.details


class Claim(Enum):
    """Owner of a resource in a table."""

    OURS = "ours"
    #: Created by an earlier run of a flanneld.
    LEFT = "left"
    FOREIGN = "foreign"


class Seen(Struct, frozen=True, gc=False):
    """A resource in a table."""

    resource: Resource
    claim: Claim = Claim.OURS


class Put(Struct, frozen=True, gc=False):
    """A resource to create. ``was`` is the present one with its key, or None.

    Without a ``claim``, ``was`` has not been read: it is the previously desired one.
    """

    want: Resource
    was: Resource | None = None
    claim: Claim | None = None


class Scope(Struct, frozen=True, gc=False):
    """The desired state of one table, by key.

    With ``adopt`` the table claims an earlier run's resources.
    """

    desired: Mapping[Key, Resource]
    adopt: bool = False


class Table(Protocol):
    """One place that holds resources. Used by one thread.

    A table of another package need not be a subclass: it then has no defaults.
    """

    #: The table's name in logs, metrics and status; unique within the daemon.
    name: str
    #: The operator's term for the resources, in the plural: "the rules for IPv4".
    what: str
    #: Name of the thread that maintains it. Traffic depends on "kernel": nothing there may block.
    worker: str = "kernel"
    #: True if the daemon only becomes ready once these resources exist.
    vital: bool = True
    #: Names of tables, of any worker, that converge before the first put here.
    needs: frozenset[str] = frozenset()

    @property
    def audit(self) -> float | None:
        """Seconds between two reads without notifications; None to read only at the start."""
        return None

    def read(self, scope: Scope) -> Iterable[Seen]:
        """Return the contents. Raises ``OSError`` or ``Retryable`` rather than an incomplete result.

        ``put`` and ``drop`` may be called between two items, if there are hundreds. ``InterruptedError``
        says that the table changed meanwhile: it is read again.
        """
        ...

    def put(self, puts: Sequence[Put]) -> Report:
        """Create resources. Refusals are part of the report. Raises ``OSError`` or ``Retryable``."""
        ...

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove resources. They may already be gone."""
        ...

    def close(self, *, remove: bool) -> None:
        """Release sockets and processes; with ``remove`` undo what must not outlive the daemon.

        By default nothing is open, and the resources stay: traffic goes on without the daemon.
        """
        del remove


class Changes(Struct, frozen=True, gc=False):
    """Notification that another program changed a table.

    ``by`` names it, ``key`` says what it changed; empty and None if that is not known.
    """

    by: str = ""
    key: Key | None = None


@runtime_checkable
class Notifies(Protocol):
    """Optional part of a table: notifications of changes that other programs make."""

    def fileno(self) -> int:
        """Return the file descriptor to poll for changes; -1 if there is none."""
        ...

    def changes(self) -> Iterable[Changes]:
        """Return the changes since the last call, without blocking."""
        ...


@runtime_checkable
class Explains(Protocol):
    """Optional part of a table: the calls behind a change, for a dry run."""

    def explain(self, put: Put, /) -> str:
        """Return the calls that ``put`` would make, after a reading. Raises ``OSError`` or ``Retryable``."""
        ...


@runtime_checkable
class Polled(Protocol):
    """Optional part of a table: a periodic check that its resources still work."""

    @property
    def next_look(self) -> float:
        """Time of the next check, in seconds on ``clock.now``."""
        ...

    def look(self) -> bool:
        """Return True if the table must be read and repaired now. Never blocks."""
        ...


#: Seconds between two looks.
LOOK_PERIOD = 1.0


class LastingTable(Table):
    """Table that is looked at each second of the clock ``now``, and whose resources stay unless replaced."""

    worker = "host"

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._looked = now()

    def has_changed(self) -> bool:
        """Return True if another program has changed something since the last reading or write."""
        raise NotImplementedError

    @property
    def next_look(self) -> float:
        """Time of the next look, in seconds on ``clock.now``."""
        return self._looked + LOOK_PERIOD

    def look(self) -> bool:
        """Return True if the table has to be read and repaired now."""
        self._looked = self._now()
        return self.has_changed()

    def drop(self, found: Sequence[Resource]) -> Report:
        """Leave the resources: containers talk, and may be started, without a daemon."""
        del found
        return Report()


#: Subnets that one sentence names.
_NAMED = 5


class TunnelSession(Struct, frozen=True, gc=False):
    """Session with the node of one peer subnet.

    ``handshake`` is when the keys were last agreed on, in seconds since 1970, None for never. ``is_silent``
    says that packets are sent there and no session comes of it.
    """

    subnet: IPNetwork
    is_established: bool
    handshake: float | None = None
    rx_bytes: int = 0
    tx_bytes: int = 0
    #: Address and port where the peer is called now; empty if that is not known.
    endpoint: str = ""
    is_silent: bool = False
    #: True if UDP carries the packets of an IPsec SA, as behind NAT.
    is_encapsulated: bool = False
    #: Reason why the last negotiation failed, with the remedy; empty if none is known.
    problem: str = ""
    protocol: Literal["wireguard", "ipsec"] = "wireguard"

    @property
    def state(self) -> str:
        """Return one word for metrics and people."""
        return "established" if self.is_established else "silent" if self.is_silent else "idle"


class Bypass(Struct, frozen=True, gc=False):
    """Another program's object by which packets may leave unencrypted, and the command that removes it."""

    what: str
    removal: str


@runtime_checkable
class FindsBypasses(Protocol):
    """Optional part of a table: it notices objects that let packets pass unencrypted."""

    def bypasses(self) -> tuple[Bypass, ...]:
        """Return those of the last read. From any thread."""
        ...


@runtime_checkable
class HasSessions(Protocol):
    """Optional part of a table: its resources carry encrypted sessions."""

    def sessions(self) -> tuple[TunnelSession, ...]:
        """Return the sessions as last read. From any thread."""
        ...


def silence(sessions: Iterable[TunnelSession]) -> str:
    """Name the subnets whose peers do not answer; empty if all do."""
    silent = sorted(str(each.subnet) for each in sessions if each.is_silent)
    if not silent:
        return ""
    more = f", and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    return f"no handshake with the nodes of {', '.join(silent[:_NAMED])}{more}, though packets are sent there"
