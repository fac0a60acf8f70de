"""What the reconciler expects of every table, shown for each on a real kernel.

``tests/unit/reconcile/test_reconciler.py`` shows what it makes of that, over a simulated table.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flanneld.reconcile.reconciler import Reconciler, wanted_by_table
from flanneld.runtime import clock
from flanneld.state.diff import difference
from flanneld.state.report import Report
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Put, Scope
from tests.lab.namespace import Namespace, batch, remove
from tests.netns.conformance.subjects import SUBJECTS, Subject

_numbers = itertools.count(1)


@contextmanager
def host_of_one(name: str) -> Iterator[Subject]:
    """A namespace in which the block runs, with the table of this name."""
    namespace = Namespace(f"flc{os.getpid()}.{next(_numbers)}")
    batch(f"netns add {namespace.name}")
    try:
        with namespace.entered():
            namespace.ip(
                "link set lo up",
                "link add up0 type veth peer name up1",
                "link add other0 type vxlan id 9 local 192.0.2.1 dstport 4789 nolearning",
                *(f"link set {name} up" for name in ("up0", "up1", "other0")),
                "address add 192.0.2.1/24 dev up0",
                "address add fd77::1/64 dev up0 nodad",
                "link add vx4 type vxlan id 1 local 192.0.2.1 dev up0 dstport 8472 nolearning",
                "link add vx6 type vxlan id 1 local fd77::1 dev up0 dstport 8472 nolearning",
                "link set vx4 up",
                "link set vx6 up",
            )
            made = SUBJECTS[name](namespace)
            yield made
            made.close()
    finally:
        remove([namespace])


@pytest.fixture(params=SUBJECTS)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One machine, many hosts: each should have a lock of its own."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    found: str = request.param
    return found


@pytest.fixture
def subject(name: str) -> Iterator[Subject]:
    with host_of_one(name) as made:
        yield made


class Run:
    """The reconciler over one table, as one run of the daemon has it."""

    def __init__(self, subject: Subject, wanted: Sequence[Resource], *, sweeps: bool = True) -> None:
        self.table = subject.make()
        self.wanted: dict[Key, Resource] = {}
        self.want(wanted)
        self.sweeps = sweeps
        # What it needs is there: the host was made so.
        self.reconciler = Reconciler(
            [self.table],
            {self.table.name: self.wanted},
            lambda: False,
            permits=self,
            converged=set(self.table.needs),
        )

    def want(self, wanted: Sequence[Resource]) -> None:
        self.wanted.clear()
        self.wanted |= wanted_by_table(wanted).get(self.table.name, {})

    def converge(self) -> Report:
        return self.reconciler.converge(clock.now())

    def problem(self) -> str:
        (state,) = self.reconciler.states()
        return state.problem or "; ".join(map(str, state.failed))

    def holds_all(self) -> None:
        assert self.problem() == ""
        found = self.table.read(Scope(self.wanted))
        assert difference(self.wanted, found) == ([], [])

    def puts(self, table: str, puts: list[Put]) -> list[Put]:
        del table
        return puts

    def drops(self, stale: Mapping[str, Sequence[Resource]]) -> Mapping[str, Sequence[Resource]]:
        return stale if self.sweeps else {}


def shell(subject: Subject, command: str, *, check: bool = True) -> str:
    return subject.host.run("sh", "-c", command, check=check).stdout


def test_the_first_run_makes_all_and_a_second_writes_nothing(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    run.holds_all()
    again = Run(subject, subject.resources).converge()
    assert (again.made, again.removed, again.failed) == ([], [], [])


def test_each_property_that_others_change_is_put_right(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    for command in subject.drifts:
        shell(subject, command)
        found = run.table.read(Scope(run.wanted))
        assert difference(run.wanted, found) != ([], []), command
        run.converge()
        assert run.problem() == "", command
        run.holds_all()


def test_what_is_not_wanted_any_more_goes_and_the_rest_stays(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    run.want(subject.resources[:1])
    removed = run.converge().removed
    run.holds_all()
    assert {each.key for each in removed} == {each.key for each in subject.resources[1:]}


def test_what_a_killed_run_left_goes_with_the_next_one(subject: Subject) -> None:
    """The first run dies between putting and dropping: the next one knows nothing of it."""
    first = Run(subject, subject.resources, sweeps=False)
    first.converge()
    rest = subject.resources[1:] or subject.resources
    first.want(rest)
    assert first.converge().removed == []
    second = Run(subject, rest)
    second.reconciler.adopt = True
    second.converge()
    second.holds_all()


def test_what_is_not_ours_stays(subject: Subject) -> None:
    for command in subject.foreign:
        shell(subject, command)
    before = shell(subject, subject.shows_foreign)
    assert before or not subject.foreign
    run = Run(subject, subject.resources)
    run.converge()
    run.holds_all()
    run.want([])
    run.converge()
    # The devices that our objects stand on are part of what is shown for routes.
    assert shell(subject, subject.shows_foreign) == before


def test_a_reading_that_fails_changes_nothing(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    run.want([])
    with subject.blind(run.table):
        report = run.converge()
    assert (report.made, report.removed) == ([], [])
    assert run.problem()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_after_any_history_all_is_as_wanted(name: str, data: st.DataObject) -> None:
    with host_of_one(name) as subject:
        run = Run(subject, subject.resources)
        parts = st.lists(st.sampled_from(list(subject.resources)), unique_by=lambda each: each.key)
        deeds = st.one_of(st.sampled_from([*subject.drifts, "true"]), parts)
        for deed in data.draw(st.lists(deeds, max_size=8)):
            if isinstance(deed, str):
                shell(subject, deed, check=False)
            else:
                run.want(deed)
            match data.draw(st.sampled_from(["converge", "restart", "go on"])):
                case "converge":
                    run.converge()
                case "restart":
                    run = Run(subject, list(run.wanted.values()))
                    run.reconciler.adopt = True
        run.want(subject.resources)
        run.converge()
        if run.problem():
            # Others were there first, or took the place while no run of ours knew it to be ours.
            assert "is not flannel's" in run.problem()
            for command in subject.clears:
                shell(subject, command)
            run.converge()
        run.holds_all()
        after = run.converge()
        assert (after.made, after.removed) == ([], [])
