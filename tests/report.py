"""Hooks of pytest for an honest end: the order, what was not run and why, and how to repeat what failed."""

from __future__ import annotations

import gc
import json
import os
import shlex
from collections import Counter
from typing import Any

import pytest

from tests.order import durations_of, record
from tests.vm.machine import INSIDE

#: What begins the lines that ``tests/run`` collects.
NOT_RUN, REPEAT, TOOK = "not run: ", "repeat: ", "took: "
#: The same for what tests count with ``record_property``: ``tried: 896 crash points``.
TRIED = "tried: "
_REASONS = pytest.StashKey[Counter[str]]()


def not_run(config: pytest.Config, reason: str, number: int = 1) -> None:
    """Count tests, or files of them, that are left out for a reason: ``tests marked long; add --long``."""
    config.stash.setdefault(_REASONS, Counter())[reason] += number


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[NOT_RUN] = dict(session.config.stash.get(_REASONS, {}))
        # After this a worker has 5 s to end, then execnet interrupts it. pytest's last garbage collection may
        # take longer: hypothesis' callback for collections then showed the traceback of a KeyboardInterrupt.
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker counted; all have counted the same."""
    node.config.stash[_REASONS] = Counter(getattr(node, "workeroutput", {}).get(NOT_RUN, {}))


class Failures:
    """Tells each failure at once: the end of a run that is broken off may be lost."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._told: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None and report.nodeid not in self._told:
            self._told.add(report.nodeid)
            reporter.write(f"\n{REPEAT}{command_for(report.nodeid)}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    write = terminalreporter.write_line
    for reason, number in sorted(config.stash.get(_REASONS, Counter()).items()):
        if number:
            write(f"{NOT_RUN}{number} {reason}")
    tried: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        tried.update(dict(report.user_properties))
    for what, number in sorted(tried.items()):
        write(f"{TRIED}{number} {what}")
    if config.getoption("--record-durations"):
        reports = (report for kind in terminalreporter.stats.values() for report in kind)
        durations = durations_of(report for report in reports if isinstance(report, pytest.TestReport))
        if INSIDE in os.environ:  # what is written in the machine is forgotten
            write(TOOK + json.dumps(durations))
        else:
            record("host", durations)
    if (seed := config.getoption("randomly_seed", None)) is not None:
        write(f"order: --randomly-seed={seed}")


def command_for(test: str) -> str:
    """Return the command that runs one test where it ran: on the host or in the machine."""
    modules = ["tests.vm.machine", "pytest"] if INSIDE in os.environ else ["pytest"]
    return " ".join([*(f".venv/bin/python -m {module}" for module in modules), shlex.quote(test)])
