"""Bringing one family's rules from what they are to what they should be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from flanneld.errors import Retryable
from flanneld.network.firewall.driver import Driver, Rejected, carry_out
from flanneld.network.firewall.iptables.text import rule_text
from flanneld.network.firewall.plan import Claim, Edit, lost, plan
from flanneld.network.firewall.rules import Chain, Rule, Rules
from flanneld.network.firewall.sweep import described

log = logging.getLogger(__name__)

#: Others may change the rules between our look and our change.
_ATTEMPTS = 3


class Change(Struct, frozen=True, gc=False):
    """What was put in place, how many rules that were, and what was removed. None at all: a wrong order.

    ``held`` is false if a part of it was undone again before it could be read back.
    """

    missing: tuple[str, ...]
    number: int
    removed: tuple[str, ...]
    held: bool = True


class Upkeep:
    """What is wanted of one family's rules, what is ours among those found, and the way there."""

    def __init__(self, driver: Driver, wanted: Rules, claim: Claim) -> None:
        self.name = driver.name
        #: Whether the rules have ever been right.
        self.settled = False
        self._driver = driver
        self._wanted = wanted
        self._claim = claim
        self._stuck: set[Edit] = set()

    def converge(self, changed: Callable[[], None]) -> Change | None:
        """Read, compare, change and read again. None: all was right at once.

        ``changed`` is called after the change, before the reading that follows. Raises ``Retryable``.
        """
        change: Change | None = None
        failure: Retryable | None = None
        for _ in range(_ATTEMPTS):
            try:
                found = self._driver.read()
                edits = self._plan(self._wanted, found)
                if not edits:
                    self.settled = True
                    return change
                if change:
                    return replace(change, held=False)
                self._carry_out(edits, found)
            except Rejected as rejection:
                failure = rejection
                continue
            change = _change(edits, found)
            changed()
        raise failure or Retryable(f"{self.name} cannot be read", "trying again")

    def _plan(self, wanted: Rules, found: Rules) -> tuple[Edit, ...]:
        return tuple(edit for edit in plan(wanted, found, self._claim) if edit not in self._stuck)

    def _carry_out(self, edits: Sequence[Edit], found: Rules) -> None:
        try:
            self._stuck.update(carry_out(self._driver, edits))
        except Rejected:
            plainer = _without_random(self._wanted)
            if self.settled or plainer == self._wanted:
                raise
            self._stuck.update(carry_out(self._driver, self._plan(plainer, found)))
            self._wanted = plainer
            log.warning("%s has no fully random source ports: masquerading without", self.name)


def _without_random(rules: Rules) -> Rules:
    return {chain: tuple(replace(rule, random=False) for rule in inside) for chain, inside in rules.items()}


def _change(edits: Sequence[Edit], found: Rules) -> Change:
    missing: dict[Chain, list[Rule]] = {}
    for chain, rule in lost(edits, found):
        missing.setdefault(chain, []).append(rule)
    words = tuple(
        f"{table} {chain} {rule_text(rules[0]) if len(rules) == 1 else f'({len(rules)} rules)'}"
        for (table, chain), rules in missing.items()
    )
    removed = described([edit for edit in edits if not edit.append])
    return Change(words, sum(map(len, missing.values())), tuple(removed))
