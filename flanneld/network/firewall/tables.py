"""Reconciler tables for the packet filter: one family's rules, and an earlier run's rules elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.model import Family
from flanneld.network.firewall.command import IptablesRunner
from flanneld.network.firewall.driver import Driver, Rejected, Unavailable, carry_out
from flanneld.network.firewall.edits import Edit, edits_for, lost
from flanneld.network.firewall.edits import RuleOwnership as RulesClaim
from flanneld.network.firewall.iptables.text import rule_text
from flanneld.network.firewall.nftables.netlink import Removal, Removals
from flanneld.network.firewall.rules import IPTABLES_CHAINS, NATIVE_TABLE, Chain, Rule, Rules
from flanneld.network.firewall.rules_sweep import RulePlace, described, stale_rules
from flanneld.state.report import Report
from flanneld.state.resources import Key, Kind, Resource
from flanneld.state.table import Changes, Claim, Put, Scope, Seen

log = logging.getLogger(__name__)

#: Plans per repair: others may change the rules between our read and our write.
_ATTEMPTS = 3
#: Rules to list in one log line, at most.
_FEW = 8


class RuleSet(Struct, frozen=True, gc=False):
    """One family's rules in one place. ``edits`` would correct them, none if they are correct."""

    kind: ClassVar[Kind] = Kind.RULES
    table: str
    name: str
    edits: tuple[Edit, ...] = ()

    @property
    def key(self) -> Key:
        return (self.table, self.name)

    def __str__(self) -> str:
        return f"our rules with {self.name}"


class RulesTable:
    """Table of one family's rules.

    ``removals`` reports removals in nf_tables. The legacy tables send no notifications and are read every
    ``audit`` seconds.
    """

    worker = "firewall"
    vital = False
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        family: Family,
        place: RulePlace,
        driver: Driver,
        rules: Rules,
        claim: RulesClaim,
        *,
        removals: Removals | None,
        audit: float | None,
    ) -> None:
        self.family = family
        self.name = f"firewall-ipv{family}"
        self.what = f"the rules for IPv{family}"
        self.audit = audit
        self.desired = RuleSet(self.name, driver.name)
        self._place = place
        self._driver = driver
        self._rules = rules
        self._claim = claim
        self._removals = removals
        self._was_right = False
        #: Edits of chains that could only be flushed, because foreign rules refer to them.
        self._stuck: set[Edit] = set()
        self._found: Rules = {}

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        yield Seen(RuleSet(self.name, self._driver.name, self._missing()))

    def put(self, puts: Sequence[Put]) -> Report:
        """Apply the edits, and read the rules back. Raises ``Retryable``."""
        del puts
        report, failure = Report(), Retryable("the rules keep changing", "trying again")
        edits = self._plan(self._rules)
        for _ in range(_ATTEMPTS):
            found = self._found
            try:
                self._carry_out(edits)
            except Rejected as rejection:
                failure = rejection
                edits = self._missing()
                if not edits:
                    return report
                continue
            # Discard the notifications of our own change: the read below covers it.
            list(self.changes())
            report.made.append(self.desired)
            report.details[self.desired.key] = _what(edits, found)
            if self._missing():
                report.pending.append(self.desired)
            return report
        raise failure

    def drop(self, found: Sequence[Resource]) -> Report:
        """Keep the rules: containers stay connected without a daemon."""
        del found
        return Report()

    def close(self, *, remove: bool) -> None:
        del remove
        if self._removals is not None:
            self._removals.close()

    def fileno(self) -> int:
        return -1 if self._removals is None else self._removals.fileno()

    def changes(self) -> Iterable[Changes]:
        removals = () if self._removals is None else self._removals.read()
        return [Changes(each.by) for each in removals if self._concerns_us(each)]

    def _concerns_us(self, removal: Removal) -> bool:
        if removal.family not in (None, self.family):
            return False
        if self._place == "native":
            return removal.table in ("", NATIVE_TABLE[self.family])
        return any(
            removal.table in ("", table) and removal.chain in ("", name) for table, name in IPTABLES_CHAINS
        )

    def _missing(self) -> tuple[Edit, ...]:
        self._found = self._driver.read()
        edits = self._plan(self._rules)
        self._was_right = self._was_right or not edits
        return edits

    def _plan(self, rules: Rules) -> tuple[Edit, ...]:
        return tuple(edit for edit in edits_for(rules, self._found, self._claim) if edit not in self._stuck)

    def _carry_out(self, edits: Sequence[Edit]) -> None:
        try:
            self._stuck.update(carry_out(self._driver, edits))
        except Rejected:
            plainer = _without_random(self._rules)
            if self._was_right or plainer == self._rules:
                raise
            self._stuck.update(carry_out(self._driver, self._plan(plainer)))
            self._rules = plainer
            log.warning("%s lacks --random-fully: masquerading without it", self._driver.name)


class StaleRules(Struct, frozen=True, gc=False):
    """Rules of an earlier run in one place."""

    kind: ClassVar[Kind] = Kind.RULES
    table: str
    place: RulePlace
    family: Family
    edits: tuple[Edit, ...]

    @property
    def key(self) -> Key:
        return (self.table, self.place)

    def __str__(self) -> str:
        return f"what an earlier run left of the rules for IPv{self.family}"


class StaleRulesTable:
    """Table of one family's rules in a place that is not in use. Its desired state is empty."""

    worker = "firewall"
    vital = False
    audit: float | None = None

    def __init__(
        self,
        place: RulePlace,
        family: Family,
        claim: RulesClaim,
        commands: IptablesRunner,
        needs: frozenset[str],
    ) -> None:
        self.name = f"firewall-ipv{family}-{place}"
        self.what = f"removals of what an earlier run left for IPv{family} ({place})"
        self.needs = needs
        self._place: RulePlace = place
        self._family = family
        self._claim = claim
        self._commands = commands

    def read(self, scope: Scope) -> Iterator[Seen]:
        del scope
        try:
            edits = stale_rules(self._place, self._family, self._claim, self._commands)[1]
        except Unavailable as missing:
            log.warning("Rules of an earlier run for IPv%d not removed: %s", self._family, missing)
            return
        if edits:
            yield Seen(StaleRules(self.name, self._place, self._family, edits), Claim.LEFT)

    def put(self, puts: Sequence[Put]) -> Report:
        """Create nothing: this table has no desired state."""
        assert not puts
        return Report()

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove the stale rules. Raises ``Retryable``."""
        report = Report()
        driver, edits = stale_rules(self._place, self._family, self._claim, self._commands)
        if driver is not None and edits:
            stuck = carry_out(driver, edits)
            report.removed += found
            for each in found:
                report.details[each.key] = _some(
                    [f"{driver.name}: {line}" for line in described(edits, stuck)]
                )
        return report

    def close(self, *, remove: bool) -> None:
        del remove


def _without_random(rules: Rules) -> Rules:
    return {chain: tuple(replace(rule, random=False) for rule in inside) for chain, inside in rules.items()}


def _what(edits: Sequence[Edit], found: Rules) -> str:
    """Describe what was wrong before these edits."""
    missing: dict[Chain, list[Rule]] = {}
    for chain, rule in lost(edits, found):
        missing.setdefault(chain, []).append(rule)
    if missing:
        names = [
            f"{table} {chain} {rule_text(rules[0]) if len(rules) == 1 else f'({len(rules)} rules)'}"
            for (table, chain), rules in missing.items()
        ]
        return f"missing were {_some(names)}"
    removed = list(described([edit for edit in edits if not edit.append]))
    return f"too many were {_some(removed)}" if removed else "their order was wrong"


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _FEW} more" if len(lines) > _FEW else ""
    return "; ".join(lines[:_FEW]) + more
