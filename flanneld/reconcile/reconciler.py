"""Reconciliation loop for one group of tables.

    desired state -> read each table -> difference -> put, then drop -> report -> log, retry, conditions

``step`` does all of it and never waits: a thread can drive it, or a simulator on a clock of its own.
A table is read at its first step, after a notification or a refusal, and once per audit period. ``change``
writes the objects of one lease's event without a read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from flanneld.compat.glog import counted
from flanneld.errors import Retryable, cause_of
from flanneld.reconcile.counters import Work
from flanneld.reconcile.upkeep import FIRST_RETRY, ContestBackoff, TableState, Upkeep
from flanneld.runtime import clock
from flanneld.runtime.logs import Once
from flanneld.state.desired import Delta, Difference, compare, difference, finish
from flanneld.state.permits import Permits
from flanneld.state.resources import LINKS, Key, Resource, State
from flanneld.state.table import Failure, Report, Scope, Table

log = logging.getLogger(__name__)

#: Seconds to wait for the end of a burst of notifications before a read.
SETTLE = 0.005
#: Seconds before a refused change is tried again, at most.
_LAST_RETRY = 30.0
#: Pause after a read, as a multiple of the CPU time that it cost.
REST = 10
#: Reads in one go of a table that changed during one, before the last.
_TRIES = 3
#: Log lines about single resources, at most.
_FEW = 10
#: Changed objects with a remembered origin, at most, until their repair.
_MAX_ORIGINS = 1000


class Reconciler:
    """Reconciler of a group of tables. ``desired`` is the desired state by the table's name.

    The maps in it may change; a read uses their contents at that time. With ``adopt`` tables take over
    objects of an earlier run. ``contest`` makes the backoff for each table's contested repairs. ``after``
    gets the report of each pass over the tables. Names of tables that have converged once are added to
    ``converged``, which reconcilers of other threads may share.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        desired: Mapping[str, State],
        is_stopping: Callable[[], bool],
        *,
        permits: Permits | None = None,
        contest: Callable[[], ContestBackoff] = ContestBackoff,
        after: Callable[[Report], None] = lambda _: None,
        converged: set[str] | None = None,
    ) -> None:
        self.adopt = False
        self.work = Work()
        self._is_stopping = is_stopping
        self._all = {table.name: Upkeep(table, desired.get(table.name, {}), contest()) for table in tables}
        self._permits = permits or Permits()
        self._after = after
        self._converged = set[str]() if converged is None else converged
        self._origins: dict[Key, str] = {}
        #: The current pass over the tables, which may take several steps.
        self._passing: Generator[None, None, Report] | None = None
        self._once = Once()

    def states(self) -> list[TableState]:
        """Return the status of each table. May be called from any thread."""
        return [
            TableState(
                name,
                each.table.what,
                each.table.worker,
                each.table.vital,
                each.settled,
                each.contest.is_tried(),
                each.failed,
                each.problem,
                each.repairs.copy(),
            )
            for name, each in self._all.items()
        ]

    def sources(self) -> list[int]:
        """Return the file descriptors that become readable on a table's notification."""
        tables = (each.notifies for each in self._all.values())
        return [fd for table in tables if table is not None and (fd := table.fileno()) >= 0]

    def step(self, now: float) -> float:
        """Take in notifications, then read and repair the due tables. Return the time of the next step.

        The pass over large tables takes several steps, so that events need not wait for its end.
        """
        for each in self._all.values():
            self._hear(each, now)
        if self._passing is None:
            due = {name for name, each in self._all.items() if each.wakeup() <= now}
            if any(self._may_begin(self._all[name]) for name in due):
                self._passing = self._pass(due, now, is_start=False)
        if self._passing is not None:
            if next(self._passing, self) is not self:
                return now
            self._passing = None
        return min(map(self._next_wakeup, self._all.values()), default=math.inf)

    def converge(self, now: float) -> Report:
        """Read and correct all tables now. The desired state is new, so this counts as no repair."""
        self._passing = None
        return finish(self._pass(set(self._all), now, is_start=True))

    def change(self, delta: Delta, now: float) -> Report:
        """Apply a change of the desired state without reading the tables."""
        total = Report()
        if self._passing is not None:
            self._note_changed((*(put.want for put in delta.puts), *delta.drops))
        for each in self._all.values():
            puts = [put for put in delta.puts if put.want.key[0] == each.table.name]
            if puts and each.was_right:
                self._write(each, partial(each.table.put, puts), total, now)
        for each in reversed(self._all.values()):
            drops = [resource for resource in delta.drops if resource.key[0] == each.table.name]
            if drops:
                self._write(each, partial(each.table.drop, drops), total, now)
        return total

    def _note_changed(self, resources: Iterable[Resource]) -> None:
        for resource in resources:
            upkeep = self._all.get(str(resource.key[0]))
            if upkeep is not None:
                upkeep.changed.add(resource.key)

    def hear(self, now: float, table: object = None, key: Key | None = None, by: str = "") -> None:
        """Record that another program may have changed something, in any table if none is named."""
        if key is not None and len(self._origins) < _MAX_ORIGINS:
            self._origins[key] = by or self._origins.get(key, "")
        for name, each in self._all.items():
            if table in (None, name):
                if each.notified is None:
                    each.first_notified = now
                each.notified = now
                each.settled = False
                each.due = min(each.due, now + SETTLE)

    def close(self, *, remove: Collection[str] = ()) -> None:
        """Close every table, even if one fails to close. ``remove`` names the tables to empty."""
        for name, each in self._all.items():
            try:
                each.table.close(remove=name in remove)
            except Exception as failure:  # a failure of another package's table must not keep others open
                trace = None if isinstance(failure, OSError | Retryable) else failure
                log.warning("Cannot close %s: %s", each.table.name, failure, exc_info=trace)

    # ---- timing ----------------------------------------------------------------------------------

    def _hear(self, each: Upkeep, now: float) -> None:
        for change in each.notifies.changes() if each.notifies is not None else ():
            if change.by and change.key is None:
                each.origins.add(change.by)
            self.hear(now, each.table.name, change.key, change.by)
        if each.polled is not None and each.polled.next_look <= now and each.polled.look():
            each.due = min(each.due, now)

    def _may_begin(self, each: Upkeep) -> bool:
        return each.table.needs <= self._converged

    def _next_wakeup(self, each: Upkeep) -> float:
        look = each.polled.next_look if each.polled is not None else math.inf
        return min(each.wakeup() if self._may_begin(each) else math.inf, look)

    # ---- read, compare, put, drop ------------------------------------------------------------------

    def _pass(self, due: set[str], now: float, *, is_start: bool) -> Generator[None, None, Report]:
        """Correct tables in their order, then remove stale objects in the reverse order.

        Yield while a table is being read. Meanwhile ``change`` may be called, and notifications may come in.
        """
        began, cpu, total = clock.now(), clock.cpu_time(), Report()
        # The first reading finds what an earlier run left: its removal is no repair.
        known = {name for name, each in self._all.items() if each.was_right}
        stale: dict[str, Sequence[Resource]] = {}
        for name, each in self._all.items():
            if name not in due or not self._may_begin(each):
                continue
            report, stale[name] = yield from self._put_right(each, now, is_start=is_start)
            total.add(report)
            if report.made:
                # Objects on a recreated device or process are gone.
                due |= {other for other, upkeep in self._all.items() if upkeep.stands_on(name)}
        allowed = self._permits.drops(stale) if any(stale.values()) else {}
        for name in reversed(stale):
            each = self._all[name]
            unchanged = [found for found in allowed.get(name, ()) if found.key not in each.changed]
            if unchanged:
                total.add(self._drop(each, unchanged, now, is_start=is_start, is_repair=name in known))
        self.work.reconcile.observe(clock.now() - began)
        rest = now + REST * (clock.cpu_time() - cpu)
        for name in due:
            each = self._all[name]
            each.not_before = max(each.not_before, rest)
            if each.notified is not None and not each.problem:  # else its repair is still to come
                if each.notified <= now:
                    each.notified = None
                    each.origins.clear()
                else:
                    each.first_notified = each.notified
        heard = {name for name, each in self._all.items() if each.notified is not None}
        self._origins = {key: by for key, by in self._origins.items() if key[0] not in due or key[0] in heard}
        self.work.synced()
        self._after(total)
        return total

    def _put_right(
        self, each: Upkeep, now: float, *, is_start: bool
    ) -> Generator[None, None, tuple[Report, Sequence[Resource]]]:
        """Make missing objects. Return the report and the stale objects."""
        table = each.table
        each.due = math.inf if table.audit is None else now + table.audit
        try:
            puts, stale = yield from self._read(each)
            puts = self._permits.puts(table.name, puts)
            with self.work.apply:
                report = table.put(puts) if puts else Report()
        except each.failures as failure:
            self._could_not(each, failure, now)
            return Report(), ()
        self._account(each, report, now, is_start=is_start)
        return report, stale

    def _read(self, each: Upkeep) -> Generator[None, None, Difference]:
        """Compare a table with its desired state, in parts.

        A list that was read in parts may lack objects next to those that were written meanwhile, as that of a
        VXLAN device's 256 chains does. Another list lacks others. Only what both show is read in one go.
        """
        scope, doubtful = Scope(each.desired, self.adopt), set[Key]()
        for is_second in (False, True):
            each.changed.clear()
            with suppress(InterruptedError):
                puts, stale = yield from compare(each.desired, each.table.read(scope), each.changed)
                if not (each.changed and (puts or stale)):
                    return puts, stale
                keys = {resource.key for resource in (*(put.want for put in puts), *stale)}
                if is_second and doubtful and doubtful.isdisjoint(keys):
                    return [], []
                doubtful = keys
        for _ in range(_TRIES):
            with suppress(InterruptedError):
                return difference(each.desired, each.table.read(scope))
        return difference(each.desired, each.table.read(scope))

    def _drop(
        self, each: Upkeep, stale: Sequence[Resource], now: float, *, is_start: bool, is_repair: bool
    ) -> Report:
        report = Report()
        self._write(each, partial(each.table.drop, stale), report, now)
        if report.removed and not is_start:
            tell = partial(self._repaired, each) if is_repair else _tell
            tell("Removed", report.removed, report.details)
        return report

    def _write(self, each: Upkeep, act: Callable[[], Report], total: Report, now: float) -> None:
        """Write without a read, and record the result."""
        try:
            with self.work.apply:
                report = act()
        except each.failures as failure:
            self._could_not(each, failure, now)
            return
        total.add(report)
        refused = [failure for failure in report.failed if not failure.is_taken]
        if len(refused) < len(report.failed):
            # A read finds the obstacle.
            each.due = min(each.due, now + SETTLE)
        done = {resource.key for resource in (*report.made, *report.removed)}
        kept = [failure for failure in each.failed if failure.resource.key not in done]
        if refused:
            self._retry(each, [*kept, *refused], now)
        else:
            each.failed = tuple(kept)

    # ---- results -----------------------------------------------------------------------------------

    def _could_not(self, each: Upkeep, failure: Exception, now: float) -> None:
        each.problem, each.settled = cause_of(failure), False
        if not isinstance(failure, OSError | Retryable):
            log.error("%s failed", type(each.table).__name__, exc_info=failure)
        self._say_not_in_place(each, each.problem)
        each.not_before = now + each.retry_delay
        self._retry_later(each, now)

    def _account(self, each: Upkeep, report: Report, now: float, *, is_start: bool) -> None:
        if report.made and not is_start:
            if each.was_right or report.pending:
                self._count_repair(each, report)
                self._repaired(each, "Restored", report.made, report.details)
            else:
                _tell("Made", report.made, report.details)
        each.problem = ""
        self._retry(each, report.failed, now)
        if report.failed:
            return
        each.was_right = True
        self._converged.add(each.table.name)
        each.settled = not report.pending
        if report.pending:
            each.due = now

    def _count_repair(self, each: Upkeep, report: Report) -> None:
        by = self._origins_of(each, report.made) or "unknown"
        each.repairs[by] = each.repairs.get(by, 0) + 1

    def _repaired(
        self, each: Upkeep, deed: str, resources: Sequence[Resource], details: Mapping[Key, str]
    ) -> None:
        """Log a repair; contested ones more and more seldom."""
        self.work.healed(resources, was_told=each.notified is not None)
        is_contest = each.contest.is_tried()
        each.unlogged = each.unlogged + len(resources) if is_contest else 0
        each.contested_repairs = each.contested_repairs + 1 if is_contest else 0
        if not is_contest:
            waited = None if each.notified is None else clock.now() - each.first_notified
            _tell(deed, resources, details, waited, lambda resource: self._origin(each, resource))
        elif not each.contested_repairs & (each.contested_repairs - 1):
            by = self._origins_of(each, resources)
            after = f", lately after changes by {by}" if by else ""
            log.warning(
                "Still repairing %s: %s so far%s", each.table.what, counted(each.unlogged, "object"), after
            )
        if each.contest.spend(resource.key for resource in resources if resource.key in self._origins):
            log.warning(
                "Another program keeps changing %s: %s; find it with flannelctl logs, then stop it or "
                "exclude flannel's objects there",
                each.table.what,
                "backing off" if each.contest.backs_off else "repairing each change",
            )

    def _origins_of(self, each: Upkeep, resources: Iterable[Resource]) -> str:
        return ", ".join(sorted({self._origin(each, resource) for resource in resources} - {""}))

    def _origin(self, each: Upkeep, resource: Resource) -> str:
        """Return the program that changed a resource, or the device that it depends on."""
        device = (LINKS, getattr(resource, "device", ""))
        by = self._origins.get(resource.key) or self._origins.get(device)
        return by or ", ".join(sorted(each.origins))

    def _retry(self, each: Upkeep, failed: Sequence[Failure], now: float) -> None:
        self.work.refused(failed)
        each.failed = tuple(failed)
        if failed:
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            remedy = f"; {failed[0].remedy}" if failed[0].remedy else ""
            self._say_not_in_place(each, f"{failed[0]}{more}{remedy}")
            each.settled = False
            self._retry_later(each, now)
            return
        each.retry_delay = FIRST_RETRY
        if self._once.clear(each.table.name):
            log.info("%s are in place", _sentence(each.table.what))

    def _say_not_in_place(self, each: Upkeep, problem: str) -> None:
        if not self._is_stopping():  # a command cut off by the stop is no problem
            self._once.warn(log, each.table.name, f"{_sentence(each.table.what)} are not in place: {problem}")

    def _retry_later(self, each: Upkeep, now: float) -> None:
        each.due = min(each.due, now + each.retry_delay)
        each.retry_delay = min(2 * each.retry_delay, _LAST_RETRY)


def _tell(
    deed: str,
    resources: Sequence[Resource],
    details: Mapping[Key, str],
    waited: float | None = None,
    origin: Callable[[Resource], str] = lambda _: "",
) -> None:
    level = logging.WARNING if deed == "Restored" else logging.INFO
    time = "" if waited is None else f", {_duration(waited)}"
    for resource in resources[:_FEW]:
        detail, by = details.get(resource.key, ""), origin(resource)
        after = f"{time} after a change{f' by {by}' if by else ''}" if time or by else ""
        log.log(level, "%s %s%s%s", deed, resource, after, f": {detail}" if detail else "")
    if len(resources) > _FEW:
        log.log(level, "%s %d more", deed, len(resources) - _FEW)


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def desired_by_table(resources: Iterable[Resource]) -> dict[str, dict[Key, Resource]]:
    """Return the desired state by table and key."""
    state: dict[str, dict[Key, Resource]] = {}
    for resource in resources:
        state.setdefault(str(resource.key[0]), {})[resource.key] = resource
    return state
