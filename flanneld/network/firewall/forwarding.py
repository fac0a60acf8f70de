"""Who else decides what this host forwards: chains whose policy is to drop, in all places there are.

Every table is asked about every packet, and one that drops wins. So an accept helps only in the table
that would drop, and ours is in one of them at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from flanneld.errors import Retryable
from flanneld.model import Family, IPNetwork
from flanneld.network.firewall import xtables
from flanneld.network.firewall.command import Commands
from flanneld.network.firewall.netfilter import Netfilter
from flanneld.network.firewall.restore import Restore, program
from flanneld.network.firewall.rules import (
    ACCEPT,
    FLANNEL_FWD,
    FORWARDING,
    NATIVE_TABLE,
    Match,
    Rule,
    Rules,
)
from flanneld.network.firewall.sweep import Place

_IPTABLES_TABLE: dict[Family, str] = {4: "ip", 6: "ip6"}


@dataclass(frozen=True, slots=True)
class Dropping:
    """A chain that drops what it does not accept. ``table`` is named as nft(8) does: ``inet filter``."""

    place: Place
    family: Family
    table: str
    chain: str

    def __str__(self) -> str:
        return f"chain {self.chain} of table {self.table}{' (legacy)' if self.place == 'legacy' else ''}"

    def command(self, network: IPNetwork) -> str:
        """What accepts a network's packets there."""
        if self.place == "native":
            side = _IPTABLES_TABLE[self.family]
            insert = f"nft insert rule {self.table} {self.chain} {side}"
            return f"{insert} saddr {network} accept; {insert} daddr {network} accept"
        insert = f"{program(self.place, self.family)} -I {self.chain}"
        return f"{insert} -s {network} -j ACCEPT; {insert} -d {network} -j ACCEPT"


def dropping(family: Family) -> Iterator[Dropping]:
    """All of them, as far as this kernel and our rights let us see."""
    try:
        if xtables.drops_forwarded(family):
            yield Dropping("legacy", family, FORWARDING[0], FORWARDING[1])
    except OSError:
        pass  # For all but root the legacy tables are out of sight.
    try:
        with Netfilter() as netfilter:
            found = list(netfilter.dropping(family))
    except OSError:
        return  # A kernel without nf_tables.
    for table, chain in found:
        is_iptables = table == f"{_IPTABLES_TABLE[family]} {FORWARDING[0]}" and chain == FORWARDING[1]
        yield Dropping("nft" if is_iptables else "native", family, table, chain)


def in_the_way(found: Dropping, network: IPNetwork, ours: Place | None, commands: Commands) -> bool:
    """Whether a chain would drop the network's packets. ``ours`` is where our accepting rules are, if any.

    What others accept is seen in iptables' chains only: nft's own language has too many ways to say it.
    """
    if found.place == "native":
        return True
    if found.place == ours:
        return False
    try:
        return not accepts(Restore(found.place, found.family, commands).read(), network)
    except Retryable:
        return True


def accepting(family: Family) -> Place | None:
    """Where rules of ours forward the network's traffic, as a daemon left them; None if nowhere."""
    with suppress(OSError), Netfilter() as netfilter:
        if netfilter.has_chain(family, FLANNEL_FWD):
            return "nft"
        if netfilter.has_table(family, NATIVE_TABLE[family]):
            return "native"
    with suppress(OSError):
        if xtables.has_chain(family, FLANNEL_FWD):
            return "legacy"
    return None


def accepts(rules: Rules, network: IPNetwork) -> bool:
    """Whether iptables' FORWARD has the two rules that let a network's packets through, whoever made them."""
    plain = {(rule.source, rule.destination) for rule in rules.get(FORWARDING, ()) if _plainly_accepts(rule)}
    return {(Match(network), None), (None, Match(network))} <= plain


def _plainly_accepts(rule: Rule) -> bool:
    return rule.verdict == ACCEPT and not rule.extra and not rule.mark
