"""Reconciliation loop for one group of tables.

    desired state -> read each table -> difference -> put, then drop -> report -> log, retry, conditions

``step`` does all of it and never waits: a thread can drive it, or a simulator on a clock of its own.
A table is read at its first step, after news of a change or a refusal, and in its audit period.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from flanneld.compat.glog import Once
from flanneld.errors import Retryable
from flanneld.reconcile.contest_backoff import ContestBackoff
from flanneld.state.diff import difference
from flanneld.state.report import Failure, Report
from flanneld.state.resources import Key, Resource, State
from flanneld.state.table import Notifies, Polled, Scope, Table

log = logging.getLogger(__name__)

#: Seconds in which a burst of notifications may end before a table is read.
_SETTLE = 0.005
#: Seconds before a refused change is tried again: the first time, and at most.
_FIRST_RETRY, _LAST_RETRY = 1.0, 30.0
#: Lines about single resources that are worth reading at a time.
_FEW = 10


class TableState(Struct, frozen=True, gc=False):
    """Status of one table. ``failed`` are refusals, ``problem`` is why it cannot be read."""

    name: str
    #: Whether it has held all that is wanted since its last change.
    settled: bool
    contested: bool
    failed: tuple[Failure, ...]
    problem: str
    #: Repairs by the programs whose changes they undid, "unknown" if the kernel does not name them.
    repairs: Mapping[str, int]


class _Upkeep:
    """Timing and history of one table."""

    def __init__(self, table: Table, wanted: State) -> None:
        self.table = table
        self.wanted = wanted
        self.due = 0.0
        self.not_before = 0.0
        self.retry_delay = _FIRST_RETRY
        self.contest = ContestBackoff()
        self.origins: set[str] = set()
        #: Whether something has been made or found right: from then on a change is a repair.
        self.was_right = False
        self.settled = False
        self.failed: tuple[Failure, ...] = ()
        self.problem = ""
        self.repairs: dict[str, int] = {}

    def wakeup(self) -> float:
        """Return the time of the next read, never before a retry or the pause of a contest allows it."""
        return max(self.due, self.not_before, self.contest.earliest())


class Reconciler:
    """Keeps tables as the desired state has them. ``wanted`` is that state by the table's name."""

    def __init__(
        self, tables: Sequence[Table], wanted: Mapping[str, State], is_stopping: Callable[[], bool]
    ) -> None:
        self._is_stopping = is_stopping
        self._all = {table.name: _Upkeep(table, wanted.get(table.name, {})) for table in tables}
        self._once = Once()

    def states(self) -> list[TableState]:
        """Return what is known of each table. From any thread."""
        return [
            TableState(
                name,
                each.settled,
                each.contest.is_tried(),
                each.failed,
                each.problem,
                each.repairs.copy(),
            )
            for name, each in self._all.items()
        ]

    def sources(self) -> list[int]:
        """Return the file descriptors that become readable when a table has news."""
        tables = (each.table for each in self._all.values())
        return [fd for table in tables if isinstance(table, Notifies) and (fd := table.fileno()) >= 0]

    def step(self, now: float) -> float:
        """Hear, read and repair what is due; return when to step again."""
        for each in self._all.values():
            self._hear(each, now)
        due = [each for each in self._all.values() if each.wakeup() <= now]
        drops = [(each, self._put_right(each, now)) for each in due if self._may_begin(each)]
        for each, stale in reversed(drops):
            if stale:
                self._drop(each, stale, now)
        return min(map(self._next_wakeup, self._all.values()), default=math.inf)

    def close(self, *, remove: bool) -> None:
        """Close every table, also after one that fails to close."""
        for each in self._all.values():
            try:
                each.table.close(remove=remove)
            except (OSError, Retryable) as failure:
                log.warning("Cannot close %s: %s", each.table.name, failure)

    # ---- when ------------------------------------------------------------------------------------

    def _hear(self, each: _Upkeep, now: float) -> None:
        table = each.table
        heard = list(table.changes()) if isinstance(table, Notifies) else []
        if heard:
            each.origins.update(change.by for change in heard if change.by)
            each.settled = False
            each.due = min(each.due, now + _SETTLE)
        if isinstance(table, Polled) and table.next_look <= now and table.look():
            each.due = min(each.due, now)

    def _may_begin(self, each: _Upkeep) -> bool:
        return all(self._all[name].was_right for name in each.table.needs)

    def _next_wakeup(self, each: _Upkeep) -> float:
        look = each.table.next_look if isinstance(each.table, Polled) else math.inf
        return min(each.wakeup() if self._may_begin(each) else math.inf, look)

    # ---- read, compare, put, drop ------------------------------------------------------------------

    def _put_right(self, each: _Upkeep, now: float) -> list[Resource]:
        """Make what is missing; return what has to go."""
        each.due = math.inf if each.table.audit is None else now + each.table.audit
        origins, each.origins = each.origins, set()
        try:
            puts, stale = difference(each.wanted, each.table.read(Scope(each.wanted)))
            report = each.table.put(puts) if puts else Report()
        except (OSError, Retryable) as failure:
            self._could_not(each, str(failure), now)
            return []
        self._account(each, report, origins, now)
        return stale

    def _drop(self, each: _Upkeep, stale: Sequence[Resource], now: float) -> None:
        try:
            report = each.table.drop(stale)
        except (OSError, Retryable) as failure:
            self._could_not(each, str(failure), now)
            return
        _tell("Removed", report.removed, report.details, "")
        self._retry(each, report.failed, now)

    # ---- afterwards --------------------------------------------------------------------------------

    def _could_not(self, each: _Upkeep, problem: str, now: float) -> None:
        each.problem, each.settled = problem, False
        self._say_not_in_place(each, problem)
        self._retry_later(each, now)

    def _account(self, each: _Upkeep, report: Report, origins: set[str], now: float) -> None:
        by = ", ".join(sorted(origins))
        if report.made and (each.was_right or report.pending):
            each.repairs[by or "unknown"] = each.repairs.get(by or "unknown", 0) + 1
            _tell("Restored", report.made, report.details, f" after a change by {by}" if by else "")
            if each.contest.spend():
                log.warning(
                    "Another program keeps changing %s: waiting longer before each repair; find out which "
                    "one it is, and stop it or exclude there what is flannel's",
                    each.table.what,
                )
        elif report.made:
            _tell("Made", report.made, report.details, "")
        self._retry(each, report.failed, now)
        if report.failed:
            return
        each.problem = ""
        each.was_right = True
        each.settled = not report.pending
        if report.pending:
            each.due = now

    def _retry(self, each: _Upkeep, failed: Sequence[Failure], now: float) -> None:
        each.failed = tuple(failed)
        if failed:
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            self._say_not_in_place(each, f"{failed[0]}{more}")
            each.settled = False
            self._retry_later(each, now)
            return
        each.retry_delay = _FIRST_RETRY
        if self._once.clear(each.table.name):
            log.info("%s are in place", _sentence(each.table.what))

    def _say_not_in_place(self, each: _Upkeep, problem: str) -> None:
        if not self._is_stopping():  # a command that is cut off then is no problem
            self._once.warn(log, each.table.name, f"{_sentence(each.table.what)} are not in place: {problem}")

    def _retry_later(self, each: _Upkeep, now: float) -> None:
        each.not_before = now + each.retry_delay
        each.due = min(each.due, each.not_before)
        each.retry_delay = min(2 * each.retry_delay, _LAST_RETRY)


def _tell(deed: str, resources: Sequence[Resource], details: Mapping[Key, str], by: str) -> None:
    level = logging.WARNING if deed == "Restored" else logging.INFO
    for resource in resources[:_FEW]:
        detail = details.get(resource.key, "")
        log.log(level, "%s %s%s%s", deed, resource, by, f": {detail}" if detail else "")
    if len(resources) > _FEW:
        log.log(level, "%s %d more%s", deed, len(resources) - _FEW, by)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def wanted_by_table(pairs: Iterable[tuple[str, Resource]]) -> dict[str, dict[Key, Resource]]:
    """Return the desired state by table and key, out of pairs of a table's name and a resource."""
    state: dict[str, dict[Key, Resource]] = {}
    for name, resource in pairs:
        state.setdefault(name, {})[resource.key] = resource
    return state
