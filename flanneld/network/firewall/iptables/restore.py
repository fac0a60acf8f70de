"""Driver through the iptables commands of a given flavour. The plain ``iptables`` command is not used."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

from flanneld.compat.glog import V
from flanneld.errors import Retryable, cause_of
from flanneld.model import Family
from flanneld.network.firewall.command import IptablesFailed, IptablesRunner
from flanneld.network.firewall.edits import Edit
from flanneld.network.firewall.iptables import text, xtables
from flanneld.network.firewall.nftables.netlink import Netfilter
from flanneld.network.firewall.rules import IPTABLES_CHAINS, Rules

log = logging.getLogger(__name__)

Flavour = Literal["legacy", "nft"]

#: Seconds to wait for the xtables lock of the legacy tables.
LOCK_WAIT = 5
_LOCK_TAKEN = "xtables lock"


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
        command = (f"{self.name}-restore", "--noflush", f"--wait={LOCK_WAIT}")
        try:
            self._commands.run(command, text.restore_text(edits))
        except IptablesFailed as failure:
            if _LOCK_TAKEN in failure.stderr:
                raise Locked from failure
            raise

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        yield f"{program(self._flavour, self._family)}-restore --noflush <<'END'"
        yield from text.restore_text(edits).splitlines()
        yield "END"

    def _read_nft(self) -> Rules:
        try:
            with Netfilter() as netfilter:
                there = [chain for chain in IPTABLES_CHAINS if netfilter.has_chain(self._family, chain)]
        except OSError as error:
            raise Retryable(f"cannot ask nf_tables: {cause_of(error)}", "run with CAP_NET_ADMIN") from error
        return {
            (table, name): text.read_rules(self._commands.run((self.name, "-t", table, "-S", name)))
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
        return xtables.read(family, IPTABLES_CHAINS)
    except PermissionError:
        log.log(V(1), "Only root can list the legacy tables: assuming that ours exist")
    try:
        return xtables.read(family, IPTABLES_CHAINS, {table for table, _ in IPTABLES_CHAINS})
    except OSError as error:
        raise Retryable(
            f"cannot read the legacy tables: {cause_of(error)}", "run with CAP_NET_ADMIN"
        ) from error
