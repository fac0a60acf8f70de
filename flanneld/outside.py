"""What a backend moves beyond this kernel: its drivers, called as the kernel is."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flanneld.backends import Backend, Driver, HasDrivers
from flanneld.errors import Retryable
from flanneld.network.diff import Plan, diff
from flanneld.network.report import Failure, Report
from flanneld.network.resources import Resource, State

log = logging.getLogger(__name__)

_FAILURES = (OSError, Retryable)


class Outside:
    """The drivers of one backend; most have none, and then all of this is nothing."""

    def __init__(self, backend: Backend) -> None:
        drivers = backend.drivers() if isinstance(backend, HasDrivers) else ()
        self._drivers: dict[type, Driver] = {driver.handles: driver for driver in drivers}

    def __bool__(self) -> bool:
        return bool(self._drivers)

    def converge(self, wanted: State, *, sweep: bool) -> Report:
        """Read, compare, apply, table by table: one that does not answer does not hold up the others."""
        report = Report()
        for kind, driver in self._drivers.items():
            mine = {key: item for key, item in wanted.items() if type(item) is kind}
            try:
                steps = diff(mine, {item.key: item for item in driver.read()})
            except _FAILURES as failure:
                report.failed += [Failure(item, str(failure)) for item in mine.values()]
                continue
            report.add(self.apply(steps if sweep else Plan(puts=steps.puts)))
        return report

    def apply(self, steps: Plan) -> Report:
        report = Report()
        for resource in steps.puts:
            self._try(self._drivers[type(resource)].put, resource, report.made, report)
        for resource in steps.drops:
            self._try(self._drivers[type(resource)].drop, resource, report.removed, report)
        return report

    def _try(
        self, act: Callable[[Resource], None], resource: Resource, done: list[Resource], report: Report
    ) -> None:
        try:
            act(resource)
            done.append(resource)
        except _FAILURES as failure:
            report.failed.append(Failure(resource, str(failure)))

    def close(self) -> None:
        """Let every driver undo what must not outlive the daemon."""
        for driver in self._drivers.values():
            try:
                driver.close()
            except _FAILURES as failure:
                log.warning("%s could not clean up: %s", type(driver).__name__, failure)
