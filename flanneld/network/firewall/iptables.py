"""Drivers for iptables: its commands, of a given flavour, and python-iptables for IPv4 in the legacy tables.

The plain ``iptables`` command is not used. The library has several traps:

- It ignores the xtables lock, so the lock is taken here.
- A commit after each call can lose rules silently, so there is one commit per table.
- It redirects stdout to read a rule, so tables are read by other means.
- It is not thread-safe.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from msgspec.structs import replace

from flanneld.compat.glog import V
from flanneld.errors import Retryable, cause_of, install_command
from flanneld.model import Family
from flanneld.network.firewall import iptables_text, xtables
from flanneld.network.firewall.driver import IptablesFailed, IptablesRunner, Rejected, Unavailable
from flanneld.network.firewall.fate import ALL_BITS, Rule, Test
from flanneld.network.firewall.netlink import Netfilter
from flanneld.network.firewall.rules import IPTABLES_CHAINS, JUMPS, TRIALS, Edit, Rules
from flanneld.runtime import waits

log = logging.getLogger(__name__)

Flavour = Literal["legacy", "nft"]

#: Seconds to wait for the xtables lock of the legacy tables.
LOCK_WAIT = 5
_LOCK_TAKEN = "xtables lock"
_CHAINS = (*IPTABLES_CHAINS, *TRIALS)


def program(flavour: Flavour, family: Family) -> str:
    """Return the name of the command; its ``-restore`` variant has that suffix."""
    return f"{'iptables' if family == 4 else 'ip6tables'}-{flavour}"


class Restore:
    """Driver for the tables of one family and flavour, with one ``iptables-restore`` process per change.

    Tables are read without the lock, and without listing other programs' rules, which takes seconds on a node
    of a large cluster.
    """

    def __init__(self, flavour: Flavour, family: Family, commands: IptablesRunner) -> None:
        self.name = program(flavour, family)
        self._flavour = flavour
        self._family = family
        self._commands = commands

    def read(self) -> Rules:
        if self._flavour == "legacy":
            return read_legacy(self._family)
        return self._read_nft()

    def apply(self, edits: Sequence[Edit]) -> None:
        """Apply the edits, with one transaction per table. Raises ``IptablesFailed`` or ``Locked``."""
        self._restore(iptables_text.restore_text(edits))

    def check(self, rules: Rules) -> None:
        """Try rules in a chain that nothing leads to, and remove it. Raises as ``apply`` does.

        Of what is removed in the same transaction iptables-nft would send nothing to the kernel. Only a
        second refusal counts: another daemon in this network namespace may have removed the chain.
        """
        tables: dict[str, list[Rule]] = {}
        for (table, _), inside in rules.items():
            # Whether there is --random-fully is found out when the rules are set.
            plain = (replace(rule, random=False) for rule in inside if rule not in JUMPS.values())
            tables.setdefault(table, []).extend(plain)
        trials = ((chain, tuple(tables[chain[0]])) for chain in TRIALS if tables.get(chain[0]))
        edits = ((Edit(chain, flush=True, append=tried), Edit(chain, drop=True)) for chain, tried in trials)
        text = "".join(iptables_text.restore_text([edit]) for pair in edits for edit in pair)
        try:
            self._restore(text)
        except IptablesFailed:
            self._restore(text)

    def _restore(self, text: str) -> None:
        command = (f"{self.name}-restore", "--noflush", f"--wait={LOCK_WAIT}")
        try:
            self._commands.run(command, text)
        except IptablesFailed as failure:
            if _LOCK_TAKEN in failure.stderr:
                raise Locked from failure
            raise

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        yield f"{program(self._flavour, self._family)}-restore --noflush <<'END'"
        yield from iptables_text.restore_text(edits).splitlines()
        yield "END"

    def _read_nft(self) -> Rules:
        try:
            with Netfilter() as netfilter:
                there = [chain for chain in _CHAINS if netfilter.has_chain(self._family, chain)]
        except OSError as error:
            raise Retryable(f"cannot ask nf_tables: {cause_of(error)}", "run with CAP_NET_ADMIN") from error
        return {
            (table, name): iptables_text.read_rules(self._commands.run((self.name, "-t", table, "-S", name)))
            for table, name in there
        }


class Locked(Retryable):
    """Error for an xtables lock that another program holds."""

    def __init__(self) -> None:
        super().__init__(
            f"another program held the xtables lock for {LOCK_WAIT} s",
            "trying again; `fuser -v /run/xtables.lock` shows it",
        )


def read_legacy(family: Family) -> Rules:
    """Return the rules in the legacy tables that may contain ours. Raises ``Retryable``."""
    try:
        return xtables.read(family, _CHAINS)
    except PermissionError:
        log.log(V(1), "Only root can list the legacy tables: assuming that ours exist")
    try:
        return xtables.read(family, _CHAINS, {table for table, _ in _CHAINS})
    except OSError as error:
        raise Retryable(
            f"cannot read the legacy tables: {cause_of(error)}", "run with CAP_NET_ADMIN"
        ) from error


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
        for test in rule.tests:
            match test:
                case Test("source", (net,), negated):
                    entry.src = f"{'!' if negated else ''}{net}"
                case Test("destination", (net,), negated):
                    entry.dst = f"{'!' if negated else ''}{net}"
                case Test("mark", ((int(value), int(mask)),)):
                    given = f"{value:#x}" if mask == ALL_BITS else f"{value:#x}/{mask:#x}"
                    entry.create_match("mark").mark = given
        if rule.comment:
            entry.create_match("comment").comment = rule.comment
        target = entry.create_target(rule.verdict)
        if rule.random:
            target.random_fully = ""
        # The public final_check would first read the target back, through our stdout.
        target._final_check()  # noqa: SLF001
        return entry


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
