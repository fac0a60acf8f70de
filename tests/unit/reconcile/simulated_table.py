"""A table in memory, with others who change it, and failures to order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from msgspec import Struct

from flanneld.errors import Retryable
from flanneld.state.resources import Key, Kind, Resource
from flanneld.state.table import Changes, Claim, Failure, Put, Report, Scope, Seen


class Thing(Struct, frozen=True, gc=False):
    """A resource with a property that may drift."""

    kind: ClassVar[Kind] = Kind.REMOTE
    name: str
    value: int = 0
    table: str = "things"

    @property
    def key(self) -> Key:
        return (self.table, self.name)

    def __str__(self) -> str:
        return f"thing {self.name}={self.value}"


class SimulatedTable:
    """Holds resources with their claims. ``writes`` counts puts and drops of single resources."""

    def __init__(
        self, name: str = "things", *, audit: float | None = 30.0, needs: frozenset[str] = frozenset()
    ) -> None:
        self.name = name
        self.worker = "kernel"
        self.vital = False
        self.what = f"the {name}"
        self.needs = needs
        self.audit = audit
        self.held: dict[Key, Seen] = {}
        self.reads = 0
        self.writes: list[Resource] = []
        self.put_given: list[Put] = []
        self.closed: list[bool] = []
        #: What the next calls meet.
        self.unreadable = ""
        self.refused: set[Key] = set()
        self.undone_at_once = False
        self.taken: set[Key] = set()
        self.descriptor = -1
        self.broken: Exception | None = None
        #: The resource at which a write ends without a report.
        self.deaf: Resource | None = None
        #: Reads that the table interrupts at their end.
        self.interruptions = 0
        #: A journal of all tables that are given the same list.
        self.journal: list[str] = []
        self._news: list[Changes] = []

    # ---- what others do ------------------------------------------------------------------------

    def change(
        self, resource: Resource | None, key: Key, *, by: str = "somebody", is_named: bool = False
    ) -> None:
        """Put or remove a resource behind the daemon's back, and tell of it; perhaps of which one."""
        if resource is None:
            self.held.pop(key, None)
        else:
            self.held[key] = Seen(resource)
        self._news.append(Changes(by, key if is_named else None))

    def hold(self, resource: Resource, claim: Claim) -> None:
        self.held[resource.key] = Seen(resource, claim)

    # ---- Table ---------------------------------------------------------------------------------

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        self.reads += 1
        if self.broken:
            raise self.broken
        if self.unreadable:
            raise Retryable(self.unreadable)
        yield from list(self.held.values())
        if self.interruptions:
            self.interruptions -= 1
            raise InterruptedError("the table changed")

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            if put.want == self.deaf:
                raise OSError("cannot write")
            self.put_given.append(put)
            self.journal.append(f"put {self.name}")
            if put.want.key in self.taken:
                report.failed.append(Failure(put.want, "taken", is_taken=True))
                continue
            if put.want.key in self.refused:
                report.failed.append(Failure(put.want, "refused"))
                continue
            self.held[put.want.key] = Seen(put.want)
            self.writes.append(put.want)
            report.made.append(put.want)
            if self.undone_at_once:
                del self.held[put.want.key]
                report.pending.append(put.want)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        for each in found:
            self.journal.append(f"drop {self.name}")
            del self.held[each.key]
            self.writes.append(each)
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        self.closed.append(remove)

    def fileno(self) -> int:
        return self.descriptor

    def changes(self) -> list[Changes]:
        news, self._news = self._news, []
        return news
