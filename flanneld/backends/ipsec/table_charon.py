"""Reconciler tables of the charon process: this run's or another program's, and one that is left over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flanneld.backends.contract import MakeCall
from flanneld.backends.ipsec import charon
from flanneld.backends.ipsec.charon import CharonEvents, CharonHangs, CharonProcess, CharonRefused, NoCharon
from flanneld.backends.ipsec.resources import CHARON, Charon
from flanneld.backends.ipsec.vici import MalformedVici, ReadSection, text
from flanneld.compat.glog import V
from flanneld.errors import Retryable
from flanneld.runtime import waits
from flanneld.state.resources import Resource
from flanneld.state.table import Changes, Failure, Put, Report, Scope, Seen, Table

log = logging.getLogger(__name__)

#: Calls to charon block, so they have a thread apart from the kernel's tables.
WORKER = "charon"
#: Seconds between two checks that charon answers.
_AUDIT = 10.0
#: Seconds for charon to start, and between two checks of its start.
_START_LIMIT, _START_LOOK = 20.0, 0.05
#: Seconds for one read, and for one start, with the end of an earlier charon. A stop of the daemon cuts both.
_READ_LIMIT, _PUT_LIMIT = 2 * charon.TIME_LIMIT, 60.0


class CharonTable(Table):
    """Table that starts charon and keeps it running; ``note`` gets each line of its log.

    charon outlives the daemon, so a restart interrupts no SA. The next run uses it if ``mark``, a digest of
    the settings, is the same, and replaces it otherwise. ``call`` makes the calls that may block.
    """

    name = CHARON
    what = "the processes of charon"
    worker = WORKER
    audit = _AUDIT

    def __init__(self, note: Callable[[ReadSection], None], mark: str, call: MakeCall) -> None:
        self._note = note
        self._call = call
        self._process = CharonProcess(mark)
        self._news: CharonEvents | None = None
        #: True until charon was read once: it may be an earlier run's.
        self._is_new = True
        #: True after charon's end: the next one has none of our keys and connections.
        self._is_lost = False
        #: Reason to replace a charon that still runs.
        self._hangs = self._outdated = ""

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield charon if it answers. Raises ``CharonHangs`` for another program's that does not.

        One to be replaced counts as absent, as does one after a loss, so that its keys and connections are
        loaded again.
        """
        del scope
        yield from self._call("charon", self._look, _READ_LIMIT)

    def _look(self) -> list[Seen]:
        self._process.find_running()
        if self._is_lost:
            return []
        try:
            self._hear()
            charon.ask(charon.SOCKET, "version")
            self._process.output()
        except NoCharon:
            self._lose()
            return []
        except (CharonHangs, MalformedVici) as problem:
            if not self._process.pid:
                raise
            self._hangs = problem.problem
            self._lose()
            return []
        if self._is_new and self._process.is_outdated():
            self._outdated = "it has other settings, or its program was replaced"
            self._lose()
            return []
        self._is_new = False
        return [Seen(Charon())]

    def put(self, puts: Sequence[Put]) -> Report:
        """Start charon unless one runs. Raises ``Fatal`` if it is not installed."""
        return self._call("the start of charon", partial(self._put, puts), _PUT_LIMIT)

    def _put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            try:
                self._find_or_start()
                report.made.append(put.want)
            except Retryable as problem:
                report.failed.append(Failure(put.want, problem.problem, problem.remedy))
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Release charon's socket. It goes on, with its keys and connections, unless ``remove``."""
        if self._news is not None:
            self._news.close()
            self._news = None
        if remove:
            self._process.end()
        self._process.close()

    # ---- notifications -----------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._news.fileno() if self._news else -1

    def changes(self) -> list[Changes]:
        """Pass on charon's log lines. Return a change if it has ended."""
        if self._news is None:
            return []
        try:
            for line in self._news.heard():
                log.log(V(1), "charon [%s] %s", text(line, "group"), text(line, "msg"))
                self._note(line)
        except (NoCharon, MalformedVici):
            self._lose()
            return [Changes()]
        return []

    # ---- the process -------------------------------------------------------------------------------

    def _find_or_start(self) -> None:
        self._end_replaced()
        try:
            self._hear()
        except NoCharon:
            self._start()
        else:
            log.info("Using a charon that runs already, %s", self._version())
        self._is_lost = self._is_new = False

    def _end_replaced(self) -> None:
        """End a charon that is to be replaced. One that hangs is killed."""
        if self._hangs:
            log.warning("Killing charon, process %d: %s", self._process.pid, self._hangs)
            self._process.kill()
        elif self._outdated:
            log.info("Ending charon, process %d: %s", self._process.pid, self._outdated)
            self._process.end()
        self._hangs = self._outdated = ""

    def _start(self) -> None:
        """Start charon, unless one of an earlier run is just starting or ending."""
        if not self._process.pid:
            if self._process.status is not None:
                log.warning("charon ended with status %d: starting it again", self._process.status)
            self._process.start()
        if not waits.until(self._has_started, within=_START_LIMIT, every=_START_LOOK):
            self._process.kill()
            raise Retryable(f"charon does not answer at {charon.SOCKET}", "see what it logs")
        if not self._news:
            status = self._process.status
            how = "" if status is None else f" with status {status}"
            raise Retryable(f"charon ended at its start{how}", "see what it logs")
        log.info("Started charon, process %d, %s", self._process.pid, self._version())

    def _has_started(self) -> bool:
        """Return True if charon answers, or has ended."""
        try:
            self._hear()
        except (NoCharon, CharonRefused):
            return not self._process.pid
        return True

    def _hear(self) -> None:
        self._news = self._news or CharonEvents(charon.SOCKET)

    def _lose(self) -> None:
        self._is_lost = True
        if self._news is not None:
            self._news.close()
            self._news = None

    def _version(self) -> str:
        answer = charon.ask(charon.SOCKET, "version")
        return f"strongSwan {text(answer, 'version')}"


class StaleCharonTable(Table):
    """Table of the charon that an earlier run has started. It only removes."""

    name = CHARON
    what = "the processes of charon"
    vital = False

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        if charon.running_charon():
            yield Seen(Charon())

    def put(self, puts: Sequence[Put]) -> Report:
        raise NotImplementedError

    def drop(self, found: Sequence[Resource]) -> Report:
        """Send SIGTERM without waiting for the end: charon ends the SAs that it has negotiated."""
        charon.end_running(charon.running_charon())
        return Report(removed=list(found))


def stale_charon() -> Iterator[Table]:
    """Yield a table if an earlier run has left a charon. The ipsec backend's table takes its place."""
    if charon.running_charon():
        yield StaleCharonTable()
