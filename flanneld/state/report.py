"""Outcome of a change to a table (pure)."""

from __future__ import annotations

from msgspec import Struct, field

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
