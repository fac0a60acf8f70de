"""Reconciler table for the packet filter: one family's rules in one place, in use or of an earlier run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.model import Family, IPNetwork
from flanneld.network.firewall.driver import Driver, IptablesRunner, Rejected, Unavailable, carry_out
from flanneld.network.firewall.fate import RETURN, Rule
from flanneld.network.firewall.iptables_text import rule_text
from flanneld.network.firewall.netlink import Removal, Removals
from flanneld.network.firewall.placing import RulePlace, described, driver, may_hold
from flanneld.network.firewall.rules import (
    IPTABLES_CHAINS,
    NATIVE_TABLE,
    Chain,
    Edit,
    Rules,
    edits_for,
    lost,
    networks_of,
)
from flanneld.network.firewall.rules import RuleOwnership as RulesClaim
from flanneld.state.resources import Key, Kind, Resource
from flanneld.state.table import Changes, Claim, Put, Report, Scope, Seen

log = logging.getLogger(__name__)

#: Plans per repair: others may change the rules between our read and our write.
_ATTEMPTS = 3
#: Rules to list in one log line, at most.
_FEW = 8


class RuleSet(Struct, frozen=True, gc=False):
    """One family's rules in one place, as ``name`` sets them.

    Those found are all in the chains that may hold ours, unless ours are as desired.
    """

    kind: ClassVar[Kind] = Kind.RULES
    table: str
    name: str
    rules: tuple[tuple[Chain, tuple[Rule, ...]], ...] = ()

    @property
    def key(self) -> Key:
        return (self.table, self.name)

    def __str__(self) -> str:
        return f"our rules with {self.name}"


class RulesTable:
    """Table of one family's rules in one place.

    ``through`` is the driver of the place in use, whose legacy tables are read every ``audit`` seconds. None
    means a place that may hold rules of an earlier run: they are looked for once, after the tables in
    ``needs``.
    """

    worker = "firewall"
    vital = False

    def __init__(
        self,
        place: RulePlace,
        family: Family,
        claim: RulesClaim,
        through: Driver | None,
        commands: IptablesRunner,
        *,
        audit: float | None = None,
        needs: frozenset[str] = frozenset(),
    ) -> None:
        self.family = family
        self.name = f"firewall-ipv{family}" + ("" if through else f"-{place}")
        stale = f"removals of an earlier run's rules for IPv{family} ({place})"
        self.what = f"the rules for IPv{family}" if through else stale
        self.audit = audit
        self.needs = needs
        self._place: RulePlace = place
        self.is_used = through is not None
        self._driver = through
        self._commands = commands
        self._claim = claim
        self._removals: Removals | None = None
        self._was_right = self._lacks_random = False
        #: No rule of an earlier run is left, and the place could be read.
        self.is_swept = False
        #: Edits of chains that could only be flushed, because foreign rules refer to them.
        self._stuck: set[Edit] = set()
        self._found: Rules = {}

    def desired(self, rules: Rules) -> RuleSet:
        """Return the rules as a resource of this table, which is in use."""
        assert self._driver is not None
        return RuleSet(self.name, self._driver.name, tuple(rules.items()))

    def listen(self) -> None:
        """Have nf_tables notify of removals, instead of periodic reads."""
        try:
            self._removals = Removals()
        except OSError as error:
            log.warning("No notifications from nf_tables: %s; reading the rules periodically", error)
            return
        self.audit = None

    def spared(self) -> set[IPNetwork]:
        """Return the destinations outside the network that see the containers' addresses now."""
        ours = (
            rule for chain, rules in self._read().items() for rule in rules if self._claim.owns(chain, rule)
        )
        nets = (net for rule in ours if rule.verdict == RETURN for net in networks_of(rule)[1:])
        return {net for net in nets if not self._claim.covers(net)}

    def read(self, scope: Scope) -> Iterator[Seen]:
        want = next(iter(scope.desired.values()), None)
        edits = self._look(want)
        if want and not edits:
            yield Seen(want)
        elif edits and self._driver:
            found = RuleSet(self.name, self._driver.name, tuple(self._found.items()))
            yield Seen(found, Claim.OURS if want else Claim.LEFT)

    def put(self, puts: Sequence[Put]) -> Report:
        """Set the rules, and read them back. Raises ``Retryable``."""
        (want,) = (put.want for put in puts)
        assert isinstance(want, RuleSet)
        report, failure = Report(), Retryable("the rules keep changing", "trying again")
        edits = self._plan(want)
        for _ in range(_ATTEMPTS):
            found = self._found
            try:
                self._carry_out(edits, want)
            except Rejected as rejection:
                failure = rejection
                edits = self._look(want)
                if not edits:
                    return report
                continue
            # Discard the notifications of our own change: the read below covers it.
            list(self.changes())
            report.made.append(want)
            report.details[want.key] = _what(edits, found)
            if self._look(want):
                report.pending.append(want)
            return report
        raise failure

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove the rules. Raises ``Retryable``."""
        report = Report()
        edits = self._plan(None)
        stuck = carry_out(self._driver, edits) if self._driver else ()
        self._stuck.update(stuck)
        self.is_swept = True
        report.removed += found
        report.details |= {each.key: _some(list(described(edits, stuck))) for each in found}
        return report

    def script(self, scope: Scope) -> Iterator[str]:
        """Yield a shell script that sets the desired rules, or removes ours without any."""
        edits = self._look(next(iter(scope.desired.values()), None))
        if edits and self._driver:
            yield from self._driver.script(edits)

    def close(self, *, remove: bool) -> None:
        """Keep the rules: containers stay connected without a daemon."""
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

    def _look(self, want: Resource | None) -> tuple[Edit, ...]:
        """Read the rules. Return the edits that correct them."""
        self.is_swept = True
        self._found = self._read()
        edits = self._plan(want)
        self.is_swept = self.is_swept and not edits
        self._was_right = self._was_right or not edits
        return edits

    def _read(self) -> Rules:
        try:
            if self._driver is None:
                if not may_hold(self._place, self.family, self._claim):
                    return {}
                self._driver = driver(self._place, self.family, self._commands)
            return self._driver.read()
        except Unavailable as missing:
            if self.is_used:
                raise
            log.warning("Rules of an earlier run for IPv%d not removed: %s", self.family, missing)
            self.is_swept = False
            return {}

    def _plan(self, want: Resource | None) -> tuple[Edit, ...]:
        rules: Rules = dict(want.rules) if isinstance(want, RuleSet) else {}
        if self._lacks_random:
            rules = _without_random(rules)
        return tuple(edit for edit in edits_for(rules, self._found, self._claim) if edit not in self._stuck)

    def _carry_out(self, edits: tuple[Edit, ...], want: RuleSet) -> None:
        assert self._driver is not None
        try:
            self._stuck.update(carry_out(self._driver, edits))
        except Rejected:
            plainer = self._plan(replace(want, rules=tuple(_without_random(dict(want.rules)).items())))
            if self._was_right or plainer == edits:
                raise
            self._stuck.update(carry_out(self._driver, plainer))
            self._lacks_random = True
            log.warning("%s lacks --random-fully: masquerading without it", self._driver.name)


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
