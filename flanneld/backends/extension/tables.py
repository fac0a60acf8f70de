"""Reconciler tables of the extension backend: the results of its commands, for this node and each peer.

Commands are not idempotent: one is repeated only if its result may be missing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from flanneld.backends.contract import DryRun
from flanneld.backends.extension.backend import (
    PEERS,
    STARTUP,
    ConfigCommand,
    ConfigCommandFailed,
    ConfigCommands,
    PeerSetup,
    Startup,
)
from flanneld.backends.extension.journal import Journal, JournalEntry, Progress
from flanneld.compat.glog import V
from flanneld.errors import Fatal
from flanneld.runtime import clock
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Failure, Put, Report, Scope, Seen, Table

log = logging.getLogger(__name__)

#: Commands may block, so they have a thread apart from the kernel's tables.
_WORKER = "extension"
#: Seconds between two reads if there is a CheckCommand.
_AUDIT_PERIOD = 30.0
#: Seconds between two checks of one peer: less than an audit period, so that each audit includes it.
CHECK_PERIOD = 20.0
#: Seconds of commands per read, put or drop; the rest follows later.
ROUND = 5.0
#: Pause after an incomplete round of checks, as a multiple of the round's duration.
_REST = 3.0
#: Seconds after a failure of SubnetAddCommand in which rounds for other peers do not repeat it. The
#: reconciler's first retry comes later.
_PAUSE = 0.9
#: Runs of SubnetRemoveCommand for a removed peer, and seconds after the first of them.
_MOST_REMOVALS, _FIRST_PAUSE = 5, 1.0


class StartupTable(Table):
    """Table that runs PostStartupCommand once, and ShutdownCommand at the daemon's end."""

    name = STARTUP
    what = "the effects of PostStartupCommand"
    worker = _WORKER

    def __init__(self, post: ConfigCommand, shutdown: ConfigCommand, commands: ConfigCommands) -> None:
        self._post = post
        self._shutdown = shutdown
        self._commands = commands
        self._node: Startup | None = None
        self._is_done = False

    def read(self, scope: Scope) -> Iterator[Seen]:
        """Yield the startup once it has run.

        It need not be idempotent, so a new uplink does not repeat it.
        """
        if self._is_done:
            yield from map(Seen, scope.desired.values())

    def put(self, puts: Sequence[Put]) -> Report:
        """Run PostStartupCommand. Raises ``Fatal`` if it fails, as upstream does."""
        report = Report()
        for put in puts:
            assert isinstance(put.want, Startup)
            self._node = put.want
            try:
                if self._post and not self._is_done:
                    self._commands.run(self._post, put.want.variables())
            except ConfigCommandFailed as failure:
                if failure.status is not None:
                    raise Fatal(failure.problem, failure.remedy) from None
                report.failed.append(Failure(put.want, failure.problem, failure.remedy))
                continue
            self._is_done = True
            report.made.append(put.want)
        return report

    def drop(self, found: Sequence[Resource]) -> Report:
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        if remove and self._shutdown and self._node:
            try:
                self._commands.run(self._shutdown, self._node.variables(), at_exit=True)
            except ConfigCommandFailed as failure:
                log.warning("Could not undo %s: %s", self._node, failure)


class PeerSetupTable(Table):
    """Table of peers. SubnetAddCommand and SubnetRemoveCommand change it, the journal holds its contents."""

    name = PEERS
    what = "the peers set up by extension commands"
    worker = _WORKER
    vital = False
    needs = frozenset({STARTUP})
    audit: float | None = None

    def __init__(
        self,
        add: ConfigCommand,
        remove: ConfigCommand,
        check: ConfigCommand,
        commands: ConfigCommands,
        journal: Journal,
    ) -> None:
        self.audit = _AUDIT_PERIOD if check else None
        self._add = add
        self._remove = remove
        self._check = check
        self._commands = commands
        self._journal = journal
        #: When a peer was last found working, and the peers that failed CheckCommand.
        self._checked: dict[str, float] = {}
        self._fallen: set[str] = set()
        #: The last failure of SubnetAddCommand, with its time.
        self._failures: dict[str, tuple[float, Failure]] = {}
        #: Number of failures of SubnetRemoveCommand, and the time of the next run.
        self._removals: dict[str, tuple[int, float]] = {}
        #: Time of the next look, for postponed work.
        self.next_look = math.inf

    def look(self) -> bool:
        self.next_look = math.inf
        return True

    # ---- actual state ------------------------------------------------------------------------

    def read(self, scope: Scope) -> list[Seen]:
        entries = self._journal.entries()
        self._look_after(entries, scope.desired)
        return [Seen(replace(entry.setup, stands=self._stands(entry))) for entry in entries.values()]

    def _stands(self, entry: JournalEntry) -> bool:
        name = entry.setup.name
        return entry.stage is Progress.DONE and entry.base == self._journal.base and name not in self._fallen

    def _look_after(self, entries: Mapping[str, JournalEntry], desired: Mapping[Key, Resource]) -> None:
        """Run CheckCommand for peers that match the desired state, within the time of a round."""
        began = clock.now()
        for name, entry in list(entries.items()) if self._check else ():
            is_wanted = desired.get(entry.setup.key) == entry.setup and entry.stage is Progress.DONE
            if not is_wanted or began - self._checked.get(name, -math.inf) < CHECK_PERIOD:
                continue
            spent = clock.now() - began
            if spent > ROUND:
                self._come_back(clock.now() + _REST * spent)
                return
            self._look_at(entry, began)

    def _look_at(self, entry: JournalEntry, now: float) -> None:
        setup = entry.setup
        self._checked[setup.name] = now
        try:
            self._commands.run(self._check, setup.variables(), setup.data, str(setup))
        except DryRun:
            return
        except ConfigCommandFailed as failure:
            if failure.status is not None:
                log.log(V(1), "%s does not hold: %s", setup, failure)
                self._fallen.add(setup.name)
            return
        self._fallen.discard(setup.name)
        if entry.base != self._journal.base:
            self._journal.ended(replace(entry, base=self._journal.base))

    # ---- changes -----------------------------------------------------------------------------

    def put(self, puts: Sequence[Put]) -> Report:
        """Run SubnetAddCommand. Peers with failures come last, the least recent failure first."""
        report = Report()
        end = clock.now() + ROUND
        wants = [put.want for put in puts if isinstance(put.want, PeerSetup)]
        for want in sorted(wants, key=self._last_failure):
            known, now = self._failures.get(want.name), clock.now()
            if now <= end and (known is None or now >= known[0] + _PAUSE):
                self._set_up(want, report)
            elif known:
                report.failed.append(known[1])
            else:
                self._come_back(clock.now())
        return report

    def _last_failure(self, setup: PeerSetup) -> float:
        known = self._failures.get(setup.name)
        return known[0] if known else -math.inf

    def _set_up(self, want: PeerSetup, report: Report) -> None:
        """Run SubnetAddCommand, after SubnetRemoveCommand if the peer may be set up. Raises ``OSError``."""
        name = want.name
        known = self._journal.entries().get(name)
        if known is not None and known.stage is not Progress.FAILED:
            self._undo(known, logging.WARNING if self._stands(known) else V(1))
        entry = JournalEntry(want, self._remove, self._journal.base)
        self._journal.begin(entry)
        try:
            if self._add:
                self._commands.run(self._add, want.variables(), want.data, str(want))
        except ConfigCommandFailed as failure:
            if failure.status is not None:
                self._journal.ended(replace(entry, stage=Progress.FAILED))
            refusal = Failure(want, failure.problem, failure.remedy)
            self._failures[name] = (clock.now(), refusal)
            report.failed.append(refusal)
            return
        self._journal.ended(replace(entry, stage=Progress.DONE))
        self._failures.pop(name, None)
        self._removals.pop(name, None)
        self._fallen.discard(name)
        self._checked[name] = clock.now()
        report.made.append(want)

    def _undo(self, entry: JournalEntry, level: int) -> bool:
        """Run the SubnetRemoveCommand recorded when the peer was added. Return False if it fails."""
        setup = entry.setup
        try:
            if entry.remove:
                self._commands.run(entry.remove, setup.variables(), setup.data, str(setup))
        except ConfigCommandFailed as failure:
            log.log(level, "Could not remove %s: %s", setup, failure)
            return False
        return True

    def drop(self, found: Sequence[Resource]) -> Report:
        report = Report()
        began = clock.now()
        for setup in found:
            assert isinstance(setup, PeerSetup)
            entry = self._journal.entries().get(setup.name)
            failures, earliest = self._removals.get(setup.name, (0, 0.0))
            if earliest > began:
                self._come_back(earliest)
            elif clock.now() > began + ROUND:
                self._come_back(clock.now())
            elif entry is None or self._is_removed(entry, failures):
                self._forget(setup.name)
                report.removed.append(setup)
        return report

    def _is_removed(self, entry: JournalEntry, failures: int) -> bool:
        """Run SubnetRemoveCommand. Return False if it has to be repeated.

        The setup of an earlier run, or a failed one, may not exist any more, so one attempt is enough for it.
        """
        is_last = failures + 1 >= _MOST_REMOVALS or not self._stands(entry)
        if self._undo(entry, logging.INFO if is_last and not failures else logging.WARNING):
            return True
        if not is_last:
            pause = _FIRST_PAUSE * 2**failures
            self._removals[entry.setup.name] = (failures + 1, clock.now() + pause)
            self._come_back(clock.now() + pause)
            return False
        if failures:
            log.warning(
                "Gave up removing %s after %d runs of SubnetRemoveCommand; undo it by hand",
                entry.setup,
                _MOST_REMOVALS,
            )
        return True

    def _forget(self, name: str) -> None:
        self._journal.gone(name)
        self._fallen.discard(name)
        for known in (self._checked, self._failures, self._removals):
            known.pop(name, None)

    def _come_back(self, when: float) -> None:
        self.next_look = min(self.next_look, when)
