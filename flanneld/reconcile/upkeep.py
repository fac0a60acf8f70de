"""Upkeep of one table: its timing, its history, and the backoff of repairs that another program undoes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice

from msgspec import Struct

from flanneld.errors import Fatal, Retryable
from flanneld.runtime import clock
from flanneld.state.resources import Key, Kind, State
from flanneld.state.table import Failure, Notifies, Polled, Table

#: Seconds before a refused change is tried again for the first time.
FIRST_RETRY = 1.0
#: Repairs to remember, and entries of each, at most. The pause does not grow beyond this number.
_ENOUGH = 32


class ContestBackoff:
    """Backoff of a contested table: frequent repairs within a minute double the pause before the next.

    A short pause follows each of the first ``few`` repairs. A firewall reload may flush all tables twice,
    once for each family, and an operator may reload it again. The table becomes
    contested with the ``many``th repair, or if one entry is repaired again within ``again`` seconds. It is
    until ``memory`` seconds pass without a repair.
    """

    def __init__(
        self,
        memory: float = 60.0,
        first: float = 0.2,
        last: float = 30.0,
        few: int = 4,
        many: int = 8,
        again: float = 0.0,
    ) -> None:
        self._memory = memory
        self._first = first
        self._last = last
        self._few = few
        self._many = many
        self._again = again
        #: By entry that another program changed, the time of its last repair.
        self._entries: dict[Key, float] = {}
        self._repairs: deque[float] = deque(maxlen=max(_ENOUGH, many))
        self._is_contest = False
        #: True if contested repairs have longer pauses than others.
        self.backs_off = last > first

    def spend(self, entries: Iterable[Key] = ()) -> bool:
        """Record a repair, of these entries. Return True if the table has become contested with it."""
        self._forget()
        now = clock.now()
        self._repairs.append(now)
        if self._is_contest:
            return False
        repaired = dict.fromkeys(islice(entries, _ENOUGH), now)
        recent = {key: at for key, at in self._entries.items() if now - at < self._again}
        self._entries = {**recent, **repaired}
        self._is_contest = not recent.keys().isdisjoint(repaired) or len(self._repairs) >= self._many
        return self._is_contest

    def is_tried(self) -> bool:
        """Return True if the table is contested. May be called from any thread."""
        return self._is_contest and not self._is_peace()

    def earliest(self) -> float:
        """Return the earliest time of the next repair, on the clock of ``clock.now``."""
        self._forget()
        if not self._repairs:
            return 0.0
        doublings = max(0, len(self._repairs) - self._few)
        return self._repairs[-1] + min(self._first * 2.0**doublings, self._last)

    def _is_peace(self) -> bool:
        last = next(reversed(self._repairs.copy()), -math.inf)
        return clock.now() - last > self._memory

    def _forget(self) -> None:
        if self._repairs and self._is_peace():
            self._repairs.clear()
            self._is_contest = False
        while not self._is_contest and self._repairs and self._repairs[0] < clock.now() - self._memory:
            self._repairs.popleft()


class TableState(Struct, frozen=True, gc=False):
    """Status of one table. ``failed`` are refusals, ``problem`` is the reason why it cannot be read."""

    name: str
    what: str
    worker: str
    vital: bool
    #: True if the table has held the whole desired state since its last change.
    settled: bool
    contested: bool
    failed: tuple[Failure, ...]
    problem: str
    #: Repairs by the program that made the undone change, or "unknown".
    repairs: Mapping[str, int]

    @property
    def trouble(self) -> str:
        """Reason why the resources are not in place, or may not stay there; empty if all is well."""
        if reason := self.problem or "; ".join(failure.reason for failure in self.failed):
            return reason
        if self.contested:
            return f"another program keeps changing {self.what}; see flannelctl logs"
        return "" if self.settled else f"{self.what} are not in place"


class Upkeep:
    """Timing and history of one table."""

    def __init__(self, table: Table, desired: State, contest: ContestBackoff) -> None:
        self.table = table
        # Decided once: isinstance takes several microseconds for a protocol, at each step and for each table.
        self.notifies = table if isinstance(table, Notifies) else None
        self.polled = table if isinstance(table, Polled) else None
        self.desired = desired
        self.due = 0.0
        #: Earliest time of the next read after a failure of the whole table, or after a costly read.
        self.not_before = 0.0
        self.retry_delay = FIRST_RETRY
        self.contest = contest
        self.origins: set[str] = set()
        #: Time of the notification that asked for the next read, None without one.
        self.notified: float | None = None
        #: Time of the first such notification.
        self.first_notified = 0.0
        #: Keys of the desired state that changed since the current or last read began.
        self.changed: set[Key] = set()
        #: Repairs of the current contest, and resources not logged yet.
        self.contested_repairs = self.unlogged = 0
        #: True once something was made or found correct: from then on a change is a repair.
        self.was_right = False
        self.settled = False
        self.failed: tuple[Failure, ...] = ()
        self.problem = ""
        self.repairs: dict[str, int] = {}
        # An exception of another package's table must not end the daemon.
        is_ours = type(table).__module__.partition(".")[0] == __package__.partition(".")[0]
        self.failures: tuple[type[Exception], ...] = (OSError, Retryable) if is_ours else (Exception,)

    def stands_on(self, name: str) -> bool:
        return name in self.table.needs and self.table.audit is not None

    def wakeup(self) -> float:
        """Return the time of the next read, not before the pause of a retry or a contest is over."""
        return max(self.due, self.not_before, self.contest.earliest())


def demand_all(states: Iterable[TableState]) -> None:
    """Raise ``Fatal`` for an object that the kernel refuses, ``Retryable`` if it may succeed later."""
    for state in states:
        refused = state.failed[0] if state.failed else None
        if refused is not None and refused.resource.kind is not Kind.REMOTE:
            raise Fatal(
                f"the kernel refuses {refused}",
                refused.remedy or "run with CAP_NET_ADMIN on a kernel that has this kind of device",
            )
        if state.vital and state.problem:
            raise Retryable(f"cannot read the {state.name}: {state.problem}")
        if state.vital and refused is not None:
            raise Retryable(refused.reason, refused.remedy)
