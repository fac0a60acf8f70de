"""Execution of iptables commands, one at a time, each with a time limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from flanneld.compat.flags import quoted
from flanneld.compat.glog import V
from flanneld.network.firewall.driver import Rejected, Unavailable
from flanneld.runtime.command import TIME_LIMIT, CommandRunner, NotStarted, find

log = logging.getLogger(__name__)


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
    """Runner of commands until ``stop``, which kills the running command and refuses further ones."""

    def __init__(self, stop: threading.Event, limit: float = TIME_LIMIT) -> None:
        self._runner = CommandRunner(stop)
        self._limit = limit

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
        if done.status:
            raise IptablesFailed(argv, stdin, done.status, done.errors)
        return done.output
