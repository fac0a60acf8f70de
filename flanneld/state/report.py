"""Outcome of a change to a table (pure)."""

from __future__ import annotations

from msgspec import Struct, field

from flanneld.state.resources import Key, Resource


class Failure(Struct, frozen=True, gc=False):
    """A refused resource with the reason, and a remedy if one is known.

    ``is_taken`` says that something may stand there already; what that is, an audit finds out.
    """

    resource: Resource
    reason: str
    remedy: str = ""
    is_taken: bool = False

    def __str__(self) -> str:
        return f"{self.resource}: {self.reason}"


class Report(Struct, gc=False):
    """Resources made, removed and refused by one change.

    ``pending`` was made, and has to be looked at again at once: it was changed back, or is not visible yet.
    ``details`` say, by key, what a repair consisted of.
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
