"""What a backend moves beyond this kernel: its drivers, called as the kernel is."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from flanneld.backends.contract import Backend, Driver, HasDrivers, InBulk, Successive, Vital, Watched
from flanneld.errors import Retryable
from flanneld.model import IPNetwork
from flanneld.runtime import clock
from flanneld.state.diff import Plan, diff, without_ways_to
from flanneld.state.report import Failure, Report
from flanneld.state.resources import Resource, State

log = logging.getLogger(__name__)

_FAILURES = (OSError, Retryable)


class Outside:
    """The drivers of one backend; most have none, and then all of this is nothing."""

    def __init__(self, backend: Backend | None = None) -> None:
        self._drivers: dict[type, Driver] = {}
        self._watched: list[Watched] = []
        try:
            made: Iterable[Driver] = backend.drivers() if isinstance(backend, HasDrivers) else ()
            for driver in made:
                self._drivers[driver.handles] = driver
        except BaseException:
            self.close()
            raise
        self._watched = [driver for driver in self._drivers.values() if isinstance(driver, Watched)]

    def __bool__(self) -> bool:
        return bool(self._drivers)

    def converge(self, wanted: State, *, sweep: bool, unclear: Collection[IPNetwork] = ()) -> Report:
        """Read, compare, apply, table by table: one that does not answer does not hold up the others.

        Unless it is time to ``sweep``, nothing is removed, and never what leads to an ``unclear`` subnet.
        """
        report = Report()
        for kind, driver in self._drivers.items():
            mine = {key: item for key, item in wanted.items() if type(item) is kind}
            try:
                steps = diff(mine, {item.key: item for item in driver.read()})
            except _FAILURES as failure:
                report.failed += [Failure(item, str(failure)) for item in mine.values()]
                continue
            stale = without_ways_to(unclear, steps.drops) if sweep else ()
            report.add(self.apply(Plan(steps.puts, stale)))
        return report

    def apply(self, steps: Plan) -> Report:
        report = Report()
        for driver, batch in self._batches(steps.puts):
            act = driver.put_all if isinstance(driver, InBulk) else _each(driver.put)
            _try(act, batch, report.made, report)
        for driver, batch in self._batches(steps.drops):
            act = driver.drop_all if isinstance(driver, InBulk) else _each(driver.drop)
            _try(act, batch, report.removed, report)
        return report

    def _batches(self, resources: Sequence[Resource]) -> Iterator[tuple[Driver, list[Resource]]]:
        """What each driver is to do in one call, in the order of the drivers."""
        for kind, driver in self._drivers.items():
            mine = [resource for resource in resources if type(resource) is kind]
            if isinstance(driver, InBulk):
                if mine:
                    yield driver, mine
            else:
                yield from ((driver, [resource]) for resource in mine)

    def missing(self, report: Report) -> list[Failure]:
        """What could not be done, of that without which no packet flows."""
        return [
            failure
            for failure in report.failed
            if isinstance(self._drivers.get(type(failure.resource)), Vital)
        ]

    def sources(self) -> dict[int, Vital]:
        """The drivers that may have news, by what becomes readable then."""
        vital = (driver for driver in self._drivers.values() if isinstance(driver, Vital))
        return {fd: driver for driver in vital if (fd := driver.fileno()) >= 0}

    @property
    def next_look(self) -> float:
        """When something wants to be looked at, on the clock of ``clock.now``."""
        return min((driver.next_look for driver in self._watched), default=math.inf)

    def look(self) -> bool:
        """Look at what is due. Whether something does not work."""
        return any(driver.look() for driver in self._watched if driver.next_look <= clock.now())

    def close(self) -> None:
        """Let every driver undo what must not outlive the daemon. May be called repeatedly."""
        self._let_go(lambda driver: driver.close())

    def hand_over(self) -> None:
        """Let every driver make room for that of the next backend. May be called repeatedly."""
        self._let_go(lambda driver: driver.hand_over() if isinstance(driver, Successive) else driver.close())

    def _let_go(self, end: Callable[[Driver], None]) -> None:
        drivers, self._drivers, self._watched = self._drivers, {}, []
        for driver in drivers.values():
            try:
                end(driver)
            except Exception as failure:  # one of another package must not keep the others open
                trace = None if isinstance(failure, _FAILURES) else failure
                log.warning("%s could not clean up: %s", type(driver).__name__, failure, exc_info=trace)


def _each(act: Callable[[Resource], None]) -> Callable[[Sequence[Resource]], None]:
    def act_on_all(resources: Sequence[Resource]) -> None:
        for resource in resources:
            act(resource)

    return act_on_all


def _try(
    act: Callable[[Sequence[Resource]], None], batch: list[Resource], done: list[Resource], report: Report
) -> None:
    try:
        act(batch)
        done += batch
    except _FAILURES as failure:
        report.failed += [Failure(resource, str(failure)) for resource in batch]
