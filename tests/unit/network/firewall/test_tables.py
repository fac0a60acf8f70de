"""The table of rules, over a driver in memory: what is desired is a value, and its parts are compared."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_network

import pytest

from flanneld.network.firewall import tables
from flanneld.network.firewall.driver import IptablesRunner, Rejected, Unavailable
from flanneld.network.firewall.fate import Rule
from flanneld.network.firewall.netlink import Removal
from flanneld.network.firewall.placing import RulePlace
from flanneld.network.firewall.rules import Edit, Purpose, RuleOwnership, Rules, desired_rules
from flanneld.network.firewall.tables import RuleSet, RulesTable
from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.runtime import clock
from flanneld.state.resources import Key, Resource
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
    assert list(table.read(Scope({})))
    assert not table.is_swept
    assert [each.key for each in converge(table).removed] == [want.key]
    assert table.is_swept
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


@pytest.mark.parametrize(
    ("place", "removal", "concerns"),
    [
        ("nft", Removal(), True),
        ("nft", Removal(4, "nat"), True),
        ("nft", Removal(4, "nat", "POSTROUTING"), True),
        ("nft", Removal(4, "filter", "FLANNEL-FWD"), True),
        ("nft", Removal(6, "nat", "POSTROUTING"), False),
        ("nft", Removal(4, "nat", "FORWARD"), False),
        ("nft", Removal(4, "flannel-ipv4"), False),
        ("native", Removal(), True),
        ("native", Removal(4, "flannel-ipv4", "postrtg"), True),
        ("native", Removal(4, "nat", "POSTROUTING"), False),
        ("legacy", Removal(4, "nat", "POSTROUTING"), True),
    ],
)
def test_removal_of_what_may_hold_our_rules_is_a_change(
    place: RulePlace, removal: Removal, concerns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told:
        def read(self) -> set[Removal]:
            return {removal}

    monkeypatch.setattr(tables, "Removals", Told)
    table = RulesTable(place, 4, OURS, Memory({}), IptablesRunner(threading.Event()), audit=1.0)
    assert list(table.changes()) == []
    table.listen()
    assert table.audit is None
    assert len(list(table.changes())) == concerns


def test_table_without_notifications_is_read_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(tables, "Removals", refuse)
    table = table_of(Memory({}))
    table.listen()
    assert (table.audit, table.fileno(), list(table.changes())) == (1.0, -1, [])
    assert "No notifications from nf_tables: " in caplog.text


def test_repair_is_described_by_what_was_missing_or_too_many() -> None:
    chain = ("filter", "FLANNEL-FWD")
    inside = FORWARD_ONLY[chain]

    def repair(rules: Rules) -> str:
        table = table_of(Memory(rules))
        want = table.desired(FORWARD_ONLY)
        return converge(table, want).details[want.key]

    assert "filter FLANNEL-FWD (2 rules); filter FORWARD " in repair({})
    assert len(inside) == 2
    told = repair({**FORWARD_ONLY, chain: inside[:1]})
    assert told.startswith("missing were filter FLANNEL-FWD -")
    assert "rules)" not in told
    assert " more" not in told
    assert repair({**FORWARD_ONLY, chain: (*inside, inside[0])}).startswith("too many were ")


def test_long_lists_of_rules_are_cut() -> None:
    lines = [str(number) for number in range(8)]
    assert tables._some(lines) == "0; 1; 2; 3; 4; 5; 6; 7"
    assert tables._some([*lines, "8", "9"]) == "0; 1; 2; 3; 4; 5; 6; 7; and 2 more"


def test_rules_of_an_earlier_run_that_cannot_be_looked_for_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise Unavailable("no iptables", "install it")

    table = RulesTable("legacy", 4, OURS, None, IptablesRunner(threading.Event()))
    monkeypatch.setattr(tables, "driver", refuse)
    monkeypatch.setattr(tables, "may_hold", lambda *_: False)
    assert list(table.read(Scope({}))) == []
    assert table.is_swept
    assert caplog.text == ""
    monkeypatch.setattr(tables, "may_hold", lambda *_: True)
    assert list(table.read(Scope({}))) == []
    assert not table.is_swept
    assert "Rules of an earlier run for IPv4 not removed: no iptables" in caplog.text


def test_destinations_outside_the_network_that_are_spared_are_read_from_our_rules() -> None:
    cloud = ip_network("192.0.2.0/24")
    spared = desired_rules("own-chains", NETS.sparing([cloud]), Purpose(masquerade=True))
    assert table_of(Memory(spared)).spared() == {cloud}
    assert table_of(Memory(OWN)).spared() == set()


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


#: What is there once the rules are set.
SET = {chain: rules for chain, rules in FORWARD_ONLY.items() if rules}


class Racing(Memory):
    """Rules that another program changes, too: ``then`` are those after each change, also a refused one."""

    def __init__(self, rules: Rules, *, refused: int = 0, then: Rules | None = None) -> None:
        super().__init__(rules)
        self.refused = refused
        self.then = then
        self.applied = 0

    def apply(self, edits: Sequence[Edit]) -> None:
        self.applied += 1
        if self.applied <= self.refused:
            if self.then is not None:
                self.rules = self.then
            raise Rejected("a chain has changed", "trying again")
        super().apply(edits)
        if self.then is not None:
            self.rules = self.then


@pytest.mark.parametrize(("refused", "is_made"), [(0, True), (2, True), (3, False)])
def test_change_that_is_refused_is_planned_anew_twice(refused: int, is_made: bool) -> None:
    driver = Racing({}, refused=refused)
    table = table_of(driver)
    want = table.desired(FORWARD_ONLY)
    if is_made:
        report = table.put([Put(want)])
        assert (report.made, report.pending) == ([want], [])
        assert driver.rules == SET
    else:
        with pytest.raises(Rejected, match="a chain has changed"):
            table.put([Put(want)])
    assert driver.applied == min(refused + 1, 3)


def test_change_that_another_program_made_meanwhile_is_none_of_ours() -> None:
    driver = Racing({}, refused=1, then=SET)
    table = table_of(driver)
    assert not table.put([Put(table.desired(FORWARD_ONLY))])
    assert driver.applied == 1


def test_rules_that_are_changed_back_are_read_again_at_once() -> None:
    table = table_of(Racing({}, then={}))
    want = table.desired(FORWARD_ONLY)
    report = table.put([Put(want)])
    assert (report.made, report.pending) == ([want], [want])


class InUse(Memory):
    """Rules of others lead to our chain, so it cannot go."""

    def apply(self, edits: Sequence[Edit]) -> None:
        if any(edit.drop for edit in edits):
            raise Rejected("the chain is in use", "see")
        super().apply(edits)


def test_chain_that_cannot_go_is_emptied_and_left_alone() -> None:
    driver = InUse(FORWARD_ONLY)
    table = table_of(driver)
    (seen,) = table.read(Scope({}))
    report = table.drop([seen.resource])
    assert report.removed == [seen.resource]
    assert (
        "filter FLANNEL-FWD, emptied but not removed: a rule leads there" in report.details[table_key(table)]
    )
    assert not any(driver.rules.values())
    assert list(table.read(Scope({}))) == []
    assert table.is_swept


def table_key(table: RulesTable) -> Key:
    return table.desired({}).key


def test_place_in_use_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Rules:
        raise Unavailable("no iptables", "install it")

    driver = Memory({})
    monkeypatch.setattr(driver, "read", refuse)
    with pytest.raises(Unavailable):
        list(table_of(driver).read(Scope({})))


def test_rules_stay_when_the_table_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        closed = 0

        def fileno(self) -> int:
            return 99

        def close(self) -> None:
            Told.closed += 1

    monkeypatch.setattr(tables, "Removals", Told)
    driver = Memory(FORWARD_ONLY)
    table = table_of(driver)
    table.close(remove=True)
    table.listen()
    assert table.fileno() == 99
    table.close(remove=True)
    assert (driver.rules, Told.closed) == (FORWARD_ONLY, 1)


def test_table_says_what_it_holds() -> None:
    table = table_of(Memory({}))
    assert (table.name, table.what, str(table.desired({}))) == (
        "firewall-ipv4",
        "the rules for IPv4",
        "our rules with memory",
    )
    left = RulesTable("legacy", 6, OURS, None, IptablesRunner(threading.Event()))
    assert not left.is_swept
    assert left.name == "firewall-ipv6-legacy"
    assert left.what == "removals of an earlier run's rules for IPv6 (legacy)"
