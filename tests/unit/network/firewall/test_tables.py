"""The table of rules, over a driver in memory: what is desired is a value, and its parts are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from flanneld.network.firewall.driver import IptablesRunner, Rejected
from flanneld.network.firewall.edits import Edit, RuleOwnership
from flanneld.network.firewall.fate import Rule
from flanneld.network.firewall.rules import Purpose, Rules, desired_rules
from flanneld.network.firewall.tables import RuleSet, RulesTable
from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.runtime import clock
from flanneld.state.resources import Resource
from flanneld.state.table import Put, Report, Scope
from tests.unit.network.firewall.test_edits import LOOK_ALIKES, NETS, OURS, OWN, simulate

FORWARD_ONLY = desired_rules("own-chains", NETS, Purpose(forward=True))


class Memory:
    """Rules of one family, as iptables-restore would change them."""

    name = "memory"

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def read(self) -> Rules:
        return self.rules

    def apply(self, edits: Sequence[Edit]) -> None:
        self.rules = simulate(self.rules, tuple(edits))

    def script(self, edits: Sequence[Edit]) -> Iterator[str]:
        yield from (f"edit {edit.chain[1]}" for edit in edits)


def table_of(driver: Memory, mine: RuleOwnership = OURS) -> RulesTable:
    return RulesTable("nft", 4, mine, driver, IptablesRunner(threading.Event()), audit=1.0)


def converge(table: RulesTable, *desired: Resource) -> Report:
    return Reconciler([table], desired_by_table(desired), lambda: False).converge(clock.now())


def test_rules_are_set_from_the_desired_value() -> None:
    driver = Memory({})
    table = table_of(driver)
    for rules in (OWN, FORWARD_ONLY, OWN):
        want = table.desired(rules)
        assert converge(table, want).made == [want]
        assert {chain: driver.rules.get(chain, ()) for chain in OWN} == {
            chain: rules.get(chain, ()) for chain in OWN
        }
        assert not converge(table, want)


def test_rule_sets_differ_by_their_rules() -> None:
    table = table_of(Memory({}))
    assert table.desired(OWN) == table.desired(dict(OWN)) != table.desired(FORWARD_ONLY)


def test_rules_found_are_shown_unless_ours_are_right() -> None:
    table = table_of(Memory(FORWARD_ONLY))
    for desired, shown in ((FORWARD_ONLY, FORWARD_ONLY), (OWN, FORWARD_ONLY), (None, FORWARD_ONLY)):
        wants = [table.desired(desired)] if desired else []
        (seen,) = table.read(Scope({each.key: each for each in wants}))
        assert isinstance(seen.resource, RuleSet)
        assert dict(seen.resource.rules) == shown


def test_rules_that_are_not_desired_are_removed_and_those_of_others_stay() -> None:
    driver = Memory(LOOK_ALIKES)
    table = table_of(driver)
    want = table.desired(OWN)
    converge(table, want)
    assert [each.key for each in converge(table).removed] == [want.key]
    assert driver.rules == LOOK_ALIKES


def test_script_names_what_the_reconciler_would_change() -> None:
    driver = Memory({})
    table = table_of(driver)
    want = table.desired(FORWARD_ONLY)
    scope = Scope({want.key: want})
    assert [*table.script(scope)] == ["edit FLANNEL-FWD", "edit FORWARD"]
    converge(table, want)
    assert [*table.script(scope)] == []
    assert [*table.script(Scope({}))] == ["edit FORWARD", "edit FLANNEL-FWD"]


class Rejecting(Memory):
    """Rules whose kernel refuses some of them, as one without --random-fully does."""

    def __init__(self, refuses: Callable[[Rule], bool]) -> None:
        super().__init__({})
        self._refuses = refuses

    def apply(self, edits: Sequence[Edit]) -> None:
        changed = simulate(self.rules, tuple(edits))
        if any(self._refuses(rule) for inside in changed.values() for rule in inside):
            raise Rejected("the kernel refuses a rule", "see its log")
        self.rules = changed


def test_kernel_without_random_ports_gets_the_rules_without_them(caplog: pytest.LogCaptureFixture) -> None:
    driver = Rejecting(lambda rule: rule.random)
    table = table_of(driver)
    want = table.desired(OWN)
    assert converge(table, want).made == [want]
    plain = desired_rules("own-chains", NETS, Purpose(masquerade=True, forward=True, random=False))
    assert {chain: driver.rules[chain] for chain in plain} == plain
    assert "memory lacks --random-fully: masquerading without it" in caplog.text
    assert not converge(table, want)


def test_rules_that_are_refused_for_another_reason_are_no_reason_to_do_without_random_ports(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = table_of(Rejecting(lambda _rule: True))
    want = table.desired(FORWARD_ONLY)
    with pytest.raises(Rejected):
        table.put([Put(want)])
    assert "random-fully" not in caplog.text
