"""Rules through the iptables commands, by their full names: what ``iptables`` alone means does not matter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from flanneld.compat.glog import V
from flanneld.errors import Retryable, cause_of
from flanneld.model import Family
from flanneld.network.firewall.command import CommandFailed, Commands
from flanneld.network.firewall.iptables import text, xtables
from flanneld.network.firewall.nftables.netlink import Netfilter
from flanneld.network.firewall.plan import Edit
from flanneld.network.firewall.rules import IPTABLES_CHAINS, Rules

log = logging.getLogger(__name__)

Flavour = Literal["legacy", "nft"]

#: Seconds to wait for another program to give the lock of the legacy tables back.
LOCK_WAIT = 5
_LOCK_TAKEN = "xtables lock"


def program(flavour: Flavour, family: Family) -> str:
    """The command in front of which ``-restore`` makes another one."""
    return f"{'iptables' if family == 4 else 'ip6tables'}-{flavour}"


class Restore:
    """The tables of one family and flavour, written by ``iptables-restore``: a process for each change.

    They are read without the lock, and without listing what others have in them, which takes seconds
    on a large cluster's node.
    """

    def __init__(self, flavour: Flavour, family: Family, commands: Commands) -> None:
        self.name = program(flavour, family)
        self._flavour = flavour
        self._family = family
        self._commands = commands

    def read(self) -> Rules:
        if self._flavour == "legacy":
            return read_legacy(self._family)
        return self._read_nft()

    def apply(self, edits: Sequence[Edit]) -> None:
        """Make the changes, each table in one step. Raises ``CommandFailed``, ``Locked``."""
        command = (f"{self.name}-restore", "--noflush", f"--wait={LOCK_WAIT}")
        try:
            self._commands.run(command, text.restore_text(edits))
        except CommandFailed as failure:
            if _LOCK_TAKEN in failure.stderr:
                raise Locked from failure
            raise

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
    """Another program has the lock of the legacy tables."""

    def __init__(self) -> None:
        super().__init__(
            f"another program held the xtables lock for {LOCK_WAIT} s",
            "trying again; `fuser -v /run/xtables.lock` shows it",
        )


def read_legacy(family: Family) -> Rules:
    """What is in the tables that rules of ours belong to. Raises ``Retryable``."""
    try:
        return xtables.read(family, IPTABLES_CHAINS)
    except PermissionError:
        log.log(V(1), "Only root may see which legacy tables there are: taking it that ours are")
    try:
        return xtables.read(family, IPTABLES_CHAINS, {table for table, _ in IPTABLES_CHAINS})
    except OSError as error:
        raise Retryable(
            f"cannot read the legacy tables: {cause_of(error)}", "run with CAP_NET_ADMIN"
        ) from error
