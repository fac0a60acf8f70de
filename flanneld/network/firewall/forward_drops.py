"""Chains of other programs that drop forwarded packets.

Some drop by their policy, as Docker's, others by a final rule, as firewalld's. Each packet passes every
table, and a drop in any of them is final. So an accept only helps in the table that would drop, and ours is
in one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from flanneld.model import Family, IPNetwork
from flanneld.network.firewall import xtables
from flanneld.network.firewall.iptables import program
from flanneld.network.firewall.netlink import Netfilter
from flanneld.network.firewall.placing import RulePlace
from flanneld.network.firewall.rules import (
    ACCEPT,
    DROP,
    FLANNEL_FWD,
    FORWARDING,
    NATIVE_TABLE,
    NFT_FAMILY,
    REJECT,
    Chain,
    Match,
    Rule,
)
from flanneld.runtime.shell import Command, command

_FIREWALLD = "inet firewalld"
_FIREWALLDS_CHAIN: Chain = ("filter", "INPUT_ZONES")


class Dropping(Struct, frozen=True, gc=False):
    """A chain that drops what it does not accept. ``table`` is nft(8)'s name for it: ``inet filter``.

    It drops by its policy, or ``by_rule``: with a rule that drops or rejects everything.
    """

    place: RulePlace
    family: Family
    table: str
    chain: str
    by_rule: bool = False

    def __str__(self) -> str:
        return f"chain {self.chain} of table {self.table}{' (legacy)' if self.place == 'legacy' else ''}"

    @property
    def is_firewalld(self) -> bool:
        """Return True for firewalld's chains: rules that others add there are lost at a reload."""
        return self.table == _FIREWALLD

    def commands(self, network: IPNetwork) -> tuple[Command, ...]:
        """Return the commands that make the chain accept a network's packets."""
        if self.is_firewalld:
            trust = command("firewall-cmd", "--permanent", "--zone=trusted", f"--add-source={network}")
            return trust, command("firewall-cmd", "--reload")
        if self.place == "native":
            side = NFT_FAMILY[self.family]
            insert = command("nft", "insert", "rule", *self.table.split(), self.chain, side)
            return tuple((*insert, way, str(network), "accept") for way in ("saddr", "daddr"))
        insert = command(program(self.place, self.family), "-I", self.chain)
        return tuple((*insert, way, str(network), "-j", ACCEPT) for way in ("-s", "-d"))


def dropping(family: Family) -> Iterator[Dropping]:
    """Yield the chains that drop forwarded packets, as far as the kernel and our rights show them."""
    with suppress(OSError):  # Only root can read the legacy tables.
        rules = xtables.read(family, [FORWARDING]).get(FORWARDING, ())
        by_rule = any(map(_refuses_all, rules))
        if by_rule or xtables.drops_forwarded(family):
            yield Dropping("legacy", family, FORWARDING[0], FORWARDING[1], by_rule)
    with suppress(OSError), Netfilter() as netfilter:  # The kernel may lack nf_tables.
        for table, chain, by_policy in list(netfilter.forwarding(family)):
            by_rule = any(map(_refuses_all, netfilter.rules(family, table, chain)))
            if by_rule or by_policy:
                is_iptables = table == f"{NFT_FAMILY[family]} {FORWARDING[0]}" and chain == FORWARDING[1]
                yield Dropping("nft" if is_iptables else "native", family, table, chain, by_rule)


def _refuses_all(rule: Rule) -> bool:
    return replace(rule, comment="") in (Rule(DROP), Rule(REJECT))


def in_the_way(found: Dropping, network: IPNetwork, ours: RulePlace | None) -> bool:
    """Return True if a chain would drop the network's packets. ``ours`` is the place of our accept rules.

    Of other programs' accept rules, only a plain pair (one per direction) and firewalld's zone are
    recognised.
    """
    try:
        if found.is_firewalld:
            return not _is_trusted(found, network)
        before = list(takewhile(lambda rule: not _refuses_all(rule), _rules(found)))
    except OSError:
        return True
    leads_to_ours = found.place == ours and any(rule.verdict == FLANNEL_FWD[1] for rule in before)
    return not leads_to_ours and not accepts(before, network)


def _rules(found: Dropping) -> Sequence[Rule]:
    if found.place == "legacy":
        return xtables.read(found.family, [FORWARDING]).get(FORWARDING, ())
    with Netfilter() as netfilter:
        return netfilter.rules(found.family, found.table, found.chain)


def _is_trusted(found: Dropping, network: IPNetwork) -> bool:
    """Return True if the network is in firewalld's trusted zone."""
    zone = Rule("filter_FWD_trusted", source=Match(network))
    with Netfilter() as netfilter:
        return zone in netfilter.rules(found.family, found.table)


def has_firewalld() -> bool:
    """Return True if firewalld is active in this network namespace, with nftables or iptables."""
    with suppress(OSError), Netfilter() as netfilter:
        if any(table == _FIREWALLD for table, _, _ in netfilter.forwarding(4)):
            return True
        if netfilter.has_chain(4, _FIREWALLDS_CHAIN):
            return True
    with suppress(OSError):
        return xtables.has_chain(4, _FIREWALLDS_CHAIN)
    return False


def accepting(family: Family) -> RulePlace | None:
    """Return the place of an existing daemon's accept rules, or None."""
    with suppress(OSError), Netfilter() as netfilter:
        if netfilter.has_chain(family, FLANNEL_FWD):
            return "nft"
        if netfilter.has_table(family, NATIVE_TABLE[family]):
            return "native"
    with suppress(OSError):
        if xtables.has_chain(family, FLANNEL_FWD):
            return "legacy"
    return None


def accepts(rules: Iterable[Rule], network: IPNetwork) -> bool:
    """Return True if two of the rules accept a network's packets, one per direction."""
    plain = {(rule.source, rule.destination) for rule in rules if _plainly_accepts(rule)}
    return {(Match(network), None), (None, Match(network))} <= plain


def _plainly_accepts(rule: Rule) -> bool:
    return rule.verdict == ACCEPT and not rule.extra and not rule.mark
