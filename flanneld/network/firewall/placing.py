"""Places of flannel's rules: the choice of the iptables flavour, and removal from places no longer used.

The tests for the flavour in use, legacy or on nf_tables, and their order are those of the Kubernetes
project's iptables-wrappers. Unlike those scripts, this starts no process, and creates no table by listing it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from flanneld.compat.glog import V
from flanneld.errors import Retryable, cause_of
from flanneld.findings import Command, command
from flanneld.model import Family
from flanneld.network.firewall import xtables
from flanneld.network.firewall.driver import Driver, IptablesFailed, IptablesRunner, Unavailable
from flanneld.network.firewall.iptables import Flavour, Restore, program
from flanneld.network.firewall.iptables_text import rule_text, rule_words
from flanneld.network.firewall.netlink import Netfilter, NoNetfilter
from flanneld.network.firewall.rules import (
    FLANNEL_FWD,
    FLANNEL_POSTRTG,
    IPTABLES_CHAINS,
    NATIVE_TABLE,
    NFT_FAMILY,
    TRIALS,
    Chain,
    Edit,
    RuleOwnership,
    Rules,
    edits_for,
)
from flanneld.runtime.command import find

log = logging.getLogger(__name__)

FlavourOption = Literal["auto", "legacy", "nft"]

_FLAVOURS: tuple[Flavour, ...] = ("nft", "legacy")
_ALL: tuple[Family, ...] = (4, 6)
#: Chains that kubelet and kube-proxy leave, one or the other, in the tables they use.
_HINTS: tuple[Chain, ...] = (("mangle", "KUBE-IPTABLES-HINT"), ("mangle", "KUBE-KUBELET-CANARY"))
_PACKAGE = "install the Debian package iptables"


class IptablesFacts(Struct, frozen=True, gc=False):
    """Findings about a host's iptables, for ``choose``.

    The numbers count others' rules. ``nft_rules`` is only determined if there are ``legacy_rules``,
    else 0. ``usual`` is the flavour of the plain ``iptables`` command, only determined if the legacy tables
    are unreadable.
    """

    installed: frozenset[Flavour]
    hinted: frozenset[Flavour] = frozenset()
    legacy_rules: int = 0
    nft_rules: int = 0
    nft_works: bool = True
    usual: Flavour | None = None


def choose(wish: FlavourOption, facts: IptablesFacts) -> tuple[Flavour, str]:
    """Return the flavour and the reason (pure). Raises ``Unavailable`` if its commands are missing."""
    if wish != "auto":
        if wish not in facts.installed:
            raise Unavailable(f"iptables-{wish}-restore is not installed", _PACKAGE)
        return wish, "requested by -iptables-flavour"
    if not facts.installed:
        raise Unavailable("neither iptables-nft-restore nor iptables-legacy-restore is installed", _PACKAGE)
    if len(facts.installed) == 1:
        return next(iter(facts.installed)), "the only one installed"
    for flavour in _FLAVOURS:
        if flavour in facts.hinted:
            return flavour, "in use by Kubernetes"
    if facts.usual in facts.installed and facts.usual:
        return facts.usual, "flavour of the host's iptables; only root can read the legacy tables"
    if facts.legacy_rules and facts.legacy_rules >= facts.nft_rules:
        return "legacy", f"{facts.legacy_rules} rules in the legacy tables, {facts.nft_rules} in nf_tables"
    if not facts.nft_works:
        return "legacy", "the kernel has no nf_tables"
    some = f"{facts.nft_rules} rules in nf_tables, {facts.legacy_rules} in the legacy tables"
    return "nft", some if facts.legacy_rules else "no legacy rules found"


def look(families: Sequence[Family]) -> IptablesFacts:
    """Return the host's facts. The commands are needed for the given families only."""
    installed = frozenset(
        flavour
        for flavour in _FLAVOURS
        if all(find(f"{program(flavour, family)}-restore") for family in families)
    )
    hinted: set[Flavour] = set()
    legacy_rules = nft_rules = 0
    usual: Flavour | None = None
    try:
        if any(xtables.has_chain(family, hint) for family in _ALL for hint in _HINTS):
            hinted.add("legacy")
        legacy_rules = sum(map(xtables.count_rules, _ALL))
    except OSError as error:
        log.log(V(1), "Cannot read the legacy tables: %s", error)
        usual = _usual()
    try:
        with Netfilter() as netfilter:
            if any(netfilter.has_chain(family, hint) for family in _ALL for hint in _HINTS):
                hinted.add("nft")
            nft_rules = netfilter.count_rules() if legacy_rules else 0
    except OSError as error:
        log.log(V(1), "Cannot ask nf_tables: %s", error)
        return IptablesFacts(installed, frozenset(hinted), legacy_rules, nft_works=False, usual=usual)
    return IptablesFacts(installed, frozenset(hinted), legacy_rules, nft_rules, usual=usual)


def _usual() -> Flavour | None:
    """Return the flavour that the ``iptables`` symlink (Debian's alternatives) resolves to, or None."""
    target = os.path.realpath(find("iptables") or "")
    return next((flavour for flavour in _FLAVOURS if flavour in Path(target).name.split("-")), None)


#: Places of our rules: iptables tables of either flavour, or our own tables in nftables.
RulePlace = Literal["nft", "legacy", "native"]
PLACES: tuple[RulePlace, ...] = ("nft", "legacy", "native")

#: Held while rules are tried: the networks of a daemon would try theirs in the same chain.
_TRIAL = threading.Lock()


def driver(place: RulePlace, family: Family, commands: IptablesRunner) -> Driver:
    """Return the basic driver of a place. Raises ``Unavailable``."""
    if place != "native":
        return Restore(place, family, commands)
    from flanneld.network.firewall.nftables import Nftables  # not needed on most hosts

    return Nftables(family)


def must_be_native(
    flavour: Flavour,
    desired: Mapping[Family, Rules],
    native: Mapping[Family, Rules],
    commands: IptablesRunner,
) -> bool:
    """Return True if the kernel refuses the desired rules in iptables' tables, and takes the ``native`` ones.

    It may lack x_tables, or a match such as xt_comment, where these are in a package of their own. The rules
    are tried, unless some that are there show that it takes them.
    """
    try:
        for family, rules in desired.items():
            with _TRIAL:
                there = Restore(flavour, family, commands)
                if any(rules.values()) and not _holds_some(there, flavour, family, rules):
                    there.check(rules)
    except IptablesFailed as failure:
        refusal = next(iter(failure.stderr.strip().splitlines()), failure.problem)
    except Retryable as failure:
        log.log(V(1), "Cannot try iptables' rules: %s", failure)
        return False
    else:
        return False
    from flanneld.network.firewall.nftables import Nftables

    try:
        for family, rules in native.items():
            Nftables(family).check(rules)
    except Retryable as failure:
        log.warning("The kernel refuses iptables' rules: %s; nftables is no way out: %s", refusal, failure)
        return False
    log.info("The kernel refuses iptables' rules: %s; using nftables", refusal)
    return True


def _holds_some(driver: Restore, flavour: Flavour, family: Family, rules: Rules) -> bool:
    """Return True if flannel's chains are there, which is known without a command, or some of these rules."""
    try:
        if flavour == "nft":
            with Netfilter() as netfilter:
                if any(netfilter.has_chain(family, chain) for chain in (FLANNEL_POSTRTG, FLANNEL_FWD)):
                    return True
        found = driver.read()
    except (OSError, Retryable):
        return False
    return any(rule in found.get(chain, ()) for chain, each in rules.items() for rule in each)


def may_hold(place: RulePlace, family: Family, claim: RuleOwnership) -> bool:
    """Return True if a place may contain our rules, by cheap tests only. Raises ``Retryable``."""
    try:
        if place == "legacy":
            return any(table in xtables.tables(family) for table, _ in IPTABLES_CHAINS)
        with Netfilter() as netfilter:
            if place == "native":
                return netfilter.has_table(family, NATIVE_TABLE[family])
            chains = (FLANNEL_POSTRTG, FLANNEL_FWD, *TRIALS, *(chain for chain, _ in claim.blocks))
            return any(netfilter.has_chain(family, chain) for chain in chains)
    except (NoNetfilter, PermissionError) as reason:
        log.log(V(1), "No search for stale rules in %s: %s", place, reason)
        return False
    except OSError as error:
        raise Retryable(f"cannot ask the kernel: {cause_of(error)}", "run with CAP_NET_ADMIN") from error


def stale_rules(
    place: RulePlace, family: Family, claim: RuleOwnership, commands: IptablesRunner | None = None
) -> tuple[Driver | None, tuple[Edit, ...]]:
    """Return the driver of a place, and the edits that remove all our rules there. Raises ``Retryable``."""
    if not may_hold(place, family, claim):
        return None, ()
    there = driver(place, family, commands or IptablesRunner())
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
