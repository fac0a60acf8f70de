"""Contract of the packet filter drivers, and the commands that they run, each with a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from flanneld.compat.flags import quoted
from flanneld.compat.glog import V
from flanneld.errors import Retryable
from flanneld.network.firewall.rules import Edit, Rules
from flanneld.runtime.command import LONGEST_OUTPUT, TIME_LIMIT, CommandRunner, NotStarted, find

log = logging.getLogger(__name__)


class Rejected(Retryable):
    """Error for a change that was refused as a whole."""


class Unavailable(Retryable):
    """Error for a driver whose commands or libraries are not installed."""


class Driver(Protocol):
    """Driver for one family's rules in one place, for one thread."""

    @property
    def name(self) -> str:
        """Name for the log."""

    def read(self) -> Rules:
        """Return the rules in all chains that may contain ours. Raises ``Retryable``."""

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply edits planned from the last ``read``, with one transaction per table.

        Raises ``Rejected`` if they are impossible, for example after a concurrent change, and ``Retryable``
        on a timeout.
        """

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        """Yield the lines of a shell script that does the same as ``apply``."""


def carry_out(driver: Driver, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Apply a plan.

    Return the edits of chains that could only be flushed, because foreign rules refer to them.

    Raises as ``Driver.apply`` does.
    """
    changes = [edit for edit in edits if not edit.drop]
    drops = [edit for edit in edits if edit.drop]
    if changes:
        driver.apply(changes)
    if not drops:
        return ()
    try:
        driver.apply(drops)
    except Rejected:
        there = driver.read()
        return tuple(edit for edit in drops if edit.chain in there and not _dropped(driver, edit))
    return ()


def _dropped(driver: Driver, edit: Edit) -> bool:
    try:
        driver.apply([edit])
    except Rejected:
        driver.apply([Edit(edit.chain, flush=True)])
        return False
    return True


class IptablesFailed(Rejected):
    """Error for a command with a non-zero exit status, with all its details."""

    def __init__(self, argv: Sequence[str], stdin: str, status: int, stderr: str) -> None:
        said = " ".join(stderr.split()) or "it says nothing"
        super().__init__(
            f"{' '.join(argv)} ended with status {status}: {said}", "its input is in the log at -v=6"
        )
        self.argv = tuple(argv)
        self.stdin = stdin
        self.status = status
        self.stderr = stderr


class IptablesRunner:
    """Runner of commands until ``stop``, which kills the running command and refuses further ones.

    ``ran`` is called after each command, which may take ``limit`` seconds.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        limit: float = TIME_LIMIT,
        ran: Callable[[], None] = lambda: None,
        longest_output: int = LONGEST_OUTPUT,
    ) -> None:
        self._runner = CommandRunner(stop or threading.Event(), longest_output)
        self._limit = limit
        self._ran = ran

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """Run a command and return its stdout.

        Raises ``IptablesFailed``, ``Unavailable``, and the errors of ``CommandRunner``.
        """
        if find(argv[0]) is None:
            raise Unavailable(f"{argv[0]} is not installed", "install the Debian package iptables")
        log.log(V(6), "Input of %s: %s", " ".join(argv), quoted(stdin))
        try:
            done = self._runner.run(argv, {"LC_ALL": "C"}, stdin, self._limit)
        except NotStarted as failure:
            raise Unavailable(failure.problem, failure.remedy) from failure
        finally:
            self._ran()
        if done.status:
            raise IptablesFailed(argv, stdin, done.status, done.errors)
        return done.output
