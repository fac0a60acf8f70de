"""Driver for IPv4 on iptables-legacy hosts through python-iptables, without subprocesses.

The library has several traps:

- It ignores the xtables lock, so the lock is taken here.
- A commit after each call can lose rules silently, so there is one commit per table.
- It redirects stdout to read a rule, so tables are read by other means.
- It is not thread-safe.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flanneld.errors import Retryable, install_command
from flanneld.network.firewall.command import IptablesRunner
from flanneld.network.firewall.driver import Rejected, Unavailable
from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.iptables.restore import LOCK_WAIT, Locked, Restore
from flanneld.network.firewall.rules import ALL_BITS, Match, Rule
from flanneld.runtime import waits

LOCK = "/run/xtables.lock"
_LOCK_POLL = 0.02
_INSTALL = f"{install_command('iptables-legacy')}, and apt-get install libip4tc2 libxtables12"


class PythonIptables(Restore):
    """Driver for the IPv4 tables; for one thread. Raises ``Unavailable``."""

    def __init__(self, commands: IptablesRunner, stop: threading.Event) -> None:
        super().__init__("legacy", 4, commands)
        self.name = "python-iptables"
        self._stop = stop
        self._iptc = _load()

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply the edits, with one commit per table. Raises ``Retryable``."""
        with xtables_lock(self._stop):
            try:
                for table in dict.fromkeys(edit.chain[0] for edit in edits):
                    self._change(table, [edit for edit in edits if edit.chain[0] == table])
            except (self._iptc.IPTCError, self._iptc.XTablesError, ValueError) as error:
                raise Rejected(f"python-iptables: {error}", "without it, commands do the same") from error

    def _change(self, name: str, edits: Sequence[Edit]) -> None:
        # To resolve a jump the library would open, and thus create, all tables.
        known = {each: each == name for each in self._iptc.Table.ALL}
        self._iptc.Table.existing_table_names.update(known)
        table = self._iptc.Table(name, autocommit=False)
        # The library's cache may be outdated, or come from another network namespace.
        table.refresh()
        for edit in edits:
            self._edit(table, edit)
        table.commit()
        table.refresh()

    def _edit(self, table: Any, edit: Edit) -> None:
        chain = edit.chain[1]
        if edit.flush and not table.is_chain(chain):
            table.create_chain(chain)
        if edit.flush or edit.drop:
            table.flush_entries(chain)
        for rule in edit.delete:
            entry = self._entry(rule)
            table.delete_entry(chain, entry.rule, entry.mask)
        for rule in edit.insert:
            table.insert_entry(chain, self._entry(rule).rule, 0)
        for rule in edit.append:
            table.append_entry(chain, self._entry(rule).rule)
        if edit.drop:
            table.delete_chain(chain)

    def _entry(self, rule: Rule) -> Any:
        """Return the library's object for a rule."""
        entry = self._iptc.Rule()
        if rule.source:
            entry.src = _side(rule.source)
        if rule.destination:
            entry.dst = _side(rule.destination)
        if rule.mark:
            value, mask = rule.mark
            entry.create_match("mark").mark = f"{value:#x}" if mask == ALL_BITS else f"{value:#x}/{mask:#x}"
        if rule.comment:
            entry.create_match("comment").comment = rule.comment
        target = entry.create_target(rule.verdict)
        if rule.random:
            target.random_fully = ""
        # The public final_check would first read the target back, through our stdout.
        target._final_check()  # noqa: SLF001
        return entry


def _side(match: Match) -> str:
    return f"{'' if match.inside else '!'}{match.net}"


@contextmanager
def xtables_lock(stop: threading.Event) -> Iterator[None]:
    """Hold the lock that all programs take to change legacy tables. Raises ``Locked``."""
    path = os.environ.get("XTABLES_LOCKFILE") or LOCK
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        remedy = "mount /run writable; if this is not root, see dist/systemd/tmpfiles.d/flannel.conf"
        raise Retryable(f"cannot open {path}: {error.strerror}", remedy) from error
    try:
        if not waits.until(lambda: _try_lock(lock), within=LOCK_WAIT, every=_LOCK_POLL, stop=stop):
            raise Locked
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _load() -> Any:
    """Import the library on demand: it takes 150 ms and 20 MiB, and is optional."""
    try:
        import iptc
    except ImportError as error:
        raise Unavailable("python-iptables is not installed", _INSTALL) from error
    except Exception as error:  # it loads C libraries, and any of them may fail in any way
        raise Unavailable(f"python-iptables does not load: {error}", _INSTALL) from error
    return iptc
