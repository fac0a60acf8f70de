"""Removal of flannel's rules from places it no longer uses."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

from flanneld.compat.glog import V
from flanneld.errors import Retryable, cause_of
from flanneld.model import Family
from flanneld.network.firewall.command import IptablesRunner
from flanneld.network.firewall.driver import Driver
from flanneld.network.firewall.edits import Edit, RuleOwnership, edits_for
from flanneld.network.firewall.iptables import xtables
from flanneld.network.firewall.iptables.restore import Restore, program
from flanneld.network.firewall.iptables.text import rule_text, rule_words
from flanneld.network.firewall.nftables.netlink import Netfilter, NoNetfilter
from flanneld.network.firewall.rules import (
    FLANNEL_FWD,
    FLANNEL_POSTRTG,
    IPTABLES_CHAINS,
    NATIVE_TABLE,
    NFT_FAMILY,
)
from flanneld.runtime.shell import Command, command

log = logging.getLogger(__name__)

#: Places of our rules: iptables tables of either flavour, or our own tables in nftables.
RulePlace = Literal["nft", "legacy", "native"]
PLACES: tuple[RulePlace, ...] = ("nft", "legacy", "native")


def driver(place: RulePlace, family: Family, commands: IptablesRunner) -> Driver:
    """Return the basic driver of a place. Raises ``Unavailable``."""
    if place != "native":
        return Restore(place, family, commands)
    from flanneld.network.firewall.nftables.driver import Nftables  # not needed on most hosts

    return Nftables(family)


def may_hold(place: RulePlace, family: Family, claim: RuleOwnership) -> bool:
    """Return True if a place may contain our rules, by cheap tests only. Raises ``Retryable``."""
    try:
        if place == "legacy":
            return any(table in xtables.tables(family) for table, _ in IPTABLES_CHAINS)
        with Netfilter() as netfilter:
            if place == "native":
                return netfilter.has_table(family, NATIVE_TABLE[family])
            chains = (FLANNEL_POSTRTG, FLANNEL_FWD, *(chain for chain, _ in claim.blocks))
            return any(netfilter.has_chain(family, chain) for chain in chains)
    except (NoNetfilter, PermissionError) as reason:
        log.log(V(1), "No search for stale rules in %s: %s", place, reason)
        return False
    except OSError as error:
        raise Retryable(f"cannot ask the kernel: {cause_of(error)}", "run with CAP_NET_ADMIN") from error


def stale_rules(
    place: RulePlace, family: Family, claim: RuleOwnership, commands: IptablesRunner
) -> tuple[Driver | None, tuple[Edit, ...]]:
    """Return the driver of a place, and the edits that remove all our rules there. Raises ``Retryable``."""
    if not may_hold(place, family, claim):
        return None, ()
    there = driver(place, family, commands)
    return there, edits_for({}, there.read(), claim)


def commands_of(place: RulePlace, family: Family, edits: Sequence[Edit]) -> Iterator[Command]:
    """Yield the commands by which an operator would make the same edits."""
    for edit in edits:
        table, chain = edit.chain
        if place == "native":
            name = command("chain", NFT_FAMILY[family], table, chain)
            yield ("nft", "flush", *name)
            yield ("nft", "delete", *name)
            continue
        start = command(program(place, family), "-t", table)
        yield from ((*start, "-D", chain, *rule_words(rule)) for rule in edit.delete)
        if edit.drop:
            yield (*start, "-F", chain)
            yield (*start, "-X", chain)


def described(edits: Sequence[Edit], stuck: Sequence[Edit] = ()) -> Iterator[str]:
    """Describe what a plan removes."""
    for edit in edits:
        table, chain = edit.chain
        for rule in edit.delete:
            yield f"{table} {chain} {rule_text(rule)}"
        if edit.drop:
            yield f"{table} {chain}" + (
                ", emptied but not removed: a rule leads there" if edit in stuck else ""
            )
