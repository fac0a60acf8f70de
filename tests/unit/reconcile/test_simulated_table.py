"""The simulated table holds what the conformance suite expects of every table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.state.resources import Key
from flanneld.state.table import Claim, Seen, Table
from tests.conformance.suite import PROPERTIES, Subject, after_any_history_all_is_as_wanted
from tests.unit.reconcile.simulated_table import SimulatedTable, Thing


class Simulated(Subject):
    """A host whose things outlive the table of one run. Commands are ``VERB NAME``."""

    resources = (Thing("a"), Thing("b", 2), Thing("c", 3))
    drifts = ("change a", "remove b")
    foreign = ("add theirs",)

    def __init__(self) -> None:
        self._held: dict[Key, Seen] = {}
        self._table = SimulatedTable()

    def make(self) -> Table:
        self._table = SimulatedTable()
        self._table.held = self._held
        return self._table

    def do(self, command: str, *, check: bool = True) -> str:
        del check
        verb, _, name = command.partition(" ")
        thing = Thing(name, 99)
        match verb:
            case "change":
                self._table.change(thing, thing.key)
            case "remove":
                self._table.change(None, thing.key)
            case "add":
                self._held[thing.key] = Seen(thing, Claim.FOREIGN)
        return ""

    def show_foreign(self) -> str:
        return "\n".join(str(seen) for seen in self._held.values() if seen.claim is Claim.FOREIGN)

    @contextmanager
    def blind(self, table: Table) -> Iterator[None]:
        assert isinstance(table, SimulatedTable)
        table.unreadable = "not now"
        yield


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda each: each.__name__)
def test_simulated_table_is_as_the_reconciler_expects(holds: Callable[[Subject], None]) -> None:
    holds(Simulated())


@given(data=st.data())
def test_simulated_table_is_as_wanted_after_any_history(data: st.DataObject) -> None:
    after_any_history_all_is_as_wanted(Simulated(), data)
