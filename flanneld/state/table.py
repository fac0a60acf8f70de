"""Contract of a table: one place that holds resources, maintained by the reconciler (pure).

The kernel's links, a family's firewall rules, the peers of a proxy, a cloud's routes: each is a table. The
reconciler reads it, compares what it holds with the desired state, and has it apply the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

from msgspec import Struct

from flanneld.state.report import Report
from flanneld.state.resources import Key, Resource


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
    """One place that holds resources. Used by one thread."""

    @property
    def name(self) -> str:
        """The table's name in logs, metrics and status; unique within the daemon."""
        ...

    @property
    def what(self) -> str:
        """The operator's term for the resources, in the plural: "the rules for IPv4"."""
        ...

    @property
    def worker(self) -> str:
        """Name of the thread that maintains it. Traffic depends on "kernel": nothing there may block."""
        ...

    @property
    def vital(self) -> bool:
        """True if the daemon only becomes ready once these resources exist."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Names of tables, of any worker, that converge before the first put here."""
        ...

    @property
    def audit(self) -> float | None:
        """Seconds between two reads without notifications; None to read only at the start."""
        ...

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
        """Release sockets and processes; with ``remove`` undo what must not outlive the daemon."""
        ...


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
