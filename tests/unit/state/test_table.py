"""The contract of a table: what a change reports, the optional parts, and the second between two looks."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network

import pytest

from flanneld.state.resources import Resource
from flanneld.state.table import (
    Explains,
    Failure,
    FindsBypasses,
    HasSessions,
    LastingTable,
    Notifies,
    Polled,
    Put,
    Report,
    Scope,
    Seen,
    TunnelSession,
)
from tests.clock import Clock
from tests.unit.reconcile.simulated_table import Thing

ONE, TWO = Thing("one"), Thing("two")


@pytest.mark.parametrize(
    ("report", "tells"),
    [
        (Report(), False),
        (Report(made=[ONE]), True),
        (Report(removed=[ONE]), True),
        (Report(failed=[Failure(ONE, "busy")]), True),
        (Report(pending=[ONE], details={ONE.key: "was missing"}), False),
    ],
    ids=["nothing", "made", "removed", "refused", "nothing new"],
)
def test_report_tells_whether_something_was_done_or_refused(report: Report, tells: bool) -> None:
    assert bool(report) is tells


def test_refusal_names_resource_and_reason() -> None:
    assert str(Failure(ONE, "busy", "stop it")) == f"{ONE}: busy"


def test_reports_add_up_in_all_parts() -> None:
    def of(thing: Thing) -> Report:
        return Report([thing], [thing], [Failure(thing, "busy")], [thing], {thing.key: thing.name})

    total = of(ONE)
    total.add(of(TWO))
    both: list[Resource] = [ONE, TWO]
    failed = [Failure(each, "busy") for each in both]
    assert total == Report(both, both, failed, both, {ONE.key: "one", TWO.key: "two"})


class File(LastingTable):
    """A file that another program has changed, or not."""

    name = what = "file"
    vital = False
    audit = None
    needs = frozenset()
    changed = False

    def has_changed(self) -> bool:
        return self.changed

    def read(self, scope: Scope) -> Sequence[Seen]:
        return [Seen(each) for each in scope.desired.values()]

    def put(self, puts: Sequence[Put]) -> Report:
        return Report(made=[put.want for put in puts])


def test_lasting_table_is_looked_at_each_second_and_keeps_what_is_there(clock: Clock) -> None:
    file = File(clock)
    assert file.next_look == clock.time + 1.0
    clock.time += 5.0
    assert file.look() is False
    assert file.next_look == clock.time + 1.0
    file.changed = True
    assert file.look() is True
    assert not file.drop([ONE])


def test_optional_parts_of_a_table_are_known_by_their_methods() -> None:
    class Whole:
        next_look = 0.0

        def part(self, *_: object) -> None:
            pass

        fileno = changes = explain = look = bypasses = sessions = part

    for part in (Notifies, Explains, Polled, FindsBypasses, HasSessions):
        assert isinstance(Whole(), part)
        assert isinstance(File(Clock()), part) is (part is Polled)


def test_session_is_plain_and_unknown_unless_told_otherwise() -> None:
    session = TunnelSession(IPv4Network("10.5.2.0/24"), is_established=False)
    assert (session.handshake, session.rx_bytes, session.tx_bytes) == (None, 0, 0)
    assert (session.is_silent, session.is_encapsulated, session.problem) == (False, False, "")


def test_what_an_earlier_run_left_is_not_claimed_unless_asked_for() -> None:
    assert not Scope({}).adopt
